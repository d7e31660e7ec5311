"""StaticShape: what a static cache is made for, and the ring of its newest tokens: one tensor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tightkv.pages.layout import PageLayout

RingParts = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and the scales of codes


@dataclass(frozen=True)
class StaticShape:
    """What a set of kernels is made for."""

    layout: PageLayout
    query_heads: int
    batch: int
    max_tokens: int
    feedback: bool
    window: int | None = None
    softcap: float | None = None

    @property
    def pages(self) -> int:
        return 0 if self.layout.ring_holds(self.window) else self.layout.read_pages(self.max_tokens)

    def block_table(self) -> Tensor:
        """int32 [batch, full pages]: -1 for pages that are never read."""
        width = max(self.max_tokens // self.layout.page_size, 1)
        table = torch.full((self.batch, width), -1, dtype=torch.int32, device="cpu")
        read = torch.arange(self.batch * self.pages, device="cpu").view(self.batch, self.pages)
        table[:, : self.pages] = read
        return table


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
