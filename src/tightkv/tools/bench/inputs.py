"""Shapes to measure, and caches filled with random tokens in shuffled pages."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightkv.kernels.backend import Backend
from tightkv.kernels.view import AppendOptions, CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout, window_step
from tightkv.tools.bench.loads import draw_lengths

L2_BYTES = 300 << 20  # several L2 caches: what is read again must come from memory


@dataclass(frozen=True)
class Shape:
    """One attention layer: sequences, tokens of each, query heads, KV heads, head size.

    With `shortest`: lengths drawn from there to `tokens`, in any phase of a page.
    """

    batch: int
    tokens: int
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    shortest: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "query_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads={self.query_heads}; it must be a multiple of kv_heads={self.kv_heads}"
            )
        if self.shortest and not 1 <= self.shortest <= self.tokens:
            raise ValueError(f"shortest={self.shortest}; it must be from 1 to tokens={self.tokens}")

    @property
    def equal(self) -> bool:
        return not self.shortest

    @property
    def lengths(self) -> list[int]:
        return draw_lengths(self.batch, self.shortest or self.tokens, self.tokens)

    @property
    def bf16_bytes(self) -> int:
        return sum(self.lengths) * self.kv_heads * self.head_dim * 4


@dataclass
class Layer:
    """A filled compressed layer."""

    codec: Codec
    view: CacheView
    ring_valid_from: Tensor
    cu_seqlens: Tensor  # of one new token per sequence


def random_bf16(device: torch.device, *size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device)


def copies_for(bytes_each: int) -> int:
    """As many caches as make the data larger than the L2 cache, up to 12."""
    return max(1, min(12, -(-L2_BYTES // max(1, bytes_each))))


def layers_for(
    layout: PageLayout, shape: Shape, kernels: Backend, device: torch.device
) -> list[Layer]:
    """Filled layers, together larger than the L2 cache."""
    count = copies_for(int(sum(shape.lengths) * layout.bytes_per_token))
    return [fill(layout, shape, kernels, device, seed) for seed in range(count)]


def fill(
    layout: PageLayout, shape: Shape, kernels: Backend, device: torch.device, seed: int
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
    ring_key, ring_value, ring_scales = layout.new_ring(batch, ring, device)
    view = CacheView(
        pages=layout.new_pages(batch * pages_each, device),
        block_table=order.view(batch, pages_each).int(),
        lengths=zero,
        left_pad=zero,
        ring_read_from=zero,
        sink_counts=zero + cfg.sinks,
        ring_rows=torch.arange(batch, dtype=torch.int32, device=device),
        ring_key=ring_key,
        ring_value=ring_value,
        sink_key=exact(cfg.sinks),
        sink_value=exact(cfg.sinks),
        ring_scales=ring_scales,
    )
    codec = Codec(layout)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device="cpu")
    for at in range(0, shape.tokens, 4096):
        counts = (lengths - at).clamp(0, 4096)
        key, value = (
            torch.randn(
                int(counts.sum()), heads, d, generator=generator, dtype=torch.float32, device=device
            ).to(layout.dtype)
            for _ in range(2)
        )
        cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0).int()]).to(device)
        after = replace(view, lengths=lengths.clamp(max=at + 4096).to(device))
        valid_from, most = zero + max(0, at - ring), int(counts.max())
        options = AppendOptions(cu_seqlens, valid_from, most, encode_partial_page=False)
        kernels.append(codec, after, key, value, options)
    lengths = lengths.to(device)
    read_from, valid_from = ring_bounds(layout, lengths)
    same = shape.tokens if shape.equal else None
    view = replace(view, lengths=lengths, ring_read_from=read_from, same_length=same)
    return Layer(codec, view, valid_from, torch.arange(batch + 1, dtype=torch.int32, device=device))


def ring_bounds(layout: PageLayout, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where a decode step that appends the last of `lengths` reads from the ring, and may."""
    cfg = layout.cfg
    step = window_step(cfg)
    end = ((lengths - 1) // step + 1) * step
    read_from = (end - cfg.exact_pages * cfg.page_size).clamp(min=0)
    return read_from, (lengths - 1 - layout.ring_tokens).clamp(min=0)
