"""Machine code of kernels, kept on disk: a source is compiled once on a machine."""

import ctypes
import hashlib
import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path

from tightkv.config import cache_root
from tightkv.files.atomic import whole_file
from tightkv.kernels.cuda.nvrtc import compile_options, compile_source, load_torch_nvrtc


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
