"""The native kernels with AddressSanitizer and UBSan in them, as programs and as a library.

They take long to compile, so tests that need them share a worker (workers.py).
"""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tightkv.kernels.cpu import library

NATIVE = Path(library.__file__).parent / "native"
FLAGS = ["-std=gnu11", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{NATIVE}"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
# AddressSanitizer stops where such pointers are used, and compiling takes 40% less without.
if not os.environ.get("ALL_SHAPES"):
    SANITIZE.append("-fno-sanitize=null,pointer-overflow")
THREADS = ["-fsanitize=thread"]
# The stacks of gcc 13 that outlive a function are aligned for 32 bytes, vectors here for 64.
ASAN = "detect_stack_use_after_return=0"
_FOLDER = tempfile.TemporaryDirectory(prefix="tightkv-sanitizers-")  # removed with the process


def find_compiler() -> str:
    compiler = next((found for name in ("gcc", "clang", "cc") if (found := shutil.which(name))), "")
    if not compiler:
        pytest.skip("no C compiler")
    return compiler


def compile_c(*arguments: object, folder: Path, sanitize: list[str] = SANITIZE) -> None:
    compiler = find_compiler()
    command = [compiler, *FLAGS, *WARNINGS, *sanitize, *map(str, arguments)]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr and re.search(r"lib[at]san", built.stderr):
        pytest.skip(f"{compiler} has no sanitizers")
    assert built.returncode == 0, built.stderr


@functools.cache
def isas() -> list[str]:
    """The instruction sets that have sanitizers, best first: without --all-shapes none of 64 bytes,
    whose sources are those of 32 with other constants and take longest."""
    found = library.supported(library.load())
    if os.environ.get("ALL_SHAPES"):
        return found
    return [isa for isa in found if isa not in ("avx512", "avx512_vnni", "vnni", "avxvnni")]


@functools.cache
def objects() -> tuple[Path, ...]:
    """Of all C sources of the kernels; those of other instruction sets are only linked."""
    folder = Path(_FOLDER.name)
    wide = "avx512" if any(isa.startswith(("avx512", "vnni")) for isa in isas()) else ""
    idle_names = {f"{isa}{end}" for isa in set(library.ISAS) - set(isas()) for end in ("", "_dots")}
    sources = sorted(NATIVE.glob("*.c"))
    idle = [source for source in sources if source.stem in idle_names - {wide}]
    compile_c("-c", *(source for source in sources if source not in idle), folder=folder)
    compile_c("-c", "-O0", *idle, folder=folder, sanitize=[])
    return tuple(sorted(folder.glob("*.o")))


def build(driver: str, folder: Path) -> str:
    """A program of the kernels and one of the drivers beside this file."""
    source = Path(__file__).with_name(driver)
    compile_c(source, *objects(), "-o", folder / "driver", "-lm", folder=folder)
    return str(folder / "driver")


def build_with_threads(driver: str, folder: Path) -> str:
    """A driver that includes what it tests, with ThreadSanitizer."""
    source = Path(__file__).with_name(driver)
    compile_c(source, "-o", folder / "driver", folder=folder, sanitize=THREADS)
    return str(folder / "driver")


def build_library(folder: Path) -> Path:
    compile_c("-shared", *objects(), "-o", folder / "native.so", "-lm", folder=folder)
    return folder / "native.so"


def run(program: str, *arguments: object) -> str:
    """What the program prints, if no sanitizer stops it."""
    # Python may be run with a preloaded library, which AddressSanitizer refuses.
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"ASAN_OPTIONS": ASAN}
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
