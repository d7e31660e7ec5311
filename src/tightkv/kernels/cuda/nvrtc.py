"""Compile CUDA C++ when it is first needed, with the NVRTC that torch ships; keep the machine code.

Nothing is compiled or installed beforehand. Only the few calls needed are bound, through ctypes.
"""

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

import torch

from tightkv.config import cache_root
from tightkv.files.atomic import whole_file


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


def compile_cubin(source: str, arch: str) -> bytes:
    """CUDA C++ -> machine code for `arch` ("sm_90"), from disk if it was compiled before."""
    lib = load_torch_nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = "\0".join([_MAGIC.hex(), f"{major.value}.{minor.value}", *compile_options(arch), source])
    folder = _own_folder()
    if folder is None:
        return compile_source(lib, source, arch)
    path = folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".cubin")
    cubin = _read_entry(path)
    if cubin is None:
        cubin = compile_source(lib, source, arch)
        _write_entry(path, cubin)
    return cubin


# --- on disk: magic, length, SHA-256, machine code ---
_MAGIC = b"tightkv\x01"  # the last byte is the version of this format


def _own_folder() -> Path | None:
    """The folder for compiled kernels, if no other user can replace them there."""
    try:
        folder = cache_root() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None  # a folder that cannot be made is no error
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH:
        return folder
    warnings.warn(
        f"{folder} belongs to or can be written by others, so CUDA kernels are compiled again in "
        "each process; set TIGHTKV_CACHE_DIR to a folder of your own",
        stacklevel=2,
    )
    return None


def _read_entry(path: Path) -> bytes | None:
    """The machine code of an entry; None if there is none, or it is cut off or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin = data[len(_MAGIC) + 40 :]
    return cubin if data == _entry(cubin) else None


def _entry(cubin: bytes) -> bytes:
    return _MAGIC + len(cubin).to_bytes(8, "little") + hashlib.sha256(cubin).digest() + cubin


def _write_entry(path: Path, cubin: bytes) -> None:
    """Keep machine code; a disk that is full or cannot be written is no error."""
    with suppress(OSError), whole_file(path) as temporary:
        temporary.write_bytes(_entry(cubin))
