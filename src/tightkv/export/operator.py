"""tightkv::static_attention: append and attend in one, registered with torch from C++.

The library registers the operator as it is loaded, with or without Python. What is added here is
what only `torch.export` and `torch.compile` need.
"""

import ctypes
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor


class OperatorError(OSError):
    """The library is not there, or torch did not take the operator."""


def operator_library() -> Path:
    """The library to load beside an exported model, in any process that has libtorch."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_operator{suffix}")
        if path.is_file():
            return path
    raise OperatorError(
        "the operator for exported models is not built: the install found no C++ compiler; install "
        "one (g++ or clang++), then tightkv again"
    )


@lru_cache(maxsize=1)
def load_operator() -> None:
    """Make torch.ops.tightkv.static_attention, for running and for tracing."""
    path = operator_library()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise OperatorError(f"{path} cannot be loaded: {error}") from None
    register = ctypes.CDLL(str(path)).tightkv_register_operator
    register.restype = ctypes.c_char_p
    problem: bytes = register()
    if problem:
        raise OperatorError(f"torch {torch.__version__}: {problem.decode()}")
    torch.library.register_fake("tightkv::static_attention", _output)


def add_kernels(data: bytes) -> None:
    """Give the operator the kernels of a kernel file (cuda_programs.py), for calls on a GPU."""
    load_operator()
    add = ctypes.CDLL(str(operator_library())).tightkv_add_kernels
    add.restype, add.argtypes = ctypes.c_char_p, [ctypes.c_char_p, ctypes.c_size_t]
    problem: bytes = add(data, len(data))
    if problem:
        raise OperatorError(f"the file of GPU kernels cannot be used: {problem.decode()}")


def _output(query: Tensor, *arguments: object) -> Tensor:
    """What the operator returns of a query [B, Hq, T, D], without the numbers."""
    if query.dim() != 4:
        raise ValueError(f"query has shape {list(query.shape)}; expected [B, Hq, T, D]")
    batch, heads, tokens, dim = query.shape
    return query.new_empty((batch, tokens, heads, dim))
