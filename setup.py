"""Builds the native CPU kernels where there is a C compiler; the install works without them."""

from glob import glob

from setuptools import Extension, setup

FOLDER = "src/tightkv/kernels/cpu"

setup(
    ext_modules=[
        Extension(
            "tightkv.kernels.cpu._native",  # a plain shared library, loaded with ctypes
            sources=sorted(glob(f"{FOLDER}/native/*.c")),
            depends=sorted(glob(f"{FOLDER}/native/*.h")),
            extra_compile_args=["-std=gnu11", "-O3", "-g0", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ]
)
