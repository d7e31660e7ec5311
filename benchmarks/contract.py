"""What src/ takes from vLLM and transformers, checked against the Python files of a release.

    python benchmarks/contract.py FOLDER [--store FILE]

FOLDER holds the package, vllm or transformers, as site-packages or an unpacked wheel does. Nothing
of it is imported, so a release that cannot run on this machine is checked too. A line is printed
for every name that is not there, for every function of ours that cannot be called like the one
that it overrides or replaces, and for every call whose arguments are not taken.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "tightkv"
_CORE, _CONNECTORS = "vllm.v1.core", "vllm.distributed.kv_transfer.kv_connector.v1"
_CONNECTOR = f"{_CONNECTORS}.base:KVConnectorBase_V1"
# Functions of ours that take the place of vLLM's without being methods of a subclass.
REPLACED = {
    "plugin.py": {
        "_initialize_kv_caches": "vllm.v1.engine.core:EngineCore",
        "get_kv_cache_spec": "vllm.model_executor.layers.attention.attention:Attention",
    },
    "prefix_hits.py": {
        "_reachable_store_block_mask": (
            f"{_CONNECTORS}.offloading.scheduler:OffloadingConnectorScheduler"
        ),
        "cache_blocks": f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "find_longest_cache_hit": f"{_CORE}.kv_cache_coordinator:HybridKVCacheCoordinator",
        "get_num_new_matched_tokens": _CONNECTOR,
    },
    "engine_core.py": {"get_request_block_hasher": f"{_CORE}:kv_cache_utils"},
    "store_loads.py": {
        "execute_model": "vllm.v1.worker.worker_base:WorkerBase",
        "reset_prefix_cache": f"{_CORE}.sched.scheduler:Scheduler",
        "schedule": f"{_CORE}.sched.scheduler:Scheduler",
        "update_state_after_alloc": _CONNECTOR,
    },
}
Found = Mapping[str, str | bool]
"""Of each name: the parameters of a function, True for anything else, False if it is not there."""


@dataclass(frozen=True)
class Need:
    """A name of a package that a line of ours uses, `module:name` or `module:name.attribute`."""

    key: str
    where: str
    takes: str | None = None
    """Parameters of our function that overrides or replaces it."""
    call: ast.Call | None = None
    optional: bool = False


def needs(package: str, src: Path = SRC) -> list[Need]:
    """What the files of `src` take from a package."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(src.rglob("*.py"))}
    return [
        need
        for path, text in texts.items()
        if path.name in REPLACED or re.search(rf"(from|import) {package}\b", text)
        for need in _needs_of_file(path.name, ast.parse(text), package)
    ]


def _needs_of_file(file: str, tree: ast.Module, package: str) -> Iterator[Need]:
    nodes, names = list(ast.walk(tree)), dict[str, str]()
    replaced = REPLACED.get(file, {}) if package == "vllm" else {}
    tried = (x for node in nodes if isinstance(node, ast.Try) for x in node.body)
    guarded = {id(x) for node in tried for x in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
            for alias in node.names:
                names[alias.asname or alias.name] = key = f"{node.module}:{alias.name}"
                yield Need(key, f"{file}:{node.lineno}", optional=id(node) in guarded)
    for node in nodes:
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and (key := _key(node, names)):
            yield Need(key, where)
        elif isinstance(node, ast.Call) and (key := _key(node.func, names)):
            yield Need(key, where, call=node)
        elif isinstance(node, ast.ClassDef):
            bases = [key for base in node.bases if (key := _key(base, names))]
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name != "__init__":
                    at, takes = f"{file}:{method.lineno}", _parameters(method)
                    yield from (Need(f"{x}.{method.name}", at, takes, None, True) for x in bases)
        elif isinstance(node, ast.FunctionDef) and node.name in replaced:
            yield Need(f"{replaced[node.name]}.{node.name}", where, _parameters(node))


def _key(node: ast.expr, names: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Subscript):
        return _key(node.value, names)
    if isinstance(node, ast.Attribute):
        owner = names.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return None if owner is None else f"{owner}.{node.attr}"
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names, and which of them have defaults; `original` is no parameter of vLLM's."""
    args = function.args
    args.args = [x for x in args.args if x.arg != "original"]
    for x in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if x is not None:
            x.annotation = None
    none = ast.Constant(None)
    args.defaults = [none for _ in args.defaults]
    args.kw_defaults = [default and none for default in args.kw_defaults]
    return ast.unparse(args)


class Release:
    """The names of a release, read from its Python files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> str | bool:
        module, _, path = key.partition(":")
        name, _, attribute = path.partition(".")
        found = self._resolve(module, name)
        if isinstance(found, str):
            return self.find(f"{found}:{attribute}") if attribute else True
        if isinstance(found, bool) or not attribute:
            node = None if isinstance(found, bool) else found[1]
            return _parameters(node) if isinstance(node, ast.FunctionDef) else bool(found)
        return self._member(*found, attribute)

    @cache  # noqa: B019
    def _file(self, module: str) -> tuple[str, bool] | None:
        """A module's text, and whether it is a package's."""
        path = self.folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8"), file.name == "__init__.py"
        return None

    def _resolve(self, module: str, name: str) -> tuple[str, ast.stmt] | str | bool:
        """A definition and its module; the name of a module; whether there is another such name."""
        if (found := self._file(module)) is None:
            return False
        text, is_package = found
        stars = []
        for node in _statements(text) if name in text or "import *" in text else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                source = _absolute(node, module, is_package)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        own = source.split(".")[0] == module.split(".")[0]
                        return self._resolve(source, alias.name) if own else True
                    if alias.name == "*":
                        stars.append(source)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and _binds(node, name):
                return True
        if is_package and self._file(f"{module}.{name}") is not None:
            return f"{module}.{name}"
        if f'"{name}"' in text:  # a package's table of what it imports when it is asked for
            return True
        found = (self._resolve(source, name) for source in stars)
        return next((one for one in found if one), False)

    def _member(self, module: str, node: ast.stmt, name: str) -> str | bool:
        if not isinstance(node, ast.ClassDef):
            return True
        for part in ast.walk(node):
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and part.name == name:
                return _parameters(part)
            if isinstance(part, (ast.Assign, ast.AnnAssign)) and _binds(part, name):
                return True
        for base in node.bases:
            given = base.value if isinstance(base, ast.Subscript) else base
            found = self._resolve(module, given.id) if isinstance(given, ast.Name) else False
            there = self._member(*found, name) if isinstance(found, tuple) else False
            if there is not False:
                return there
        return False


@cache
def _statements(text: str) -> list[ast.AST]:
    """Of a module, those under conditions too."""
    found = list(ast.iter_child_nodes(ast.parse(text)))
    for node in found:  # which grows
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
            found += ast.iter_child_nodes(node)
    return found


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    parts = module.split(".")
    before = parts[: len(parts) - node.level + is_package] if node.level else []
    return ".".join([*before, *([node.module] if node.module else [])])


def _binds(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(name in (getattr(x, "id", None), getattr(x, "attr", None)) for x in targets)


def breaks(wanted: list[Need], found: Found, before: Found = {}) -> list[str]:  # noqa: B006
    """A line for each need that is not met; what `found` does not name is not checked.

    `before` is of an older release: what our methods override there is overridden still.
    """
    lines = {}
    for need in wanted:
        theirs = found.get(need.key, True)
        if theirs is False and (not need.optional or before.get(need.key, False) is not False):
            lines[need.where, need.key] = f"{need.where}: there is no {need.key}"
        elif isinstance(theirs, str) and (why := _obstacle(need, theirs)) is not None:
            lines[need.where, need.key] = f"{need.where}: {need.key}({theirs}): {why}"
    return list(lines.values())


def _obstacle(need: Need, theirs: str) -> str | None:
    given = _signature(theirs)
    if need.call is not None:
        words = {x.arg: 0 for x in need.call.keywords if x.arg is not None}
        open_ended = len(words) < len(need.call.keywords) or any(
            isinstance(x, ast.Starred) for x in need.call.args
        )
        args = need.call.args[theirs.startswith("self") :]  # Class.method(self, ...)
        return _refusal(given.bind_partial if open_ended else given.bind, len(args), words)
    if need.takes is None:
        return None
    ours = _signature(need.takes)
    for some in (lambda x: True, lambda x: x.default is x.empty):  # all arguments, as few as can be
        taken = [x for x in given.parameters.values() if some(x)]
        placed = [x for x in taken if x.kind == x.POSITIONAL_OR_KEYWORD]
        words = {x.name: 0 for x in taken if x.kind == x.KEYWORD_ONLY}
        ways = ((len(placed), words), (0, words | {x.name: 0 for x in placed}))
        for count, named in ways:
            if (why := _refusal(ours.bind, count, named)) is not None:
                return f"ours({need.takes}) {why}"
    return None


def _signature(takes: str) -> inspect.Signature:
    """Of parameters without self."""
    scope: dict[str, object] = {}
    exec(f"def function({re.sub(r'^(self|cls)(, |$)', '', takes)}): ...", scope)
    return inspect.signature(scope["function"])


def _refusal(bind: Callable[..., object], count: int, words: dict[str, int]) -> str | None:
    try:
        bind(*[0] * count, **words)
    except TypeError as error:
        return str(error)
    return None


def found_in(folder: Path, wanted: list[Need]) -> dict[str, str | bool]:
    """What `folder` has of the names that are needed."""
    release = Release(folder)
    return {key: release.find(key) for key in sorted({need.key for need in wanted})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path, help="a JSON file for what was found")
    args = parser.parse_args()
    packages = [name for name in ("vllm", "transformers") if (args.folder / name).is_dir()]
    if not packages:
        parser.error(f"{args.folder} has neither vllm nor transformers in it")
    lines: list[str] = []
    found: dict[str, str | bool] = {}
    for package in packages:
        wanted = needs(package)
        found |= (there := found_in(args.folder, wanted))
        lines += breaks(wanted, there)
    if args.store is not None:
        needed = {need.key for need in wanted if not need.optional}
        kept = {key: there for key, there in found.items() if there is not False or key in needed}
        args.store.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
