"""Key scales: a power of two for each channel of a KV head's keys.

Scores do not change when keys are stored as k / s and queries come as s q. Their error does. The
rotation spreads the error of a key over all channels in proportion to sum_i C_i / s_i^2, where
C_i = E[k_i^2] of what a page's mean leaves, and error feedback (`math.feedback`) weighs it with the
geometric mean of the metric's eigenvalues, which s multiplies by that of s_i^2. Both together are
least for s_i^2 = C_i, by the ratio of the arithmetic to the geometric mean of C. Half of that,
s_i^2 = sqrt(C_i), is nearly as good and forgives energies of other tokens than those to come
(docs/log.md). Keys with a few large channels gain most. Powers of two change no digit of a float.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tightkv.math.per_device import Constant, PerDevice

MOST = 4  # scales are 2^-4 to 2^4: float16 queries and keys stay in range
LEAST_GAIN = 3.0
"""The least ratio of the means of C at which a head gets scales; below it they gain nothing."""
_DEAD = 4096  # the least energy a channel is given is the median over this


@dataclass(frozen=True, eq=False)
class KeyScale(Constant):
    """The scales of one layer's KV heads, float32 [Hkv, D]."""

    value: Tensor

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # made inside of it, it must serve outside too
            value = self.value.detach().float().cpu().clone()
            if value.dim() != 2:
                raise ValueError(f"key scale has shape {list(value.shape)}; expected [heads, dim]")
            exponent = torch.log2(value)
            if not (exponent == exponent.round()).all() or exponent.abs().max() > MOST:
                raise ValueError(f"key scales must be powers of two from 2^-{MOST} to 2^{MOST}")
            object.__setattr__(self, "value", value)

    def on(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[Hkv, D], made once for a dtype and device."""
        return self._table.on(device, dtype)

    @cached_property
    def _table(self) -> PerDevice:
        return PerDevice(self.value)

    def times(self, query: Tensor) -> Tensor:
        """Queries [..., Hq, D], heads of a KV head side by side."""
        scale = self.on(query.dtype, query.device)
        return (query.unflatten(-2, (len(scale), -1)) * scale[:, None]).flatten(-3, -2)


def balanced_scale(energy: Tensor) -> KeyScale | None:
    """The scales for keys of this energy [Hkv, D] about their page's mean.

    Heads that would gain too little get ones. None if all would, or if an energy is no number.
    """
    if not energy.isfinite().all():
        return None
    energy = energy.double().cpu()
    least = (energy.median(1, keepdim=True).values / _DEAD).clamp_min(1e-30)
    energy = torch.maximum(energy, least)
    gains = energy.mean(1) / energy.log().mean(1).exp() >= LEAST_GAIN
    if not gains.any():
        return None
    exponent = torch.log2(energy) / 4
    exponent -= exponent.mean(1, keepdim=True)
    exponent = exponent.round().clamp(-MOST, MOST)
    return KeyScale(torch.exp2(torch.where(gains[:, None], exponent, 0.0)))
