"""Shapes to measure, and caches filled with random tokens in shuffled pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightkv.codec import Codec
from tightkv.kernels.view import CacheView
from tightkv.layout import PageLayout

L2_BYTES = 300 << 20  # several L2 caches: what is read again must come from memory


@dataclass(frozen=True)
class Shape:
    """One attention layer: sequences, tokens of each, query heads, KV heads, head size."""

    batch: int
    tokens: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def bf16_bytes(self) -> int:
        return self.batch * self.tokens * self.kv_heads * self.head_dim * 4

    def __str__(self) -> str:
        return f"B={self.batch} N={self.tokens}"


@dataclass
class Layer:
    """A filled compressed layer."""

    codec: Codec
    view: CacheView
    ring_valid_from: Tensor

    @property
    def bytes(self) -> int:
        """What a decode step reads."""
        layout, view = self.codec.layout, self.view
        exact = int((view.lengths - view.ring_read_from).sum() + view.sink_counts.sum())
        pages = int(view.ring_read_from.sum()) * layout.bytes_per_token
        return int(pages) + exact * layout.exact_bytes_per_token


def layers_for(
    layout: PageLayout, shape: Shape, kernels: object, device: torch.device
) -> list[Layer]:
    """As many layers as make the data larger than the L2 cache."""
    each = shape.batch * shape.tokens * layout.bytes_per_token
    count = max(1, min(12, -(-L2_BYTES // max(1, int(each)))))
    return [fill(layout, shape, kernels, device, seed) for seed in range(count)]


def fill(
    layout: PageLayout, shape: Shape, kernels: object, device: torch.device, seed: int
) -> Layer:
    """Append random tokens in steps, as a prefill does."""
    cfg, batch = layout.cfg, shape.batch
    generator = torch.Generator(device=device).manual_seed(seed)
    pages_each = shape.tokens // cfg.page_size + 2
    order = torch.randperm(batch * pages_each, generator=generator, device=device)
    heads, d, ring = layout.num_kv_heads, layout.head_dim, layout.ring_tokens

    def exact(tokens: int) -> Tensor:
        return torch.zeros(batch, tokens, heads, d, dtype=layout.dtype, device=device)

    zero = torch.zeros(batch, dtype=torch.int32, device=device)
    view = CacheView(
        pages=layout.new_pages(batch * pages_each, device),
        block_table=order.view(batch, pages_each).int(),
        lengths=zero,
        left_pad=zero,
        ring_read_from=zero,
        sink_counts=zero + cfg.sinks,
        ring_rows=torch.arange(batch, dtype=torch.int32, device=device),
        ring_key=exact(ring),
        ring_value=exact(ring),
        sink_key=exact(cfg.sinks),
        sink_value=exact(cfg.sinks),
    )
    codec = Codec(layout)
    for at in range(0, shape.tokens, 4096):
        count = min(4096, shape.tokens - at)
        key, value = (
            torch.randn(batch * count, heads, d, generator=generator, device=device).to(
                layout.dtype
            )
            for _ in range(2)
        )
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * count
        after = replace(view, lengths=zero + at + count)
        kernels.append(  # type: ignore[attr-defined]
            codec, after, key, value, cu_seqlens, zero + max(0, at - ring),
            max_new=count, encode_partial_page=False,
        )  # fmt: skip
    page = (shape.tokens - 1) // cfg.page_size
    ring_start = max(0, (page - cfg.exact_pages + 1) * cfg.page_size)
    view = replace(
        view,
        lengths=zero + shape.tokens,
        ring_read_from=zero + ring_start,
        same_length=shape.tokens,
    )
    return Layer(codec, view, zero + max(0, shape.tokens - 1 - ring))
