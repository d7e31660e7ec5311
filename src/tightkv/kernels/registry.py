"""Which implementation of append and attend can run where, and which is taken.

Each is a module with its `NAME`, the same two functions as `reference`, and two that say where it
cannot serve: `unavailable(device_type)` and `unsupported(layout)`, a reason or None. Those with
TAKES_BATCHES are given tokens of equally long rows as they are, [B, T, heads, D], too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch

from tightkv.pages.layout import PageLayout


@dataclass(frozen=True)
class KernelStatus:
    """Whether an implementation can run on this machine, and why or why not."""

    name: str
    usable: bool
    reason: str


# Best first, and what each runs on.
_IMPLEMENTATIONS = {
    "cuda": "CUDA C++ and Triton kernels, NVIDIA GPUs from sm_80 on",
    "triton": "fused Triton kernels, CUDA and ROCm devices",
    "cpu": "native SIMD code, CPU tensors",
    "reference": "plain torch, any device and every config",
}


_MODULES = {
    "cuda": "tightkv.kernels.cuda.backend",
    "triton": "tightkv.kernels.triton.backend",
    "cpu": "tightkv.kernels.cpu.backend",
    "reference": "tightkv.kernels.reference",
}
# What each of them is made for; a ROCm device is of type "cuda", too.
_MADE_FOR = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}
# Decoding, as measured (docs/kernels.md).
_SLOW = {
    "reference": "plain torch, many times slower",
    "triton": "slower than the cuda ones and than an uncompressed cache",
}
_warned: set[str] = set()


class SlowKernelsWarning(UserWarning):
    """ "auto" found nothing fast for a config; the message says why and what to change."""


@dataclass(frozen=True)
class KernelChoice:
    """An implementation, and why it is not a faster one; None where it was asked for by name."""

    name: str
    slow: str | None

    @property
    def module(self) -> ModuleType:
        return load(self.name)


def available() -> list[KernelStatus]:
    """Every implementation, best first."""
    rows = []
    for name, what in _IMPLEMENTATIONS.items():
        reason = _unavailable(name, None)
        rows.append(KernelStatus(name, reason is None, what if reason is None else reason))
    return rows


def select(name: str, device: torch.device, layout: PageLayout) -> ModuleType:
    """The implementation called `name`; "auto" takes TIGHTKV_KERNELS, else the best that can run.

    One that was asked for by name and cannot run is an error, never silently another. Where "auto"
    takes a slow one, a warning says why, once per process and reason.
    """
    choice = choose(name, device, layout)
    if choice.slow is not None and choice.slow not in _warned:
        _warned.add(choice.slow)
        warnings.warn(choice.slow, SlowKernelsWarning, stacklevel=3)
    return choice.module


def choose(name: str, device: torch.device, layout: PageLayout) -> KernelChoice:
    """What `select` returns, with its warning as text."""
    if name == "auto":
        name = os.environ.get("TIGHTKV_KERNELS", "auto")
    if name == "auto":
        return _best(device, layout)
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"kernels={name!r}; supported: auto, {', '.join(_IMPLEMENTATIONS)}")
    reason = _cannot_serve(name, device, layout, asked=True)
    if reason is not None:
        raise ValueError(f'kernels={name!r} cannot run here: {reason}; use "auto"')
    return KernelChoice(name, None)


def _best(device: torch.device, layout: PageLayout) -> KernelChoice:
    """The first that can run, and why the faster ones made for this device cannot."""
    refused: dict[str, str] = {}
    for name in _IMPLEMENTATIONS:
        reason = _cannot_serve(name, device, layout)
        if reason is None:
            break
        if _MADE_FOR[name] == device.type and not (name == "cuda" and torch.version.hip):
            refused[name] = reason
    if name == "reference" and device.type not in _MADE_FOR.values():
        refused = {device.type: "there are no other kernels for this device"}
    if not refused:
        return KernelChoice(name, None)
    reasons = ", ".join(f"{other}: {reason}" for other, reason in refused.items())
    return KernelChoice(
        name,
        f"the compressed cache runs on the {name} kernels ({_SLOW[name]}); "
        f"faster ones cannot take it ({reasons}). "
        f'Change that, or accept it with kernels="{name}" or TIGHTKV_KERNELS={name}',
    )


def load(name: str) -> ModuleType:
    """The module of an implementation, whether it can run or not."""
    return importlib.import_module(_MODULES[name])


def _unavailable(name: str, device_type: str | None, asked: bool = False) -> str | None:
    if name == "reference":
        return None
    if name in ("cuda", "triton") and importlib.util.find_spec("triton") is None:
        return "needs Triton: pip install triton"
    reason: str | None = load(name).unavailable(device_type, asked)
    return reason


def _cannot_serve(
    name: str, device: torch.device, layout: PageLayout, asked: bool = False
) -> str | None:
    reason = _unavailable(name, device.type, asked)
    if reason is None and name != "reference":
        reason = load(name).unsupported(layout)
    return reason
