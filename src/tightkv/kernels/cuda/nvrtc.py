"""Compile CUDA C++ when it is first needed, keep the result on disk, launch it.

torch ships NVRTC and the driver is there whenever CUDA is, so nothing is compiled or installed
beforehand. Only the few calls needed are bound, through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import stat
import sysconfig
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tightkv.config import cache_root
from tightkv.files import whole_file


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@functools.lru_cache(maxsize=1)
def nvrtc() -> ctypes.CDLL:
    """torch's own NVRTC; OSError if there is none."""
    return load_nvrtc(str(torch.version.cuda).split(".")[0])


def load_nvrtc(major: str) -> ctypes.CDLL:
    """NVRTC of a major version of CUDA, as torch or the package nvidia-cuda-nvrtc install it."""
    name = f"libnvrtc.so.{major}"
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [p for f in folders for p in glob.glob(f"{f}/nvidia/*/lib/{name}*")]
    errors = []
    for candidate in [name, *found, f"/usr/local/cuda/lib64/{name}"]:
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            errors.append(str(error))
    raise OSError("; ".join(errors))


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def compile_cubin(source: str, arch: str) -> bytes:
    """CUDA C++ -> machine code for `arch` ("sm_90"), from disk if it was compiled before."""
    lib = nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = "\0".join([_MAGIC.hex(), f"{major.value}.{minor.value}", *_options(arch), source])
    folder = cache_root() / "kernels"
    path = folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".cubin")
    kept = _is_own(folder)
    cubin = _read_entry(path) if kept else None
    if cubin is None:
        cubin = compile_with(lib, source, arch)
        if kept:
            _write_entry(path, cubin)
    return cubin


def _options(arch: str) -> list[str]:
    return [f"--gpu-architecture={arch}", "--std=c++17"]


def compile_with(lib: ctypes.CDLL, source: str, arch: str) -> bytes:
    """Compile, with no GPU needed."""
    options = _options(arch)
    program = ctypes.c_void_p()
    status = lib.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"tightkv.cu", 0, None, None
    )
    if status:
        raise CompileError(f"nvrtcCreateProgram failed with status {status}")
    try:
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        if lib.nvrtcCompileProgram(program, len(options), array):
            raise CompileError(_get(lib, program, "ProgramLog").decode(errors="replace"))
        return _get(lib, program, "CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _get(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, data)
    return data.raw


# --- on disk: magic, length, SHA-256, machine code ---
_MAGIC = b"tightkv\x01"  # the last byte is the version of this format


def _is_own(folder: Path) -> bool:
    """Whether compiled kernels may be kept there: others could put theirs in place of ours."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False  # a folder that cannot be made is no error
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH:
        return True
    warnings.warn(
        f"{folder} belongs to or can be written by others, so CUDA kernels are compiled again in "
        "each process; set TIGHTKV_CACHE_DIR to a folder of your own",
        stacklevel=2,
    )
    return False


def _read_entry(path: Path) -> bytes | None:
    """None where there is no entry, or one that is cut off or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin = data[len(_MAGIC) + 40 :]
    return cubin if data == _entry(cubin) else None


def _entry(cubin: bytes) -> bytes:
    return _MAGIC + len(cubin).to_bytes(8, "little") + hashlib.sha256(cubin).digest() + cubin


def _write_entry(path: Path, cubin: bytes) -> None:
    """A disk that is full or cannot be written is no error."""
    with suppress(OSError), whole_file(path) as temporary:
        temporary.write_bytes(_entry(cubin))


class Module:
    """Kernels of one cubin, loaded on one device."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes torch's context the current one
            self._module = ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(self._module), cubin), "load a kernel")
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._attributes = int(torch.cuda.get_device_capability(device) >= (9, 0))  # _OVERLAP

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, shared: int = 0
    ) -> None:
        """Launch on the device's current stream; the device must be the current one.

        `args` are ctypes values, in the kernel's order.
        `shared`: bytes of dynamic shared memory a block; the same at every launch.
        """
        if name not in self._functions:
            self._functions[name] = self._find(name, shared)
        pointers = (ctypes.c_void_p * len(args))(
            *[ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in args]
        )
        stream = torch.cuda.current_stream(self._device).cuda_stream
        overlap = ctypes.pointer(_OVERLAP)
        config = _LaunchConfig(*grid, threads, 1, 1, shared, stream, overlap, self._attributes)
        status = _driver().cuLaunchKernelEx(
            ctypes.byref(config), self._functions[name], pointers, None
        )
        _check(status, f"launch {name} on a grid of {grid}")

    def _find(self, name: str, shared: int) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        status = _driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
        _check(status, f"find kernel {name}")
        if shared > 48 << 10:  # more than that has to be asked for
            status = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared)
            _check(status, f"give kernel {name} {shared} bytes of shared memory")
        return function


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


# Programmatic stream serialization: a kernel may be set up while the one before it still runs;
# ours wait (griddepcontrol.wait) before they read what it wrote.
_OVERLAP = _LaunchAttribute(id=6, value=1)


_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"could not {what}: {(text.value or b'unknown error').decode()}")
