"""Whole-model decoding with random weights: the same step over a bf16 and a compressed cache.

A Llama-shaped model written out, so that nothing but the cache differs and the whole step is one
CUDA graph. Weights are random: speed and memory do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightkv.config import KVQuantConfig
from tightkv.kernels.options import AttendOptions
from tightkv.kernels.registry import select
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench.inputs import Layer, Shape, fill
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


class Cache(Protocol):
    """One decode step of one layer: take the new token, attend, return [B, Hq, D]."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


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
        return self.data.numel() * self.data.element_size()


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
        self.cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = self.layers[layer]
        self.kernels.append(
            at.codec, at.view, key, value, self.cu_seqlens, at.ring_valid_from,
            max_new=1, encode_partial_page=False,
        )  # fmt: skip
        out, _ = self.kernels.attend(
            at.codec, query, at.view, self.cu_seqlens, AttendOptions(max_queries=1)
        )
        return out

    @property
    def bytes(self) -> int:
        views = [layer.view for layer in self.layers]
        tensors = [
            x
            for v in views
            for x in (v.pages, v.ring_key, v.ring_value, v.sink_key, v.sink_value, v.block_table)
        ]
        return sum(x.numel() * x.element_size() for x in tensors)


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
        tensors = [self.embed, self.head, *(w for block in self.blocks for w in block)]
        return sum(x.numel() * x.element_size() for x in tensors)

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
    total = torch.cuda.get_device_properties(device).total_memory
    for batch, context in cases:
        tokens = context - 37  # the newest page partly filled
        ids = torch.zeros(batch, dtype=torch.long, device=device)
        position = torch.full((batch,), tokens - 1, device=device)
        plain = _try(model, "bf16", batch, tokens, ids, position, total, device)
        for preset in presets:
            ours = _try(model, preset, batch, tokens, ids, position, total, device)
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


def _try(model: RandomModel, name: str, *arguments: Any) -> dict[str, float] | None:
    """What was measured, or None where it does not fit the memory."""
    try:
        return _measure(model, name, *arguments)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _step_ms(step: Callable[[], Tensor], cache: PlainCache | TightModelCache) -> float:
    """Milliseconds of a step; over a plain cache with the fastest kernel that takes the shape."""
    if not isinstance(cache, PlainCache):
        return graph_ms([step], repeats=5)
    times = []
    for backend in (*_BACKENDS, None):
        cache.backend = backend
        try:
            times.append(graph_ms([step], repeats=5))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # this kernel refuses; torch's own choice comes last
            if backend is None:
                raise
    return min(times)


def _measure(
    model: RandomModel,
    name: str,
    batch: int,
    tokens: int,
    ids: Tensor,
    position: Tensor,
    total: int,
    device: torch.device,
) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats(device)
    cache: PlainCache | TightModelCache
    if name == "bf16":
        cache = PlainCache(model.shape, batch, tokens, device)
    else:
        cfg = KVQuantConfig.preset(name)
        cache = TightModelCache(cfg, model.shape, batch, tokens, device)
    with torch.no_grad():
        ms = _step_ms(lambda: model.step(ids, position, cache), cache)
    each = cache.bytes / batch
    return {
        "ms": ms,
        "tokens_per_s": batch / ms * 1e3,
        "cache_bytes": cache.bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "largest_batch": int((0.95 * total - model.bytes) // each),
    }
