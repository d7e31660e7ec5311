"""What rings store of new tokens: exact copies, or integers in the frame of pages.

docs/layout.md has the bytes and the rounding of `window_bits=8`, which all kernels share: values of
8 bits, and keys of 12, whose scores would be noisy where a key bias makes them long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.math.quantize import to_fp16
from tightkv.pages.codec import Codec

KEY_LEVELS, VALUE_LEVELS = 2047, 127
_STEP_BYTES = 32 << 20  # float32 temporaries of one step


class RingTokens(NamedTuple):
    """Tokens as rings hold them [..., Hkv, D]: exact, or int8 codes with scales [..., Hkv, 2].

    Keys in codes are [..., Hkv, 3 D / 2] (`pack_12_bits`).
    """

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
    parts = []
    step = max(1, _STEP_BYTES // (4 * codec.layout.num_kv_heads * codec.layout.head_dim))
    for first in range(0, max(len(key), 1), step):
        part = slice(first, first + step)
        key_codes, key_scale = to_integers(codec.rotate("key", key[part]), KEY_LEVELS)
        codes, scale = to_integers(codec.rotate("value", value[part]), VALUE_LEVELS)
        scales = torch.stack([key_scale, scale], -1)
        parts.append((pack_12_bits(key_codes), codes.to(torch.int8), scales))
    return RingTokens(*(torch.cat(x) for x in zip(*parts, strict=True)))


def rotated(
    codec: Codec, key: Tensor, value: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What rings hold, or exact tokens, [..., D] in the frame of pages, float32."""
    if scales is None:
        return codec.rotate("key", key), codec.rotate("value", value)
    codes = unpack_12_bits(key)
    return codes.float() * scales[..., :1].float(), value.float() * scales[..., 1:].float()


def to_integers(y: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Rotated float32 [..., D] -> int16 codes [..., D], at most `levels`, and scales [...]."""
    # Products: dividing by a constant rounds differently on CPU and GPU.
    scale = to_fp16(y.abs().amax(-1) * (1 / levels))
    step = scale.float()[..., None]
    codes = (y * torch.where(step > 0, 1 / step, 0.0)).round().clamp(-levels, levels)
    return codes.to(torch.int16), scale


def pack_12_bits(codes: Tensor) -> Tensor:
    """int16 [..., D] -> int8 [..., 3 D / 2]: high bytes, then low nibbles, eight in four bytes.

    Byte i of these four has channel i in its low half and channel i + 4 in its high half.
    """
    low = (codes & 15).unflatten(-1, (-1, 2, 4))
    nibbles = (low[..., 0, :] | low[..., 1, :] << 4).flatten(-2)
    return torch.cat([codes >> 4, nibbles], -1).to(torch.int8)


def unpack_12_bits(packed: Tensor) -> Tensor:
    """The inverse of `pack_12_bits`."""
    dim = packed.shape[-1] * 2 // 3
    nibbles = packed[..., dim:].to(torch.int16).unflatten(-1, (-1, 4))
    low = torch.stack([nibbles & 15, nibbles >> 4 & 15], -2).flatten(-3)
    return (packed[..., :dim].to(torch.int16) << 4) | low
