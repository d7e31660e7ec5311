"""Builds what is native where there are compilers; the install works without.

The CPU kernels need a C compiler. The operator that exported models call without Python needs a
C++ compiler as well, and is made of the same object files.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "src/tightkv/kernels/cpu/native"
COMMON = ["-O3", "-g0", "-fvisibility=hidden", "-pthread"]
HEADERS = sorted(glob(f"{NATIVE}/*.h"))

# Both are plain shared libraries, loaded with ctypes.
kernels = Extension(
    "tightkv.kernels.cpu._native",
    sources=sorted(glob(f"{NATIVE}/*.c")),
    depends=HEADERS,
    extra_compile_args=["-std=gnu11", *COMMON],
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)
operator = Extension(
    "tightkv.export._operator",  # registers itself with the torch of the process
    sources=[
        "src/tightkv/export/torch_operator.cpp",
        "src/tightkv/export/cuda_operator.cpp",
        "src/tightkv/export/kernel_file.cpp",
    ],
    depends=[*HEADERS, *kernels.sources, *sorted(glob("src/tightkv/export/*.h"))],
    include_dirs=[NATIVE],
    extra_compile_args=["-std=c++17", *COMMON],
    extra_link_args=["-pthread"],
    libraries=["m", "dl"],
    language="c++",
    optional=True,
)
EXTENSIONS = [kernels, operator]  # in this order: the operator links the kernels' objects


class BuildLibraries(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """In a wheel the name of no Python version: the libraries use nothing of Python."""
        path = Path(super().get_ext_filename(fullname))
        in_wheel = "bdist_wheel" in self.distribution.commands
        return str(path.with_name(f"{fullname.rpartition('.')[2]}.so") if in_wheel else path)

    def build_extensions(self) -> None:
        compiler = self.compiler
        compiler.compile = partial(_compile_side_by_side, compiler.compile)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if ext is operator:
            ext.extra_objects = self.compiler.object_filenames(
                kernels.sources, output_dir=self.build_temp
            )
        super().build_extension(ext)


def _compile_side_by_side(compile_: Any, sources: list[str], **options: Any) -> list[str]:
    """The objects of sources, each compiled in a process of its own."""
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda source: compile_([source], **options), sources)
        return [name for names in found for name in names]


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """One wheel for all versions of Python; without libraries for all platforms as well."""
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("*.so"))
        platform = "any" if self.root_is_pure else super().get_tag()[2]
        return "py3", "none", platform


setup(cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel}, ext_modules=EXTENSIONS)
