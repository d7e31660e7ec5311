"""Builds the native CPU kernels where there is a C compiler; the install works without them."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "src/tightkv/kernels/cpu"
LIBRARY = "_native"  # a plain shared library, loaded with ctypes


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """In a wheel the name of no Python version: the library uses nothing of Python."""
        path = Path(super().get_ext_filename(fullname))
        in_wheel = "bdist_wheel" in self.distribution.commands
        return str(path.with_name(f"{LIBRARY}.so") if in_wheel else path)


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """One wheel for all versions of Python; without the library for all platforms as well."""
        self.root_is_pure = not any(Path(self.bdist_dir).rglob(f"{LIBRARY}.so"))
        platform = "any" if self.root_is_pure else super().get_tag()[2]
        return "py3", "none", platform


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            f"tightkv.kernels.cpu.{LIBRARY}",
            sources=sorted(glob(f"{FOLDER}/native/*.c")),
            depends=sorted(glob(f"{FOLDER}/native/*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ],
)
