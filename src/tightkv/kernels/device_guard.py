"""Launches go to the device of the tensors, whichever device is the current one."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
