"""Programs of the native kernels with AddressSanitizer and UBSan in them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tightkv.kernels.cpu import library


def build(driver: str, folder: Path) -> str:
    """A program of one of the drivers beside this file and all C sources."""
    compiler = next((found for name in ("gcc", "clang", "cc") if (found := shutil.which(name))), "")
    if not compiler:
        pytest.skip("no C compiler")
    native = Path(library.__file__).parent / "native"
    sources = [Path(__file__).with_name(driver), *sorted(native.glob("*.c"))]
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{native}"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = str(folder / "driver")
    command = [compiler, *flags, *sanitize, *sources, "-o", program, "-lm", "-pthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "asan" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"{compiler} has no sanitizers")
    assert built.returncode == 0, built.stderr
    return program


def run(program: str, *arguments: object) -> str:
    """What the program prints, if no sanitizer stops it."""
    # Python may be run with a preloaded library, which AddressSanitizer refuses.
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
