"""The installed package: its version, its dependencies, its command, and a light import."""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import tightkv
from tightkv.config import KVQuantConfig
from tightkv.math.per_device import PerDevice
from tightkv.moved import MOVED, new_name
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import page_layout

ROOT = Path(__file__).parents[2]
HEAVY = ("gguf", "lm_eval", "matplotlib", "numpy", "scipy", "transformers", "triton", "vllm")

# torch may bring some of these itself; only what tightkv adds counts.
NEW_MODULES = """
import sys
import torch
before = set(sys.modules)
import tightkv
print(*(set(sys.modules) - before))
"""

# argv: "vllm" for the modules that need it. Prints how many were imported.
IMPORT_MOVED = """
import sys, warnings
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
import tightkv
from tightkv.math.per_device import PerDevice
from tightkv.moved import MOVED

count, vllm = 0, sys.argv[1:] == ["vllm"]
there = [module.name for module in walk_packages(tightkv.__path__, "tightkv.")]
for old, new in MOVED.items():
    old, new = f"tightkv.{old}", f"tightkv.{new}"
    for name in [new, *(name for name in there if name.startswith(new + "."))]:
        former = old + name.removeprefix(new)
        assert find_spec(former).origin == find_spec(name).origin, former
        if vllm != ("integrations.vllm" in name) or name.endswith(("lm_eval", "_kernels")):
            continue
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                module = import_module(former)
            except ImportError as error:  # an optional package is not installed
                assert "tightkv" not in (error.name or ""), former
                continue
        assert f"{former} is now {name}" in [str(one.message) for one in told], former
        assert module is import_module(name) is sys.modules[former], former
        assert (module.__name__, module.__spec__.name) == (name, name), former
        count += 1
print(count)
"""


def test_version_is_the_installed_one() -> None:
    assert tightkv.__version__ == metadata.version("tightkv")


def test_the_changelog_begins_with_this_version() -> None:
    """`## X.Y.Z (YYYY-MM-DD)`, or (unreleased); each version once, the newest first."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    found = [
        re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d|unreleased)\)", h) for h in heads
    ]
    assert all(found), heads
    versions = [tuple(map(int, head.groups()[:3])) for head in found if head]
    assert ".".join(map(str, versions[0])) == tightkv.__version__
    assert versions == sorted(set(versions), reverse=True)
    assert all("unreleased" not in head for head in heads[1:])


def test_torch_is_the_only_base_dependency() -> None:
    requirements = metadata.requires("tightkv") or []
    assert [line for line in requirements if "extra ==" not in line] == ["torch>=2.8"]


def test_import_adds_no_heavy_module() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True
    )
    added = {name.partition(".")[0] for name in run.stdout.split()}
    assert "tightkv" in added
    assert added.isdisjoint(HEAVY), sorted(added & set(HEAVY))


def test_console_script_points_at_the_cli() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="tightkv")
    assert script.value == "tightkv.tools.cli:main"


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have everything")
def test_ci_skips_nothing_but_gpus() -> None:
    """What is missing is skipped elsewhere; here a broken install or build must be noticed."""
    import cuda_on_host
    from tightkv.export import operator_library
    from tightkv.kernels.cpu import backend as cpu

    assert operator_library().is_file()
    assert cuda_on_host.COMPILER is not None
    assert cpu.unavailable("cpu") is None
    wanted = ["lm_eval", "datasets", "matplotlib", "transformers", "triton"]
    wanted += ["vllm"] if sys.version_info >= (3, 11) else []
    assert [name for name in wanted if importlib.util.find_spec(name) is None] == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("args", [[], pytest.param(["vllm"], marks=pytest.mark.vllm)])
def test_an_old_name_is_the_very_module(args: list[str]) -> None:
    """Each of MOVED, and each module in it, imported under the old name first."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_MOVED, *args], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= sum(("vllm" in name) == bool(args) for name in MOVED) - 5


def test_every_module_that_was_moved_has_its_old_name() -> None:
    folder = ROOT / "src/tightkv"
    for old, new in MOVED.items():
        assert not (folder / f"{old.replace('.', '/')}.py").exists(), old
        moved = folder / new.replace(".", "/")
        assert moved.is_dir() or moved.with_suffix(".py").is_file(), new


def test_old_names_are_for_others() -> None:
    paths = [path for name in ("src", "tests") for path in (ROOT / name).rglob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            assert [name for name in names if new_name(name)] == [], path


def test_a_pickle_made_under_old_names_loads() -> None:
    layout = page_layout(KVQuantConfig(), 2, 64, torch.bfloat16)
    table = SequenceTable(KVQuantConfig())
    table.add_rows([0])
    kv = PagedKV(layout, table, torch.device("cpu"), "reference")
    kv._kernels = "tightkv.kernels.reference"  # a module's name, as pickles had it
    data = pickle.dumps(kv, protocol=2)  # module names are lines of it
    for old, new in MOVED.items():
        data = data.replace(f"ctightkv.{new}\n".encode(), f"ctightkv.{old}\n".encode())
    assert b"ctightkv.cache\n" in data and b"ctightkv.paged.cache\n" not in data
    with pytest.warns(DeprecationWarning, match=r"tightkv\.cache is now tightkv\.paged\.cache"):
        sys.modules.pop("tightkv.cache", None)
        loaded = pickle.loads(data)
    assert type(loaded) is PagedKV
    assert loaded.layout == layout and loaded.kernels.NAME == "reference"


def test_pickles_of_before_have_exact_windows() -> None:
    cfg = KVQuantConfig(window_bits=16)
    del cfg.__dict__["window_bits"]  # a field that there was not
    assert pickle.loads(pickle.dumps(cfg)) == KVQuantConfig(window_bits=16)
    table = SequenceTable(cfg, encode_partial_page=False)
    table.append(table.add_rows([0]), [100])
    table.__dict__["exact_limit"] = 263
    with pytest.raises(ValueError, match=r"an older tightkv; save it there with TightCache\.save"):
        pickle.loads(pickle.dumps(table))
    table.clear()
    assert not hasattr(pickle.loads(pickle.dumps(table)), "exact_limit")


def test_old_names_can_be_run_and_looked_for() -> None:
    command = [sys.executable, "-m", "tightkv.eval.text"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert importlib.util.find_spec("tightkv.eval.no_such_module") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tightkv\.eval\.no_such"):
        importlib.import_module("tightkv.eval.no_such_module")


IMPORT_IN_THREADS = """
import random, sys, threading, warnings
from importlib import import_module
warnings.simplefilter("ignore")
sys.setswitchinterval(1e-5)
import tightkv
from tightkv.math.per_device import PerDevice
from tightkv.moved import MOVED

moved = [name for name in MOVED if "." not in name and not MOVED[name].startswith("tools")]
names = [f"tightkv.{name}" for name in (*moved, *(MOVED[name] for name in moved))]

def import_one(name):
    # Python may refuse a package and a part of it that two threads import at once (gh-83065).
    try:
        import_module(name)
    except RuntimeError as error:
        if "deadlock detected" not in str(error):
            raise
        import_one(name)

def import_all(seed):
    for name in random.Random(seed).sample(names, len(names)):
        import_one(name)

threads = [threading.Thread(target=import_all, args=(seed,)) for seed in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for name in moved:
    module = sys.modules[f"tightkv.{name}"]
    assert module is sys.modules[f"tightkv.{MOVED[name]}"], name
    assert module.__spec__.name == f"tightkv.{MOVED[name]}", name
"""


def test_threads_may_import_old_and_new_names_at_once() -> None:
    """A finder that imports, which is called under the import lock, would stop them for ever."""
    command = [sys.executable, "-c", IMPORT_IN_THREADS]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0 and not run.stderr, run.stderr


def test_a_constant_of_an_older_pickle_is_the_same() -> None:
    value = torch.arange(3.0)
    constant = PerDevice.__new__(PerDevice)
    constant.__setstate__({"_copies": {value.device: value}, "_source": value.device})
    assert torch.equal(constant.on(value.device), value)
