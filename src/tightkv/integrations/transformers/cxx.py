"""A C++ compiler for AOTInductor: one whose libraries torch can load."""

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_NAMES = ("g++", "c++", "clang++")
_SOURCE = "#include <locale>\nstd::locale made() { return std::locale(); }\n"
_SHARED = (b"libstdc++.so", b"libc++.")


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
        for name in _NAMES:
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
