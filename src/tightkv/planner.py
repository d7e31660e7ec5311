"""How many bytes a model's cache takes under each config, and how much fits a memory budget.

`model_shape.compressible` says which layers are compressed, `cache_bytes` what layers take. Layers
that are not compressed (sliding, chunked, latent, recurrent) stay as the model keeps them, at 16
bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.cache_bytes import CacheBytes, LayerBytes
from tightkv.config import KVQuantConfig
from tightkv.layout import PageLayout
from tightkv.model_shape import (
    ModelShape,
    compressed_layers,
    estimate_parameters,
    skip_reason,
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

# Bytes per number in the caches to compare with. nvfp4: 4 bits, and an fp8 scale for 16 numbers.
BASELINES = {"bf16": 2, "fp8": 1, "nvfp4": 0.5625}

# A cache that holds this many tokens is limited by something else than memory.
_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class CachePlan(CacheBytes):
    """A model's whole cache under one config (or, as a baseline, without one)."""

    name: str
    config: KVQuantConfig | None = None

    @property
    def bytes_per_token_per_layer(self) -> float | None:
        """Mean over the layers that can be compressed; None where there is none."""
        sizes = [layer.bytes_per_token for layer in self.layers if skip_reason(layer.shape) is None]
        return sum(sizes) / len(sizes) if sizes else None

    def max_tokens(self, memory: int) -> int | None:
        """The longest single sequence that fits `memory` bytes; None where none is too long."""
        if self.total_bytes(_NO_LIMIT) <= memory:
            return None
        low, high = 0, _NO_LIMIT  # low fits or is 0, high does not
        # The first length in pages, which may take less than the one before.
        least = 1 + max(layer.exact_limit for layer in self.layers)
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
    return CachePlan(tuple(LayerBytes(layer, BASELINES[name]) for layer in layers), name)


def config_plan(name: str, shape: ModelShape, cfg: KVQuantConfig, ranks: int = 1) -> CachePlan:
    """The cache of one tensor-parallel rank under `cfg`."""
    layers = [layer.shard(ranks) for layer in shape.layers]
    # Protected layers are the first and last of those that are compressed.
    compressed = compressed_layers(layers)
    layouts = {}
    for number, i in enumerate(compressed):
        layer_cfg = cfg.for_layer(number, len(compressed), i)
        if layer_cfg.compresses:
            heads, dim = layers[i].num_kv_heads, layers[i].head_dim
            layouts[i] = PageLayout(layer_cfg, heads, dim, cache_dtype(shape))
    limit = max((layout.exact_limit for layout in layouts.values()), default=0)
    sizes = [
        LayerBytes(layer, layout=layouts.get(i), exact_limit=limit if i in layouts else 0)
        for i, layer in enumerate(layers)
    ]
    return CachePlan(tuple(sizes), name, cfg)


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
