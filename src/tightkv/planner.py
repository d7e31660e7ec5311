"""How many bytes a model's cache takes under each config, and how much fits a memory budget.

Compressed layers are sized by `PageLayout` alone. Layers that cannot be compressed (sliding,
chunked, latent, recurrent) stay as the model keeps them, at 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from tightkv.config import KVQuantConfig
from tightkv.layout import PageLayout
from tightkv.model_shape import (
    LayerShape,
    ModelShape,
    estimate_parameters,
    stored_weights,
    weights_dtype,
)

# Memory in MiB as the driver reports it, which is what can be allocated.
GPUS = {
    "A10G": 23028,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "A6000": 49140,
    "B200": 183359,
    "H100": 81559,
    "H200": 143771,
    "L4": 23034,
    "L40S": 46068,
    "MI300X": 196592,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
    "RTX6000-Ada": 49140,
    "T4": 15360,
}
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}

# Bytes a number in the caches to compare with. nvfp4: 4 bits, and an fp8 scale for 16 numbers.
BASELINES = {"bf16": 2, "fp8": 1, "nvfp4": 0.5625}

# Kinds of layers that are never compressed, and why.
KEPT = {
    "sliding": "sliding window",
    "chunked": "chunked attention",
    "linear": "constant state",
    "mla": "latent attention (MLA)",
    "none": "keeps nothing",
}

# A cache that holds this many tokens is limited by something else than memory.
_NO_LIMIT = 1 << 40


def kept_reason(layer: LayerShape) -> str | None:
    """Why a layer is not compressed, or None where it is."""
    if layer.kind != "full":
        return KEPT[layer.kind]
    if layer.head_dim != layer.value_head_dim:
        return f"keys have {layer.head_dim} dimensions and values {layer.value_head_dim}"
    try:
        PageLayout(KVQuantConfig(), layer.num_kv_heads, layer.head_dim)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes: in pages where `layout` is given, else uncompressed.

    Sequences of up to `exact_limit` tokens have no pages yet.
    """

    shape: LayerShape
    element_bytes: float = 2
    layout: PageLayout | None = None
    exact_limit: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes each further token of a long sequence costs."""
        if self.layout is not None:
            return self.layout.bytes_per_token
        return self.shape.elements_per_token * self.element_bytes if self.shape.grows else 0

    def total_bytes(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens, fixed parts included."""
        if self.layout is None:
            return self.shape.uncompressed_bytes(tokens, self.element_bytes)
        held = self.layout.total_bytes(tokens, open_codes=False, exact_limit=self.exact_limit)
        return held + (self.shape.state_bytes or 0)


@dataclass(frozen=True)
class CachePlan:
    """A model's whole cache under one config (or, as a baseline, without one)."""

    name: str
    costs: tuple[LayerCost, ...]
    config: KVQuantConfig | None = None

    @cached_property
    def _distinct(self) -> list[tuple[int, LayerCost]]:
        """(count, cost): layers that cost the same are computed once."""
        counts: dict[tuple[object, ...], list[LayerCost]] = {}
        for cost in self.costs:
            layer_config = cost.layout.cfg if cost.layout else None
            counts.setdefault((cost.shape, cost.element_bytes, layer_config), []).append(cost)
        return [(len(same), same[0]) for same in counts.values()]

    @property
    def bytes_per_token(self) -> float:
        return sum(count * cost.bytes_per_token for count, cost in self._distinct)

    @property
    def bytes_per_token_per_layer(self) -> float | None:
        """Mean over the layers that can be compressed; None where there is none."""
        costs = [cost.bytes_per_token for cost in self.costs if kept_reason(cost.shape) is None]
        return sum(costs) / len(costs) if costs else None

    def total_bytes(self, tokens: int, sequences: int = 1) -> int:
        return sequences * sum(count * cost.total_bytes(tokens) for count, cost in self._distinct)

    def max_tokens(self, memory: int) -> int | None:
        """The longest single sequence that fits `memory` bytes; None where none is too long."""
        if self.total_bytes(_NO_LIMIT) <= memory:
            return None
        low, high = 0, _NO_LIMIT  # low fits or is 0, high does not
        least = 1 + max(cost.exact_limit for cost in self.costs)  # in pages: maybe less than before
        if self.total_bytes(least) <= memory:
            low = least
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.total_bytes(middle) <= memory else (low, middle)
        return low

    def max_requests(self, memory: int, tokens: int) -> int:
        """How many sequences of `tokens` tokens fit together."""
        return max(0, memory) // max(1, self.total_bytes(tokens))


def baseline_plan(name: str, shape: ModelShape, ranks: int = 1) -> CachePlan:
    """One of BASELINES, for every attention layer."""
    layers = [layer.shard(ranks) for layer in shape.layers]
    return CachePlan(name, tuple(LayerCost(layer, BASELINES[name]) for layer in layers))


def config_plan(name: str, shape: ModelShape, cfg: KVQuantConfig, ranks: int = 1) -> CachePlan:
    """The cache of one tensor-parallel rank under `cfg`."""
    layers = [layer.shard(ranks) for layer in shape.layers]
    # Protected layers are the first and last of those that are compressed.
    compressed = [i for i, layer in enumerate(layers) if kept_reason(layer) is None]
    layouts = {}
    for number, i in enumerate(compressed):
        layer_cfg = cfg.for_layer(number, len(compressed), i)
        if layer_cfg.compresses:
            heads, dim = layers[i].num_kv_heads, layers[i].head_dim
            layouts[i] = PageLayout(layer_cfg, heads, dim, cache_dtype(shape))
    limit = max((layout.exact_limit for layout in layouts.values()), default=0)
    costs = [
        LayerCost(layer, layout=layouts.get(i), exact_limit=limit if i in layouts else 0)
        for i, layer in enumerate(layers)
    ]
    return CachePlan(name, tuple(costs), cfg)


def cache_dtype(shape: ModelShape) -> torch.dtype:
    """The 16-bit dtype that a cache is planned with."""
    return torch.bfloat16 if shape.dtype == torch.float32 else shape.dtype


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on one rank and where the number comes from."""

    bytes: int
    dtype: str | None
    source: str
    """given, measured (files), counted (an empty model) or estimated (the config)."""


def plan_weights(shape: ModelShape, dtype: str | None = None, ranks: int = 1) -> Weights | None:
    """Measured where the files are there, else estimated; None where neither is possible."""
    stored_dtype = weights_dtype(shape)
    quantized = shape.config.get("quantization_config") is not None
    stored = stored_weights(shape.folder) if shape.folder else None
    if stored is not None:
        if dtype in (None, stored_dtype):
            return Weights(-(-stored.bytes // ranks), stored_dtype, "measured")
        if stored.parameters is not None and not quantized:
            return Weights(_bytes_of(stored.parameters, dtype, ranks), dtype, "measured")
    parameters, dtype = estimate_parameters(shape), dtype or stored_dtype
    if parameters is None or dtype is None:
        return None
    return Weights(_bytes_of(parameters, dtype, ranks), dtype, "estimated")


def count_weights(parameters: int, shape: ModelShape, dtype: str | None, ranks: int) -> Weights:
    """Weights of a model whose parameters somebody counted."""
    dtype = dtype or weights_dtype(shape)
    if dtype is None:
        method = shape.config["quantization_config"].get("quant_method")
        raise ValueError(f"weights of {shape.name} are quantized by {method!r}: give their size")
    return Weights(_bytes_of(parameters, dtype, ranks), dtype, "counted")


def _bytes_of(parameters: int, dtype: str | None, ranks: int) -> int:
    if dtype not in WEIGHT_BITS:
        raise ValueError(f"weights dtype {dtype!r}; supported: {', '.join(WEIGHT_BITS)}")
    return -(-parameters * WEIGHT_BITS[dtype] // (8 * ranks))
