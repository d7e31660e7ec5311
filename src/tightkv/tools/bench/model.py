"""Whole-model decoding with random weights: the same step over a bf16 and a compressed cache.

A Llama-shaped model written out, so that nothing but the cache differs and the whole step is one
CUDA graph. Weights are random: speed and memory do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightkv.config import KVQuantConfig
from tightkv.kernels.registry import select
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench.inputs import Layer, Shape, append_tokens, attend_tokens, fill
from tightkv.tools.bench.timing import graph_ms
from tightkv.tools.rows import provenance

# For bf16 the better of these: torch's own choice is not always the fastest for decoding.
_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


@dataclass(frozen=True)
class ModelShape:
    """Llama-3.1-8B unless said otherwise."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    rope_theta: float = 500000.0

    @property
    def bf16_bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 4


class PlainCache:
    """Static bf16 keys and values, the newest slot overwritten each step; torch's attention."""

    backend: SDPBackend | None = None  # which of torch's kernels; None leaves it to torch

    def __init__(self, model: ModelShape, batch: int, tokens: int, device: torch.device) -> None:
        size = (model.layers, 2, batch, model.kv_heads, tokens, model.head_dim)
        self.data = torch.randn(size, dtype=torch.bfloat16, device=device)
        self.group = model.query_heads // model.kv_heads

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.data[layer]
        keys[:, :, -1], values[:, :, -1] = key, value
        packed = query.unflatten(1, (-1, self.group))  # [B, Hkv, G, D]
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(packed, keys, values).flatten(1, 2)

    @property
    def bytes(self) -> int:
        return self.data.nbytes


class TightModelCache:
    """Compressed layers filled to `tokens`, the newest token written again each step."""

    def __init__(
        self,
        cfg: KVQuantConfig,
        model: ModelShape,
        batch: int,
        tokens: int,
        device: torch.device,
        kernels: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        layout = PageLayout(cfg, model.kv_heads, model.head_dim, dtype)
        self.kernels = select(kernels, device, layout)
        shape = Shape(batch, tokens, model.query_heads, model.kv_heads, model.head_dim)
        self.layers: list[Layer] = [
            fill(layout, shape, self.kernels, device, seed) for seed in range(model.layers)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        append_tokens(self.kernels, self.layers[layer], key, value)
        return attend_tokens(self.kernels, self.layers[layer], query)

    @property
    def bytes(self) -> int:
        names = (
            "pages", "ring_key", "ring_value", "ring_scales", "sink_key", "sink_value",
            "block_table",
        )  # fmt: skip
        held = [getattr(layer.view, name) for layer in self.layers for name in names]
        return sum(x.nbytes for x in held if x is not None)


Cache: TypeAlias = PlainCache | TightModelCache


class RandomModel:
    """Weights of a Llama-shaped model and its decode step."""

    def __init__(
        self, shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.shape = shape

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device) * size[-1] ** -0.5

        heads = shape.query_heads + 2 * shape.kv_heads
        self.embed = random(shape.vocabulary, shape.hidden)
        self.head = random(shape.vocabulary, shape.hidden)
        self.blocks = [
            (
                random(heads * shape.head_dim, shape.hidden),
                random(shape.hidden, shape.query_heads * shape.head_dim),
                random(2 * shape.intermediate, shape.hidden),
                random(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        self.norm = torch.ones(shape.hidden, dtype=dtype, device=device)
        powers = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        self.frequencies = shape.rope_theta**-powers

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in (self.embed, self.head, *chain(*self.blocks)))

    def step(self, tokens: Tensor, position: Tensor, cache: Cache) -> Tensor:
        """Token ids [B] at `position` [B] -> logits [B, vocabulary]."""
        shape = self.shape
        angle = position[:, None, None].float() * self.frequencies  # [B, 1, D / 2]
        cos, sin = (f(angle).repeat(1, 1, 2).to(self.norm.dtype) for f in (torch.cos, torch.sin))
        x = self.embed[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.blocks):
            mixed = F.linear(self._normal(x), qkv).unflatten(-1, (-1, shape.head_dim))
            sizes = (shape.query_heads, shape.kv_heads, shape.kv_heads)
            query, key, value = mixed.split(sizes, dim=1)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            x = x + F.linear(cache.attend(layer, query, key, value).flatten(1), out)
            gate, rise = F.linear(self._normal(x), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * rise, down)
        return F.linear(self._normal(x), self.head)

    def _normal(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norm, 1e-5)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).contiguous()


def model_rows(
    cases: Sequence[tuple[int, int]], presets: Sequence[str], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Tokens per second and peak memory at (batch, context), bf16 and each preset."""
    shape, facts = ModelShape(), provenance(device)
    model = RandomModel(shape, device)
    for batch, context in cases:
        tokens = context - 37  # the newest page partly filled
        plain = _measure(model, PlainCache, batch, tokens)
        for preset in presets:
            cache = partial(TightModelCache, KVQuantConfig.preset(preset))
            ours = _measure(model, cache, batch, tokens)
            ratios = {}
            if plain is not None and ours is not None:
                ratios = {
                    "tokens/s": ours["tokens_per_s"] / plain["tokens_per_s"],
                    "largest batch": ours["largest_batch"] / max(1, plain["largest_batch"]),
                    "cache bytes": ours["cache_bytes"] / plain["cache_bytes"],
                }
            yield {
                "bench": "model", "preset": preset, "batch": batch, "context": context,
                "model": asdict(shape), "weights_bytes": model.bytes,
                "compressed": ours, "bf16": plain, "ratios": ratios, **facts,
            }  # fmt: skip


def _measure(
    model: RandomModel, new_cache: Callable[..., Cache], batch: int, tokens: int
) -> dict[str, float] | None:
    """A decode step with this cache, or None where it does not fit the memory."""
    device = model.norm.device
    torch.cuda.empty_cache()  # what the one before has left
    torch.cuda.reset_peak_memory_stats(device)
    ids = torch.zeros(batch, dtype=torch.long, device=device)
    position = torch.full((batch,), tokens - 1, device=device)
    try:
        cache = new_cache(model.shape, batch, tokens, device)
        with torch.no_grad():
            ms = _step_ms(lambda: model.step(ids, position, cache), cache)
    except torch.OutOfMemoryError:
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return {
        "ms": ms,
        "tokens_per_s": batch / ms * 1e3,
        "cache_bytes": cache.bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "largest_batch": int((0.95 * total - model.bytes) // (cache.bytes / batch)),
    }


def _step_ms(step: Callable[[], Tensor], cache: Cache) -> float:
    """Milliseconds of a step; over a plain cache with the fastest kernel that takes the shape."""
    if not isinstance(cache, PlainCache):
        return graph_ms([step], repeats=5)
    times = []
    for cache.backend in (*_BACKENDS, None):
        try:
            times.append(graph_ms([step], repeats=5))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # this kernel refuses; torch's own choice comes last
            if cache.backend is None:
                raise
    return min(times)
