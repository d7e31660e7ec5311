"""Constants: values that never change, and tensors on whichever device asks for them."""

from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Constant:
    """An object that never changes: a copy of it is the object itself."""

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, memo: object) -> _T:
        return self


class PerDevice:
    """A constant tensor with a copy per device and dtype, each made once. Copies are read-only."""

    def __init__(self, value: Tensor) -> None:
        # Built or copied under inference mode, the constant must still serve autograd later.
        with torch.inference_mode(False):
            self._value = value.detach().clone()
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle of before has the value among the copies, by the device it came from."""
        if "_source" in state:
            state = {"_value": state["_copies"][state["_source"]], "_copies": {}}
        self.__dict__.update(state)

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The constant on `device`, in its own dtype or another."""
        if device.type == "cuda" and device.index is None:  # the current one, today
            device = torch.device("cuda", torch.cuda.current_device())  # type: ignore[unreachable]
        place = device, dtype or self._value.dtype
        if place not in self._copies:
            with torch.inference_mode(False):
                self._copies[place] = self._value.to(*place)
        return self._copies[place]
