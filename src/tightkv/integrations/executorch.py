"""Exported models as .pte files of ExecuTorch, and the operator library its runtime loads."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightkv.config import cache_root
from tightkv.export.operator import load_operator
from tightkv.integrations.extras import install_hint, installed_version
from tightkv.kernels.cpu import library

BACKENDS = ("xnnpack", "portable")
_INSTALL = install_hint("executorch")
_SOURCE = Path(__file__).parents[1] / "export" / "executorch_operator.cpp"
_LIBRARIES = ("executorch", "executorch_threadpool")
_FLAGS = ("-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread")
# As in the wheel's executorch-config.cmake, like the folders of headers below.
_DEFINES = (
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    "-DET_EVENT_TRACER_ENABLED",
    "-DET_USE_THREADPOOL",
)


class ExecuTorchError(OSError):
    """ExecuTorch is not there or another version, or a compiler refuses."""


def installed() -> tuple[Path, str]:
    """The installed package and its version."""
    spec = importlib.util.find_spec("executorch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ExecuTorchError(f"ExecuTorch is not installed: {_INSTALL}")
    version = installed_version("executorch")
    if version is None or not version.startswith("1.5."):
        raise ExecuTorchError(f"executorch {version}; supported: 1.5: {_INSTALL}")
    return Path(folders[0]), version


# --- the operator library ---
@lru_cache(maxsize=1)
def operator_library() -> Path:
    """The library to load beside a .pte; compiled at first use, then kept for this version."""
    wheel, version = installed()
    native = Path(library.__file__).with_name("native")
    sources = [*sorted(native.glob("*.c")), _SOURCE]
    key = hashlib.sha256("\0".join([version, *_FLAGS, *_DEFINES]).encode())
    for source in (*sources, *sorted(native.glob("*.h"))):
        key.update(source.read_bytes())
    folder = _own_folder(cache_root() / "executorch")
    path = folder / f"libtightkv_executorch-{key.hexdigest()[:32]}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            os.replace(_compile(sources, native, wheel, Path(work)), path)
    return path


def _own_folder(folder: Path) -> Path:
    """The folder if only its owner can write to it, else a new one: it has libraries."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    return Path(tempfile.mkdtemp(prefix="tightkv-"))


def _compile(sources: list[Path], native: Path, wheel: Path, work: Path) -> Path:
    c, cxx = (next(filter(None, map(shutil.which, names)), None) for names in _COMPILERS)
    if c is None or cxx is None:
        raise ExecuTorchError(
            "the operator for ExecuTorch is compiled at first use; install a C and a C++ compiler "
            "(gcc and g++, or clang)"
        )
    objects = []
    for source in sources:
        objects.append(str(work / f"{source.stem}.o"))
        if source.suffix == ".c":
            command = [c, "-std=gnu11"]
        else:
            include = wheel / "include"
            folders = (include, include / "executorch/runtime/core/portable_type/c10")
            command = [cxx, "-std=c++17", *_DEFINES, *(f"-I{folder}" for folder in folders)]
        _call([*command, *_FLAGS, f"-I{native}", "-c", str(source), "-o", objects[-1]])
    out = work / "library.so"
    folder = wheel / "lib"
    link = [f"-L{folder}", f"-Wl,-rpath,{folder}", *(f"-l{name}" for name in _LIBRARIES)]
    _call([cxx, "-shared", "-pthread", *objects, "-o", str(out), *link, "-lm"])
    return out


_COMPILERS = (("gcc", "clang", "cc"), ("g++", "clang++", "c++"))


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise ExecuTorchError(f"{command[0]} cannot build the operator for ExecuTorch: {reason}")


# --- files ---
def to_pte(
    program: torch.export.ExportedProgram, *, backend: str = "xnnpack", **constants: Any
) -> bytes:
    """The .pte of an exported program; `constants` become methods that runners ask."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}; supported: {', '.join(BACKENDS)}")
    installed()
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )

    _define_out()
    partitioners = []
    if backend == "xnnpack":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners = [XnnpackPartitioner()]
    edge = to_edge_transform_and_lower(
        program,
        partitioner=partitioners,
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        constant_methods=constants or None,
    )
    pte: bytes = edge.to_executorch(ExecutorchBackendConfig()).buffer
    return pte


def load_pte(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """(input_ids [1, T], cache_position [T]) -> logits, in ExecuTorch's runtime."""
    installed()
    from executorch.extension.pybindings import portable_lib

    ctypes.CDLL(str(operator_library()), mode=ctypes.RTLD_GLOBAL)
    module = portable_lib._load_for_executorch(str(path))

    def run(input_ids: Tensor, cache_position: Tensor) -> Tensor:
        logits: Tensor = module.run_method("forward", (input_ids, cache_position))[0]
        return logits

    return run


@lru_cache(maxsize=1)
def _define_out() -> torch.library.Library:
    """The operator's overload with an output that ExecuTorch plans memory for."""
    load_operator()
    schema = str(torch.ops.tightkv.static_attention.default._schema)
    arguments = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    fragment = torch.library.Library("tightkv", "FRAGMENT")
    fragment.define(f"static_attention.out({arguments}, *, Tensor(e!) out) -> Tensor(e!)")
    fragment.impl("static_attention.out", _out, "CPU")
    fragment.impl("static_attention.out", lambda *arguments, out: out, "Meta")
    return fragment


def _out(*arguments: Any, out: Tensor) -> Tensor:
    return out.copy_(torch.ops.tightkv.static_attention(*arguments))
