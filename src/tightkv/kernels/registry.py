"""Which backend can run where, and which one is taken."""

import functools
import os
import warnings
from dataclasses import dataclass

import torch

from tightkv.kernels.backend import Backend
from tightkv.pages.layout import PageLayout


@dataclass(frozen=True)
class _Entry:
    what: str
    device_type: str | None  # what it is made for; a ROCm device is of type "cuda", too
    slow: str = ""  # how slow decoding is, as measured (docs/kernels.md)


# Best first.
_BACKENDS = {
    "cuda": _Entry("CUDA C++ and Triton kernels, NVIDIA GPUs from sm_80 on", "cuda"),
    "triton": _Entry(
        "fused Triton kernels, CUDA and ROCm devices",
        "cuda",
        "slower than the cuda ones and than an uncompressed cache",
    ),
    "cpu": _Entry("native SIMD code, CPU tensors", "cpu"),
    "reference": _Entry(
        "plain torch, any device and every config", None, "plain torch, many times slower"
    ),
}
_warned: set[str] = set()


@dataclass(frozen=True)
class KernelStatus:
    """Whether a backend can run on this machine, and why or why not."""

    name: str
    usable: bool
    reason: str


class SlowKernelsWarning(UserWarning):
    """ "auto" found nothing fast for a config; the message says why and what to change."""


@dataclass(frozen=True)
class KernelChoice:
    """A backend, and why it is not a faster one; None where it was asked for by name."""

    name: str
    slow: str | None

    @property
    def module(self) -> Backend:
        return load(self.name)


def available() -> list[KernelStatus]:
    """Every backend, best first."""
    reasons = {name: _unavailable(name, None) for name in _BACKENDS}
    return [
        KernelStatus(name, reason is None, reason or _BACKENDS[name].what)
        for name, reason in reasons.items()
    ]


def select(name: str, device: torch.device, layout: PageLayout) -> Backend:
    """The backend called `name`; "auto" takes TIGHTKV_KERNELS, else the best that can run.

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
    if name not in _BACKENDS:
        raise ValueError(f"kernels={name!r}; supported: auto, {', '.join(_BACKENDS)}")
    reason = _cannot_serve(name, device, layout, asked=True)
    if reason is not None:
        raise ValueError(f'kernels={name!r} cannot run here: {reason}; use "auto"')
    return KernelChoice(name, None)


def _best(device: torch.device, layout: PageLayout) -> KernelChoice:
    """The first that can run, and why the faster ones made for this device cannot."""
    refused: dict[str, str] = {}
    for name, entry in _BACKENDS.items():  # those of other devices are not even imported
        if entry.device_type not in (None, device.type) or (name == "cuda" and torch.version.hip):
            continue
        reason = _cannot_serve(name, device, layout)
        if reason is None:
            break
        refused[name] = reason
    if device.type not in [entry.device_type for entry in _BACKENDS.values()]:
        refused = {device.type: "there are no other kernels for this device"}
    if not refused:
        return KernelChoice(name, None)
    reasons = ", ".join(f"{other}: {reason}" for other, reason in refused.items())
    return KernelChoice(
        name,
        f"the compressed cache runs on the {name} kernels ({entry.slow}); "
        f"faster ones cannot take it ({reasons}). "
        f'Change that, or accept it with kernels="{name}" or TIGHTKV_KERNELS={name}',
    )


@functools.cache
def load(name: str) -> Backend:
    """A backend, whether it can run or not."""
    if name == "cuda":
        from tightkv.kernels.cuda import backend as cuda

        return cuda
    if name == "triton":
        from tightkv.kernels.triton import backend as triton

        return triton
    if name == "cpu":
        from tightkv.kernels.cpu import backend as cpu

        return cpu
    assert name == "reference"
    from tightkv.kernels import reference

    return reference


def _unavailable(name: str, device_type: str | None, asked: bool = False) -> str | None:
    try:
        return load(name).unavailable(device_type, asked)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return "needs Triton: pip install triton"


def _cannot_serve(
    name: str, device: torch.device, layout: PageLayout, asked: bool = False
) -> str | None:
    return _unavailable(name, device.type, asked) or load(name).unsupported(layout)
