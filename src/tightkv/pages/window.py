"""What rings store of new tokens: exact copies, or 8 bits in the frame of pages.

docs/layout.md has the bytes and the rounding of 8 bits, which all kernels share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.math.quantize import to_fp16
from tightkv.pages.codec import Codec

LEVELS = 127
_STEP_BYTES = 32 << 20  # float32 temporaries of one step


class RingTokens(NamedTuple):
    """Tokens as rings hold them [..., Hkv, D]: exact, or int8 codes with scales [..., Hkv, 2]."""

    key: Tensor
    value: Tensor
    scales: Tensor | None

    def at(self, index: Any) -> RingTokens:
        """Some of the tokens: `index` is that of each tensor."""
        scales = None if self.scales is None else self.scales[index]
        return RingTokens(self.key[index], self.value[index], scales)

    def write(self, index: Any, tokens: RingTokens) -> None:
        """Overwrite the tokens at `index`."""
        for target, x in zip(self, tokens, strict=True):
            if target is not None and x is not None:
                target[index] = x.to(target.dtype)


def ring_tokens(codec: Codec, key: Tensor, value: Tensor) -> RingTokens:
    """Tokens [N, Hkv, D] as a ring holds them."""
    if codec.cfg.window_bits == 16:
        return RingTokens(key, value, None)
    codes = [torch.empty_like(x, dtype=torch.int8) for x in (key, value)]
    scales = torch.empty(*key.shape[:2], 2, dtype=torch.float16, device=key.device)
    step = max(1, _STEP_BYTES // (4 * codec.layout.num_kv_heads * codec.layout.head_dim))
    for first in range(0, len(key), step):
        part = slice(first, first + step)
        for i, (side, x) in enumerate((("key", key), ("value", value))):
            codes[i][part], scales[part, :, i] = round_to_8_bits(codec.rotate(side, x[part]))
    return RingTokens(codes[0], codes[1], scales)


def rotated(
    codec: Codec, key: Tensor, value: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What rings hold, or exact tokens, [..., D] in the frame of pages, float32."""
    if scales is None:
        return codec.rotate("key", key), codec.rotate("value", value)
    return key.float() * scales[..., :1].float(), value.float() * scales[..., 1:].float()


def round_to_8_bits(y: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated float32 [..., D] -> int8 codes [..., D] and float16 scales [...]."""
    # Products: dividing by a constant rounds differently on CPU and GPU.
    scale = to_fp16(y.abs().amax(-1) * (1 / LEVELS))
    step = scale.float()[..., None]
    codes = (y * torch.where(step > 0, 1 / step, 0.0)).round().clamp(-LEVELS, LEVELS)
    return codes.to(torch.int8), scale
