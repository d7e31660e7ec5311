"""Load machine code and launch kernels with the CUDA driver, which is there whenever CUDA is."""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is launched with; `args` are ctypes values, in the kernel's order."""

    cubin: bytes
    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    args: tuple[Any, ...]


_here = threading.local()


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """List the launches of this thread instead of doing them."""
    outer, _here.launches = _recorded(), []
    try:
        yield _here.launches
    finally:
        _here.launches = outer


def _recorded() -> list[Launch] | None:
    """The list that takes this thread's launches; None if they are done."""
    return getattr(_here, "launches", None)


def capture_of(device: torch.device) -> int:
    """A number of the CUDA graph that the current stream is being captured for; 0: none."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    outputs = (ctypes.byref(status), ctypes.byref(number), None, None, None)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    _check(
        _driver().cuStreamGetCaptureInfo_v2(stream, *outputs), "see what a stream is captured for"
    )
    return number.value


class Module:
    """Kernels of one cubin, loaded on one device at the first launch."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self._cubin, self._device = cubin, device
        self._functions: dict[str, ctypes.c_void_p] = {}

    @functools.cached_property
    def _module(self) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()  # makes torch's context the current one
            _check(_driver().cuModuleLoadData(ctypes.byref(module), self._cubin), "load a kernel")
        return module

    @functools.cached_property
    def _attributes(self) -> int:
        """The number of launch attributes: _OVERLAP, or none."""
        return int(torch.cuda.get_device_capability(self._device) >= (9, 0))

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, shared: int = 0
    ) -> None:
        """Launch on the device's current stream; the device must be the current one.

        `args` are ctypes values, in the kernel's order.
        `shared`: bytes of dynamic shared memory per block; the same at every launch.
        """
        if (launches := _recorded()) is not None:
            launches.append(Launch(self._cubin, name, grid, threads, shared, args))
            return
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
        if shared:  # more than 48 KiB, what a kernel has of its own among them, must be asked for
            status = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared)
            _check(status, f"give kernel {name} {shared} bytes of shared memory")
        # A processor that runs one kernel takes blocks of the next only if both split its memory
        # into cache and shared memory in the same way.
        status = _driver().cuFuncSetAttribute(function, _PREFERRED_CARVEOUT, _ALL_SHARED)
        _check(status, f"split the memory of processors for kernel {name}")
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
_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_ALL_SHARED = 100  # percent


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"could not {what}: {(text.value or b'unknown error').decode()}")
