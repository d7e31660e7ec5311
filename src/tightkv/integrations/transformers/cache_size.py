"""CacheSize: what the layers of a transformers cache hold now, and per token in the long run."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers.cache_utils import DynamicLayer

from tightkv.integrations.transformers.layer import TightLayer
from tightkv.model_shape import LayerShape
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.pages.layout import seal_lag


@dataclass(frozen=True)
class CacheSize:
    """Bytes of full-attention layers, against 16-bit keys and values of the same tokens."""

    tokens: int
    bytes: int
    bf16_bytes: int
    bytes_per_token: float
    bf16_bytes_per_token: float
    break_even: int | None = None
    """Tokens of a sequence from which on any length takes less; None: never."""
    compressed_layers: int = 0
    counted_layers: int = 0

    @property
    def ratio(self) -> float:
        return self.bf16_bytes / self.bytes

    @property
    def long_ratio(self) -> float:
        return self.bf16_bytes_per_token / self.bytes_per_token


def growing_layers(layers: Iterable[Any]) -> list[Any]:
    """The layers that grow with the context and hold something."""
    return [
        layer
        for layer in layers
        if (isinstance(layer, TightLayer) and layer.kv is not None)
        or (isinstance(layer, DynamicLayer) and not layer.is_sliding and layer.is_initialized)
    ]


def cache_size(layers: Iterable[Any]) -> CacheSize:
    """Compressed layers count as allocated, those left at 16 bits or more as their tensors."""
    found = [_layer(layer) for layer in growing_layers(layers)]
    each = CacheBytes(tuple(layer for _, _, layer in found))
    compressed = tuple(layer for layer in each.layers if layer.layout is not None)
    return CacheSize(
        tokens=max((tokens for tokens, _, _ in found), default=0),
        bytes=sum(held for _, held, _ in found),
        bf16_bytes=sum(tokens * layer.bf16_bytes_per_token for tokens, _, layer in found),
        bytes_per_token=float(each.bytes_per_token),
        bf16_bytes_per_token=float(each.bf16_bytes_per_token),
        break_even=_break_even(CacheBytes(compressed)),
        compressed_layers=len(compressed),
        counted_layers=len(found),
    )


@lru_cache(maxsize=32)
def _break_even(layers: CacheBytes) -> int | None:
    """See `CacheSize.break_even`. A length that seals a page may take more than the one before."""
    layout = layers.layers[0].layout if layers.layers else None
    if layout is None:
        return None
    size, exact = layout.page_size, layers.bf16_bytes_per_token
    first = seal_lag(layout.cfg) + size  # the shortest that has a page
    full = first + size  # with two, rings are full, and each further page saves as much

    def more(tokens: int) -> int:
        return layers.total_bytes(tokens) - tokens * exact

    saved = more(full) - more(full + size)
    if saved <= 0:
        return None
    last = full + max(more(full), 0) // saved * size
    for begin, end in ((last, last + size), (first, full), (1, first)):
        if more(begin) >= 0:  # it only falls until the next page
            lengths = range(begin, end)
            return begin + bisect_left(lengths, True, key=lambda tokens: more(tokens) < 0)
    return 1


def _layer(layer: Any) -> tuple[int, int, LayerBytes]:
    """Tokens of all sequences, bytes held, and what further tokens take."""
    if isinstance(layer, TightLayer):
        layer.commit()
        assert layer.kv is not None
        size = LayerBytes.of_layout(layer.kv.layout)
        return sum(layer.kv.table.lengths), layer.kv.allocated_bytes(), size
    keys, values = layer.keys, layer.values  # [B, Hkv, tokens, D]
    shape = LayerShape("full", keys.shape[1], keys.shape[3], values.shape[3])
    held = sum(x.numel() * x.element_size() for x in (keys, values))
    return keys.shape[0] * keys.shape[2], held, LayerBytes(shape, keys.element_size())
