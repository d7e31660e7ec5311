"""What a device can do; launches on it, and tensors as the kernels want them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache(maxsize=16)
def processor_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=16)
def has_ptx(device: torch.device) -> bool:
    """cvt from e4m3 needs sm_89."""
    return _capability(device) >= (8, 9)


@functools.lru_cache(maxsize=16)
def has_large_shared_memory(device: torch.device) -> bool:
    """227 KiB for a program: sm_90 and sm_100, not sm_120."""
    return interpreted() or _capability(device)[0] in (9, 10)


def _capability(device: torch.device) -> tuple[int, int]:
    """That of an NVIDIA GPU on which kernels are compiled; (0, 0) elsewhere."""
    if interpreted() or device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def device_guard(function: _Function) -> _Function:
    """Make the device of the second argument (a tensor, or a view) current during the call.

    Triton and the CUDA driver launch on the current device and its stream.
    """

    @functools.wraps(function)
    def guarded(codec: Any, operand: Any, *args: Any, **kwargs: Any) -> Any:
        device = operand.device if isinstance(operand, Tensor) else operand.pages.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(codec, operand, *args, **kwargs)
        with torch.cuda.device(device):
            return function(codec, operand, *args, **kwargs)

    return guarded  # type: ignore[return-value]
