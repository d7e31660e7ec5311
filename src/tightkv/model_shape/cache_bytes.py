"""The bytes of each layer of a cache, and their sum; they are added up nowhere else.

Sizes of compressed layers are those of `PageLayout` and `LatentLayout`, sizes of other layers those
of `LayerShape`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from tightkv.config import KVQuantConfig
from tightkv.model_shape import LayerShape
from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import PageLayout, page_layout


@dataclass(frozen=True)
class LayerBytes:
    """One layer: in pages where it has a `layout`, else uncompressed.

    A latent (mla) in another cache's format takes `latent_bytes` per token.
    """

    shape: LayerShape
    element_bytes: float = 2
    layout: PageLayout | LatentLayout | None = None
    latent_bytes: int | None = None

    @classmethod
    def of_layout(cls, layout: PageLayout | LatentLayout, window: int | None = None) -> LayerBytes:
        """A compressed layer of full attention, with a sliding window, or with latents."""
        if isinstance(layout, LatentLayout):
            dim = layout.rank + layout.rope_dim
            return cls(LayerShape("mla", latent_dim=dim, rope_dim=layout.rope_dim), layout=layout)
        kind = "full" if window is None else "sliding"
        shape = LayerShape(kind, layout.num_kv_heads, layout.head_dim, layout.head_dim, window)
        return cls(shape, layout=layout)

    @classmethod
    def of_config(
        cls,
        cfg: KVQuantConfig,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> LayerBytes:
        """A layer of full attention under its own config, which may leave it uncompressed."""
        if cfg.compresses:
            return cls.of_layout(page_layout(cfg, num_kv_heads, head_dim, dtype))
        return cls(LayerShape("full", num_kv_heads, head_dim, head_dim))

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each further token of a long sequence takes."""
        if not self.shape.grows:
            return 0
        if self.layout is not None:
            return self.layout.bytes_per_token
        if self.latent_bytes is not None:
            return self.latent_bytes + self.shape.index_bytes
        return self.shape.bytes_per_token(self.element_bytes)

    @property
    def bf16_bytes_per_token(self) -> int:
        """Bytes that each further token takes at 16 bits per element."""
        shape = self.shape
        return 2 * shape.elements_per_token + shape.index_bytes if shape.grows else 0

    def total_bytes(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens` tokens, fixed parts included."""
        if self.latent_bytes is not None:
            return tokens * (self.latent_bytes + self.shape.index_bytes)
        if self.layout is None:
            return self.shape.uncompressed_bytes(tokens, self.element_bytes)
        if isinstance(self.layout, LatentLayout):
            return -(-tokens // self.layout.page_size) * self.layout.page_bytes
        if self.shape.window is not None:
            return self.layout.window_bytes(self.shape.window, tokens)
        held = self.layout.total_bytes(tokens, encode_partial_page=False)
        return held + (self.shape.state_bytes or 0)


@dataclass(frozen=True)
class CacheBytes:
    """All layers of a cache together."""

    layers: tuple[LayerBytes, ...]

    @cached_property
    def _counts(self) -> list[tuple[LayerBytes, int]]:
        """Layers that take the same are computed once."""
        return list(Counter(self.layers).items())

    @property
    def bytes_per_token(self) -> float:
        return sum(count * layer.bytes_per_token for layer, count in self._counts)

    @property
    def bf16_bytes_per_token(self) -> int:
        return sum(count * layer.bf16_bytes_per_token for layer, count in self._counts)

    def total_bytes(self, tokens: int, sequences: int = 1) -> int:
        """Bytes of `sequences` sequences of `tokens` tokens each."""
        return sequences * sum(count * layer.total_bytes(tokens) for layer, count in self._counts)
