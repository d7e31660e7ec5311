"""A short mark of a model's weights, by which a saved cache knows the model it is from."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NUMBERS = 8  # of a parameter, at most
_MOST = 128  # parameters of an early mark
_EVERY = "all-"  # begins a mark of all parameters; those of files before have none


def weights_mark(model: PreTrainedModel, like: str = _EVERY) -> str:
    """16 hex digits of the first numbers of all parameters, of the kind that `like` is.

    They are rounded to bfloat16, so that the same weights in float32 have the same mark.
    Parameters that are elsewhere (offloaded, spread over ranks) are left out.
    """
    found = [
        (name, x.detach())
        for name, x in model.named_parameters()
        if type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" and x.numel()
    ]
    every = like.startswith(_EVERY)
    step = 1 if every else -(-len(found) // _MOST) or 1
    digest, by_device = hashlib.sha256(), dict[torch.device, list[Tensor]]()
    for name, x in found[::step]:
        digest.update(name.encode())
        first = x[(0,) * (x.dim() - 1)][:_NUMBERS] if x.dim() else x[None]
        by_device.setdefault(x.device, []).append(first.bfloat16().float())
    for numbers in by_device.values():
        digest.update(torch.cat(numbers).cpu().numpy().tobytes())
    return (_EVERY if every else "") + digest.hexdigest()[:16]
