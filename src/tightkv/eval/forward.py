"""CacheRun: a model with a cache, fed token by token or in chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tightkv.integrations.transformers import TightCache

TIGHT_ATTENTION = "tightkv"

# A cache that is empty at first; called once for each batch.
MakeCache = Callable[[], TightCache]


class CacheRun:
    """Feeds tokens to a model through one cache; the uncompressed one if `cache` is None."""

    def __init__(self, model: Any, cache: TightCache | None = None) -> None:
        self.model = model
        self.attention = exact_attention(model) if cache is None else TIGHT_ATTENTION
        self.cache: Any = DynamicCache(config=model.config) if cache is None else cache

    @torch.inference_mode()
    def feed(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Append tokens [B, T]; their logits [B, T, V], or [B, 1, V] of the last one alone."""
        options = {"logits_to_keep": 1} if last_only and keeps_logits(self.model) else {}
        with attention(self.model, self.attention):
            out = self.model(ids.to(self.model.device), past_key_values=self.cache, **options)
        logits: Tensor = out.logits
        return logits[:, -1:] if last_only else logits

    def feed_prompt(self, ids: Tensor, tail: int) -> Tensor:
        """A prompt [B, N] in two passes, so that its last `tail` tokens read the cache."""
        if ids.shape[1] > tail:
            self.feed(ids[:, :-tail], last_only=True)
            ids = ids[:, -tail:]
        return self.feed(ids, last_only=True)

    def crop(self, tokens: int) -> None:
        """Drop the newest tokens."""
        if tokens:
            self.cache.crop(-tokens)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """The model uses this attention implementation inside."""
    before = model.config._attn_implementation
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def exact_attention(model: Any) -> str:
    """What the uncompressed cache is read with: sdpa, or eager where a model has no sdpa."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def max_positions(model: Any) -> int | None:
    """The longest sequence the model was made for, where its config says so."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def keeps_logits(model: Any) -> bool:
    """Whether the model can compute the logits of its last tokens alone."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def end_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
