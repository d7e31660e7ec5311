"""An exported model in a folder: model.pt2 or model.pte, tokenizer files, and tightkv.json."""

import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import cpu_vec_isa

from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.export.operator import add_kernels, load_operator
from tightkv.files.atomic import whole_file
from tightkv.files.strict_json import parse_json
from tightkv.integrations.executorch import installed, load_pte, to_pte
from tightkv.integrations.transformers.export import ExportableModel, ExportError
from tightkv.pages.layout import MAX_TOKENS
from tightkv.version import __version__

ABOUT_FILE = "tightkv.json"
KERNEL_FILE = "model.kernels"  # beside a pt2 for a GPU
DEVICES = ("cpu", "cuda")
KINDS = ("pt2", "pte")  # AOTInductor, ExecuTorch
# AOTInductor's code only launches operators: optimizing it takes longer than it saves, and
# precompiled headers pay off from the second model on.
_COMPILER = {"compile_wrapper_opt_level": "O0", "precompile_headers": False}
_COMPILERS = ("g++", "c++", "clang++")
_SOURCE = "#include <locale>\nstd::locale made() { return std::locale(); }\n"
_SHARED = (b"libstdc++.so", b"libc++.")
_SCHEMA = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class About:
    """What tightkv.json says."""

    kind: str
    max_tokens: int
    dtype: str
    stop_tokens: list[int]
    cache_bytes: int
    config: dict[str, Any]
    torch: str
    device: str = "cpu"
    tightkv: str = __version__
    format: int = FORMAT_VERSION
    schema: int = _SCHEMA

    @property
    def model_file(self) -> str:
        return f"model.{self.kind}"


def write_package(
    model: Any,
    tokenizer: Any,
    quant: KVQuantConfig,
    folder: Path,
    *,
    max_tokens: int,
    kind: str = "pt2",
    backend: str | None = None,
    progress: Callable[[str], None],
) -> About:
    """Export, compile, and write everything; tightkv.json comes last. `backend` is for a pte.

    A pt2 is for the device that the model is on.
    """
    if kind == "pt2":
        try:
            shared_library_compiler()
        except NoCompilerError as error:
            raise ExportError(str(error)) from None
    else:
        installed()
    folder.mkdir(parents=True, exist_ok=True)
    progress("measuring the model and making its caches")
    exportable = ExportableModel(model.requires_grad_(False), quant, max_tokens=max_tokens)
    progress("tracing")
    try:
        program = exportable.program()
    except (RuntimeError, TypeError, torch._dynamo.exc.TorchDynamoException) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(f"torch.export cannot trace {type(model).__name__}: {reason}") from error
    progress("compiling, which takes minutes")
    about = About(
        kind=kind,
        max_tokens=max_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        stop_tokens=_stop_tokens(model, tokenizer),
        cache_bytes=exportable.cache_bytes(),
        config=quant.to_dict(),
        torch=torch.__version__,
        device=model.device.type,
    )
    kernels = exportable.kernel_file() if about.device == "cuda" else b""
    with whole_file(folder / about.model_file) as path:
        if kind == "pt2":
            compile_pt2(program, path, about.device)
        else:
            methods = _runner_methods(model, tokenizer, about)
            path.write_bytes(to_pte(program, backend=backend or "xnnpack", **methods))
        (folder / ABOUT_FILE).unlink(missing_ok=True)  # that of an earlier model
        if kernels:
            with whole_file(folder / KERNEL_FILE) as kernel_file:
                kernel_file.write_bytes(kernels)
    tokenizer.save_pretrained(folder)
    with whole_file(folder / ABOUT_FILE) as path:
        path.write_text(json.dumps(asdict(about), indent=2) + "\n", encoding="utf-8")
    return about


def compile_pt2(
    program: torch.export.ExportedProgram, path: Path, device: str, **options: Any
) -> None:
    """An AOTInductor package; `options` are more of `torch._inductor.config.aot_inductor`."""
    package = path.with_name(path.name + ".pt2")  # torch wants that ending
    known = {k: v for k, v in _COMPILER.items() if hasattr(torch._inductor.config.aot_inductor, k)}
    configs = {f"aot_inductor.{name}": value for name, value in {**known, **options}.items()}
    configs["cpp.cxx"] = (shared_library_compiler(),)
    try:
        with _vector_instructions_of(device):
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(package), inductor_configs=configs
            )
        package.replace(path)
    finally:
        package.unlink(missing_ok=True)


def load_pt2(path: Path, device: str) -> Any:
    """The model of a package, for one thread: then CUDA graphs capture its work alone."""
    with _vector_instructions_of(device):
        return torch._inductor.aoti_load_package(str(path), run_single_threaded=True)


@contextmanager
def _vector_instructions_of(device: str) -> Iterator[None]:
    """Torch does not look for the CPU's vector instructions if the model is for a GPU.

    To find them it compiles programs and starts a process for each: half a minute on x86.
    """
    module: Any = cpu_vec_isa
    before = module.valid_vec_isa_list
    if device != "cpu":
        module.valid_vec_isa_list = list
    try:
        yield
    finally:
        module.valid_vec_isa_list = before


def _runner_methods(model: Any, tokenizer: Any, about: About) -> dict[str, Any]:
    """What ExecuTorch's text runner asks of a file."""
    first = tokenizer.bos_token_id
    return {
        "get_max_seq_len": about.max_tokens,
        "get_max_context_len": about.max_tokens,
        "get_vocab_size": model.config.get_text_config().vocab_size,
        "get_bos_id": 0 if first is None else first,
        "get_eos_ids": about.stop_tokens,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
    }


def read_about(folder: Path) -> About:
    """tightkv.json, checked."""
    path = folder / ABOUT_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {ABOUT_FILE}; give a folder that tightkv export wrote"
        )
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{str(path)!r} is larger than {_MOST_BYTES} bytes")
    try:
        fields = parse_json(data)
        about = About(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not what tightkv export wrote: {error}") from None
    if (about.schema, about.format) != (_SCHEMA, FORMAT_VERSION):
        raise ValueError(
            f"{str(path)!r} has schema {about.schema!r} and format {about.format!r}; this tightkv "
            f"reads {_SCHEMA} and {FORMAT_VERSION}: export the model again"
        )
    for name, value, allowed in (("kind", about.kind, KINDS), ("device", about.device, DEVICES)):
        if value not in allowed:
            raise ValueError(f"{str(path)!r} has {name}={value!r}; supported: {', '.join(allowed)}")
    names = [about.model_file] + [KERNEL_FILE] * (about.device == "cuda")
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{str(folder)!r} has no {name}; export it again")
    stops = about.stop_tokens
    if (
        type(about.max_tokens) is not int
        or not 1 <= about.max_tokens <= MAX_TOKENS
        or type(stops) is not list
        or any(type(token) is not int for token in stops)
    ):
        raise ValueError(
            f"{str(path)!r} has max_tokens={about.max_tokens!r} and stop_tokens={stops!r}; "
            f"expected 1 to {MAX_TOKENS}, and a list of whole numbers"
        )
    return about


def load_package(folder: Path, about: About) -> Callable[[Tensor, Tensor], Tensor]:
    """(input_ids [1, T], cache_position [T]) -> logits. A pt2 is machine code: trust its maker."""
    path = folder / about.model_file
    if about.kind == "pte":
        return load_pte(path)
    load_operator()
    if about.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{str(path)!r} was exported for a GPU; there is none here")
        add_kernels((folder / KERNEL_FILE).read_bytes())
    versions = f"it was exported with torch {about.torch}, this is {torch.__version__}"
    if about.torch != torch.__version__:
        warnings.warn(f"{str(path)!r} may not run here: {versions}", stacklevel=1)
    try:
        run: Callable[[Tensor, Tensor], Tensor] = load_pt2(path, about.device)
    except RuntimeError as error:
        raise ValueError(
            f"{str(path)!r} cannot be loaded ({versions}); export it again: {error}"
        ) from None
    return lambda ids, position: run(ids.to(about.device), position.to(about.device))


def _stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    return [] if found is None else [found] if isinstance(found, int) else list(found)


# --- a C++ compiler whose libraries torch can load ---
class NoCompilerError(RuntimeError):
    """There is none, or none that links the C++ library as a shared one."""


def shared_library_compiler() -> str:
    """$CXX, or the first of $PATH, whose libraries have no copy of the C++ library in them.

    One that has crashes in std::regex when torch loads it: two copies do not share locales.
    """
    return _first_that_shares(os.environ.get("CXX"), os.environ.get("PATH", os.defpath))


@cache
def _first_that_shares(given: str | None, path: str) -> str:
    tried = list(dict.fromkeys(_compilers(given, path)))
    for compiler in tried:
        if _shares(compiler):
            if given and compiler != given:
                warnings.warn(f"CXX={given} cannot be used here; {compiler} is", stacklevel=3)
            return compiler
    if not tried:
        raise NoCompilerError("AOTInductor compiles C++; install a compiler (g++ or clang++)")
    raise NoCompilerError(
        "torch could not load what these compilers make, because it has a copy of the C++ library "
        f"in it, or because they fail: {', '.join(tried)}; set CXX to one that links libstdc++.so"
    )


def _compilers(given: str | None, path: str) -> Iterator[str]:
    if given and shutil.which(given, path=path):
        yield given
    for folder in path.split(os.pathsep):
        for name in _COMPILERS:
            if folder and (found := shutil.which(name, path=folder)):
                yield found


def _shares(compiler: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="tightkv-cxx-") as folder:
        source, library = Path(folder, "made.cpp"), Path(folder, "made.so")
        source.write_text(_SOURCE, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True).returncode:
            return False
        data = library.read_bytes()
    return any(name in data for name in _SHARED)
