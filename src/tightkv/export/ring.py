"""The ring of a static cache: one tensor, whatever is in it."""

import math

import torch
from torch import Tensor

from tightkv.pages.layout import PageLayout

RingParts = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and the scales of codes


def new_ring(layout: PageLayout, batch: int, device: torch.device | str) -> Tensor:
    """Zeros: keys and values [2, B, ring, Hkv, D], or uint8 [B, ring, Hkv, bytes] of codes."""
    tokens, heads = layout.ring_tokens, layout.num_kv_heads
    if layout.cfg.window_bits == 16:
        shape = (2, batch, tokens, heads, layout.head_dim)
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    size = layout.ring_bytes_per_token // heads
    return torch.zeros(batch, tokens, heads, size, dtype=torch.uint8, device=device)


def ring_parts(layout: PageLayout, ring: Tensor) -> RingParts:
    """What kernels read. Of codes the bytes of all keys come first, of all scales last."""
    if layout.cfg.window_bits == 16:
        return ring[0], ring[1], None
    shape = ring.shape[:3]
    sizes = (layout.ring_key_dim, layout.head_dim, 4)
    parts = ring.flatten().split([math.prod(shape) * size for size in sizes])
    key, value, scales = (x.view(*shape, size) for x, size in zip(parts, sizes, strict=True))
    return key.view(torch.int8), value.view(torch.int8), scales.view(torch.float16)
