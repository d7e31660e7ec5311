"""LayerShape and ModelShape: the numbers that decide how large a cache gets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

# What attention may need beyond the causal mask over all tokens: the extras of a LayerShape.
ALIBI = "ALiBi"
IMAGES = "images attend in both directions"
SHARED = "shares its cache with another layer"
SINKS = "sink logits"
WINDOW = "sliding window, longer than any sequence"
INDEXED = "sparse latent attention (an indexer chooses tokens)"
BESIDE_OTHERS = "latent attention (MLA) beside layers of other kinds"
LATENT_WINDOW = "latent attention (MLA) in a sliding window"


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a sequence.

    full: keys and values of every token. sliding, chunked: those of the last `window` tokens at
    most. mla: one latent vector a token. linear: a state of constant size (convolution, Mamba,
    linear attention). none: nothing (an MLP layer, or one that reads another layer's cache).
    other: not known here (an encoder's attention).
    A full layer with state_bytes > 0 has attention and a recurrent part side by side.
    """

    kind: str
    num_kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    window: int | None = None
    latent_dim: int = 0  # mla: numbers per token, of the latent and the RoPE part of the key
    rope_dim: int = 0  # mla: of these, the RoPE part
    index_bytes: int = 0  # mla: bytes per token of a sparse index, whatever the cache's dtype
    state_bytes: int | None = 0
    """Bytes of the constant state per sequence; None where the config does not tell."""
    extras: tuple[str, ...] = ()
    """full, sliding, mla: what its attention needs beyond the causal mask and the window."""

    @property
    def grows(self) -> bool:
        """Whether each further token costs memory without limit."""
        return self.kind in ("full", "mla")

    @property
    def elements_per_token(self) -> int:
        """Numbers kept for a token inside the window."""
        if self.kind == "mla":
            return self.latent_dim
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)

    def bytes_per_token(self, element_bytes: float = 2) -> float:
        """Bytes of a token inside the window when nothing is compressed."""
        return self.elements_per_token * element_bytes + self.index_bytes

    def uncompressed_bytes(self, tokens: int, element_bytes: float = 2) -> int:
        """Bytes of one sequence of `tokens` tokens when nothing is compressed."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return math.ceil(kept * self.bytes_per_token(element_bytes)) + (self.state_bytes or 0)

    def shard(self, ranks: int) -> LayerShape:
        """The part of one of `ranks` tensor-parallel ranks: heads are split, then repeated.

        A latent (mla) has no heads and is kept whole on every rank.
        """
        heads = self.num_kv_heads
        if ranks < 1 or (heads and heads % ranks and ranks % heads):
            raise ValueError(
                f"{heads} KV heads cannot be shared by {ranks} ranks; one number must be a "
                f"multiple of the other"
            )
        state = None if self.state_bytes is None else -(-self.state_bytes // ranks)
        return replace(self, num_kv_heads=max(1, heads // ranks) if heads else 0, state_bytes=state)


@dataclass(frozen=True)
class ModelShape:
    """A decoder's layers and the sizes around them."""

    name: str
    model_type: str
    layers: tuple[LayerShape, ...]
    num_heads: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    max_positions: int | None
    notes: tuple[str, ...] = ()  # what a reader of the numbers should know, one sentence each
    folder: Path | None = None
    """Where the config was found, if on disk: the weights may be beside it."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The language model's part of config.json, defaults of its family filled in."""
    composite: bool = False
    """Whether the language model is one part of a larger model (vision, audio)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def full_layers(self) -> dict[int, tuple[int, int]]:
        """KV heads and head_dim of layers with full attention, by their numbers."""
        full = ((i, layer) for i, layer in enumerate(self.layers) if layer.kind == "full")
        return {i: (layer.num_kv_heads, layer.head_dim) for i, layer in full}

    def groups(self) -> list[tuple[int, LayerShape]]:
        """(count, shape) of each distinct shape, in order of first appearance."""
        return [(count, layer) for layer, count in Counter(self.layers).items()]
