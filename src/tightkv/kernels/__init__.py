"""Implementations of store, seal and attend, and which of them can run where.

Each implementation is a module with the same three functions as `reference`.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType

import torch

from tightkv.config import KVQuantConfig


@dataclass(frozen=True)
class KernelStatus:
    """Whether an implementation can run on this machine, and why or why not."""

    name: str
    usable: bool
    reason: str


# Best first; each entry names a module of this package.
_IMPLEMENTATIONS = ("reference",)


def available() -> list[KernelStatus]:
    """Every implementation, best first."""
    return [KernelStatus("reference", True, "plain torch, any device and every config")]


def select(name: str, device: torch.device, cfg: KVQuantConfig) -> ModuleType:
    """The implementation called `name`; "auto" takes TIGHTKV_KERNELS, else the best that can run.

    One that was asked for by name and cannot run is an error, never silently another.
    """
    if name == "auto":
        name = os.environ.get("TIGHTKV_KERNELS", "auto")
    if name == "auto":
        name = _IMPLEMENTATIONS[-1]
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"kernels={name!r}; supported: auto, {', '.join(_IMPLEMENTATIONS)}")
    return importlib.import_module(f"tightkv.kernels.{name}")
