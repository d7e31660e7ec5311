"""A short mark of a model's weights, by which a saved cache knows the model it is from."""

import hashlib

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NUMBERS = 8  # of a parameter, at most
_TOGETHER = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that torch.cat takes together


class WeightsSample:
    """The first numbers of all parameters as they are now, copied on their devices.

    The mark is computed when it is asked for, so that a cache which is never saved waits for no
    device. Parameters that are elsewhere (offloaded, spread over ranks) are left out.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        found = [
            (name, x)
            for name, x in model.named_parameters()
            if type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta and x.numel()
        ]
        self._names = "".join(name for name, _ in found)
        by_device = dict[torch.device, list[Tensor]]()
        for _, x in found:
            count, stride = (x.size(-1), x.stride(-1)) if x.dim() else (1, 1)
            first = x.as_strided((min(_NUMBERS, count),), (stride,))  # x[0, ..., 0, :_NUMBERS]
            if x.dtype not in _TOGETHER:
                first = first.bfloat16()
            by_device.setdefault(x.device, []).append(first)
        self._numbers = [torch.cat(numbers).bfloat16() for numbers in by_device.values()]

    def mark(self) -> str:
        """Numbers count as bfloat16: the same weights in float32 have this mark."""
        digest = hashlib.sha256(self._names.encode())
        for numbers in self._numbers:
            digest.update(numbers.float().cpu().numpy().tobytes())
        return f"all-{digest.hexdigest()[:16]}"
