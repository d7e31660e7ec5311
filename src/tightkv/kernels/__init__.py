"""Implementations of append and attend, and which of them can run where.

Each implementation is a module with the same two functions as `reference`, and two that say
where it cannot serve: `unavailable(device_type)` and `unsupported(layout)`, a reason or None.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType

import torch

from tightkv.layout import PageLayout


@dataclass(frozen=True)
class KernelStatus:
    """Whether an implementation can run on this machine, and why or why not."""

    name: str
    usable: bool
    reason: str


# Best first; each entry names a module of this package and what it runs on.
_IMPLEMENTATIONS = {
    "cuda": "CUDA C++ and Triton kernels, NVIDIA GPUs from sm_80 on",
    "triton": "fused Triton kernels, CUDA and ROCm devices",
    "cpu": "native SIMD code, CPU tensors",
    "reference": "plain torch, any device and every config",
}


def available() -> list[KernelStatus]:
    """Every implementation, best first."""
    rows = []
    for name, what in _IMPLEMENTATIONS.items():
        reason = _unavailable(name, None)
        rows.append(KernelStatus(name, reason is None, what if reason is None else reason))
    return rows


def select(name: str, device: torch.device, layout: PageLayout) -> ModuleType:
    """The implementation called `name`; "auto" takes TIGHTKV_KERNELS, else the best that can run.

    One that was asked for by name and cannot run is an error, never silently another.
    """
    if name == "auto":
        name = os.environ.get("TIGHTKV_KERNELS", "auto")
    if name == "auto":
        name = next(n for n in _IMPLEMENTATIONS if _cannot_serve(n, device, layout) is None)
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"kernels={name!r}; supported: auto, {', '.join(_IMPLEMENTATIONS)}")
    reason = _cannot_serve(name, device, layout, asked=True)
    if reason is not None:
        raise ValueError(f'kernels={name!r} cannot run here: {reason}; use "auto"')
    return _load(name)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"tightkv.kernels.{name}")


def _unavailable(name: str, device_type: str | None, asked: bool = False) -> str | None:
    if name == "reference":
        return None
    if name in ("cuda", "triton") and importlib.util.find_spec("triton") is None:
        return "needs Triton: pip install triton"
    reason: str | None = _load(name).unavailable(device_type, asked)
    return reason


def _cannot_serve(
    name: str, device: torch.device, layout: PageLayout, asked: bool = False
) -> str | None:
    reason = _unavailable(name, device.type, asked)
    if reason is None and name != "reference":
        reason = _load(name).unsupported(layout)
    return reason
