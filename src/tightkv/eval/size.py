"""What a cache costs: bits an element in its pages, and the bytes it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tightkv.eval.forward import CacheRun, MakeCache
from tightkv.integrations.transformers import TightCache
from tightkv.layout import PageLayout


@dataclass(frozen=True)
class StoredBits:
    """Bits an element in pages, with scales, page means and padding, over compressed layers."""

    key: float
    value: float

    @property
    def mean(self) -> float:
        return (self.key + self.value) / 2


def bits_of(model: Any, make: MakeCache) -> StoredBits:
    """Bits of a cache of this model, which is fed one token to find out."""
    run = CacheRun(model, make())
    run.feed(torch.zeros(1, 1, dtype=torch.long), last_only=True)
    return stored_bits(run.cache)


def stored_bits(cache: TightCache) -> StoredBits:
    """From the layouts of the compressed layers; the cache must have seen a token."""
    layouts = [layer.kv.layout for layer in cache.tight_layers if layer.kv is not None]
    if not layouts:
        raise ValueError("this cache holds no compressed layer yet; feed it a token first")
    elements = sum(layout.num_kv_heads * layout.head_dim for layout in layouts)
    value = sum(_value_page_bytes(layout) / layout.page_size for layout in layouts)
    both = sum(layout.bytes_per_token for layout in layouts)
    return StoredBits(key=8 * (both - value) / elements, value=8 * value / elements)


def _value_page_bytes(layout: PageLayout) -> int:
    planes = (plane for plane in layout.planes.values() if plane.side == "value")
    return layout.num_kv_heads * sum(plane.size for plane in planes)
