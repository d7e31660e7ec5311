"""Constant tensors that live on whichever device asks for them."""

from __future__ import annotations

import torch
from torch import Tensor


class PerDevice:
    """A constant tensor with one copy per device, each made once. Treat the copies as read-only."""

    def __init__(self, value: Tensor) -> None:
        # Built or copied under inference mode, the constant must still serve autograd later.
        with torch.inference_mode(False):
            self._copies = {value.device: value.detach().clone()}
            self._source = value.device

    def on(self, device: torch.device) -> Tensor:
        """The constant on `device`."""
        device = _indexed(device)
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = self._copies[self._source].to(device)
        return self._copies[device]


def _indexed(device: torch.device) -> torch.device:
    """ "cuda" means the current device, which may be another one tomorrow."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
