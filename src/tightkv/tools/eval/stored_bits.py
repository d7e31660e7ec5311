"""Bits per element in the pages of a cache, and the kernels that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.cache_size import growing_layers
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.pages.layout import PageLayout
from tightkv.tools.eval.forward import CacheRun, MakeCache


@dataclass(frozen=True)
class StoredBits:
    """Bits per element in pages, scales, page means and padding included."""

    key: float
    value: float

    @property
    def mean(self) -> float:
        return (self.key + self.value) / 2

    def as_dict(self) -> dict[str, float]:
        return {"key": self.key, "value": self.value, "mean": self.mean}


def bits_of(model: Any, make: MakeCache) -> StoredBits:
    """Bits of a cache of this model."""
    return stored_bits(_fed(model, make))


def kernels_of(model: Any, make: MakeCache) -> str:
    """Which kernels a cache of this model runs on, by name."""
    layers = _fed(model, make).layers
    names = {
        layer.kv.kernels.NAME for layer in layers if isinstance(layer, TightLayer) and layer.kv
    }
    return ", ".join(sorted(names)) or "none"


def _fed(model: Any, make: MakeCache) -> TightCache:
    """A cache with one token, which tells it the shapes of layers."""
    run = CacheRun(model, make())
    run.feed(torch.zeros(1, 1, dtype=torch.long, device="cpu"), last_only=True)
    return cast(TightCache, run.cache)


def stored_bits(cache: TightCache) -> StoredBits:
    """Mean over the full-attention layers; those that are left alone have 16 bits."""
    elements = key = value = 0.0
    for layer in growing_layers(cache.layers):
        if isinstance(layer, TightLayer) and layer.kv is not None:
            layout = layer.kv.layout
            size = layout.num_kv_heads * layout.head_dim
            value_bits = 8 * _value_page_bytes(layout) / layout.page_size
            key += 8 * layout.bytes_per_token - value_bits
            value += value_bits
        else:
            size = layer.keys.shape[1] * layer.keys.shape[3]  # [B, Hkv, tokens, D]
            key, value = key + 16 * size, value + 16 * size
        elements += size
    if not elements:
        raise ValueError("this cache has seen no token yet; feed it one first")
    return StoredBits(key=key / elements, value=value / elements)


def _value_page_bytes(layout: PageLayout) -> int:
    planes = (plane for plane in layout.planes.values() if plane.side == "value")
    return layout.num_kv_heads * sum(plane.size for plane in planes)
