"""Centers: a key k0 and a value v0 of each KV head, which its tokens are stored relative to.

Softmax does not see what all scores of a query share, and its weights sum to 1:

    softmax_j q.(k_j - k0) = softmax_j q.k_j,    sum_j a_j (v_j - v0) = o - v0.

So a cache may hold k - k0 and v - v0, exact tokens and codes alike, and add v0 to the output of
attention. Tokens near the center, which draw most of the attention, then have short vectors and
small errors (docs/math.md). Where something else takes part in the softmax (a soft cap of scores,
a sink logit), the first line does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Centers:
    """Of the KV heads of one layer, [Hkv, D] each. Their numbers are bfloat16's in every dtype."""

    key: Tensor
    value: Tensor
    _made: dict[tuple[torch.dtype, str], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, init=False
    )

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

    def on(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Key and value center, made once for a dtype and device."""
        made = dtype, str(device)
        if made not in self._made:
            with torch.inference_mode(False):
                key, value = (x.to(device, dtype) for x in (self.key, self.value))
                self._made[made] = key, value
        return self._made[made]

    # They never change: a copy is the centers themselves.
    def __copy__(self) -> Centers:
        return self

    def __deepcopy__(self, memo: object) -> Centers:
        return self
