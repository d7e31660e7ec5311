"""The CUDA C++ kernels, compiled for this machine's CPU (cuda_on_host.h): what CI runs of them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tightkv.kernels.cuda import source

COMPILER = shutil.which("g++")
COMMAND = [str(COMPILER), "-std=c++17", "-O1", "-fno-strict-aliasing", "-fPIC", "-w"]
COMMAND.append("-U_FORTIFY_SOURCE")  # it takes a jump between stacks for a mistake
COMMAND.append("-ffp-contract=off")  # what __fmul_rn gives is rounded
COMMAND.append("-fno-gnu-unique")  # shared memory of inline functions is this library's own
ARCH = 900  # of sm_90: sources differ by it
HEADER = Path(__file__).with_name("cuda_on_host.h")
_PTX = re.compile(r'#line 1 "ptx\.cuh"\n.*?(?=#line )', re.DOTALL)  # the header takes its place
_FOLDER = tempfile.TemporaryDirectory(prefix="tightkv-cuda-on-host-")  # removed with the process
_APPEND = """
extern "C" void host_append(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] { append(*(AppendParams *)args[0]); });
}
extern "C" void host_append_few(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] {
        append_few(*(AppendParams *)args[0], *(int *)args[1], *(int *)args[2]);
    });
}
"""
_SEAL = """
extern "C" void host_seal(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] {
        seal(*(AppendParams *)args[0], *(float **)args[1], *(int *)args[2]);
    });
}
extern "C" void host_append_and_seal(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] {
        append_and_seal(*(AppendParams *)args[0], *(float **)args[1], *(int *)args[2],
                        *(int *)args[3]);
    });
}
"""
_LAYERS = """
extern "C" void host_%s(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] { %s(*(SealParams *)args[0]); });
}
"""
_DECODE = """
extern "C" void host_decode(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] { decode(*(DecodeParams *)args[0]); });
}
extern "C" void host_merge(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] {
        merge(*(float **)args[0], *(float **)args[1], *(u16 **)args[2], *(int **)args[3],
              *(int **)args[4], *(u16 **)args[5], *(float **)args[6], *(long long *)args[7],
              *(long long *)args[8], *(int *)args[9], *(int *)args[10], *(int *)args[11]);
    });
}
"""
_STATIC_STEP = """
extern "C" void host_static_step(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] { static_step(*(StepParams *)args[0]); });
}
"""
_SPLIT_PLAN = """
extern "C" void host_split_plan(const int *shape, int threads, size_t shared, void **args) {
    host::launch(shape, threads, shared, [&] { split_plan(*(PlanParams *)args[0]); });
}
"""
_LAUNCHERS = {"append": _APPEND, "decode": _DECODE, "seal": _SEAL}
_LAUNCHERS |= {name: _LAYERS % (name, name) for name in ("seal_layers", "center_layers")}


class HostModule:
    """`nvrtc.Module`, but it runs here and now."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, shared: int = 0
    ) -> None:
        pointers = (ctypes.c_void_p * len(args))(
            *[ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in args]
        )
        shape = (ctypes.c_int * 3)(*grid)
        getattr(self._library, f"host_{name}")(shape, threads, ctypes.c_size_t(shared), pointers)

    def previous_writes(self, x: Any, data: Any = None) -> None:
        """The kernel before the next launch writes x only when it is waited for: data, or bits."""
        size = ctypes.c_size_t(x.numel() * x.element_size())
        source = ctypes.c_void_p(None if data is None else data.data_ptr())
        self._library.host_previous_writes(ctypes.c_void_p(x.data_ptr()), source, size)


@functools.cache
def module(
    name: str, layout: Any, query_heads: int, tile: Any, softcap: bool, _: Any
) -> HostModule:
    """In place of `cuda._module`."""
    return _compile(source.source(name, layout, query_heads, tile, softcap), _LAUNCHERS[name])


@functools.cache
def static_step_module() -> HostModule:
    return _compile(source.included(source.STATIC_STEP), _STATIC_STEP)


@functools.cache
def of_source(text: str) -> HostModule:
    """Of what a kernel's wrapper would compile for a GPU."""
    parts = {
        " decode(": _DECODE,
        " append(": _APPEND,
        " seal(": _SEAL,
        " static_step(": _STATIC_STEP,
        " split_plan(": _SPLIT_PLAN,
    }
    return _compile(text, "".join(part for name, part in parts.items() if name in text))


@functools.cache
def _precompiled() -> Path:
    """A copy of the header with its compiled form beside it, which saves a second per source."""
    header = Path(_FOLDER.name) / HEADER.name
    shutil.copy(HEADER, header)
    subprocess.run([*COMMAND, "-x", "c++-header", str(header)], check=True)
    return header


def _compile(text: str, launchers: str) -> HostModule:
    text, found = _PTX.subn("", text)
    assert found == 1
    text = f'#include "{_precompiled()}"\n#define __CUDA_ARCH__ {ARCH}\n' + text + launchers
    text = text.replace(
        "extern __shared__ __align__(128) char memory[];", "char *memory = host::memory;"
    )
    path = Path(_FOLDER.name) / hashlib.sha256(text.encode()).hexdigest()[:16]
    path.with_suffix(".cpp").write_text(text, encoding="utf-8")
    command = [*COMMAND, "-shared", "-o", path.with_suffix(".so"), path.with_suffix(".cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return HostModule(ctypes.CDLL(str(path.with_suffix(".so"))))
