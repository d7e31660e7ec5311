"""Centers: a key k0 and a value v0 of each KV head, which its tokens are stored relative to.

Softmax does not see what all scores of a query share, and its weights sum to 1:

    softmax_j q.(k_j - k0) = softmax_j q.k_j,    sum_j a_j (v_j - v0) = o - v0.

So a cache may hold k - k0 and v - v0, exact tokens and codes alike, and add v0 to the output of
attention. Tokens near the center, which draw most of the attention, then have short vectors and
small errors (docs/math.md). Where something else takes part in the softmax (a soft cap of scores,
a sink logit), the first line does not hold.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tightkv.math.per_device import Constant, PerDevice


@dataclass(frozen=True, eq=False)
class Centers(Constant):
    """The centers of one layer's KV heads, [Hkv, D] each: bfloat16 numbers in every dtype."""

    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # made inside of it, they must serve outside too
            for name in ("key", "value"):
                given: Tensor = getattr(self, name)
                if given.dim() != 2 or given.shape != self.key.shape:
                    raise ValueError(
                        f"{name} center has shape {list(given.shape)}; it must be [heads, dim]"
                    )
                rounded = given.detach().bfloat16().float()
                if not rounded.isfinite().all():
                    raise ValueError(f"{name} center has NaN or Inf")
                object.__setattr__(self, name, rounded)

    @cached_property
    def _sides(self) -> tuple[PerDevice, PerDevice]:
        return PerDevice(self.key), PerDevice(self.value)

    def on(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Key and value center, made once for a dtype and device."""
        key, value = self._sides
        return key.on(device, dtype), value.on(device, dtype)
