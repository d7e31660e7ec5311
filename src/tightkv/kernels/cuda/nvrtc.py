"""Compile CUDA C++ when it is first needed, with the NVRTC that torch ships.

Nothing is compiled or installed beforehand. Only the few calls needed are bound, through ctypes.
"""

import ctypes
import functools
import glob
import sysconfig

import torch


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@functools.lru_cache(maxsize=1)
def load_torch_nvrtc() -> ctypes.CDLL:
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


def compile_options(arch: str) -> list[str]:
    return [f"--gpu-architecture={arch}", "--std=c++17"]


def compile_source(lib: ctypes.CDLL, source: str, arch: str) -> bytes:
    """Machine code of a source; needs no GPU."""
    options = compile_options(arch)
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
