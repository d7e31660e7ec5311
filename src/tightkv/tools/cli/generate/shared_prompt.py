"""A prompt that is read once for several caches: prompts attend to themselves exactly in all."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.tools.cli.generate.live import layer_progress
from tightkv.tools.eval.forward import keeps_logits

TAIL_TOKENS = 64  # last tokens of a prompt that each cache reads itself


class SharedPrompt:
    """The first tokens of a prompt, and the exact keys and values [1, Hkv, N, D] of each layer."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        """Read tokens [1, N] with the attention that the model has now; none is a prompt too."""
        self.model, self.tokens = model, ids.shape[1]
        self.states: list[tuple[Tensor, Tensor]] = []
        start = time.perf_counter()
        if self.tokens:
            self.states = self._read(ids)
        self.seconds = time.perf_counter() - start
        """What reading took."""

    @torch.no_grad()
    def _read(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        cache = DynamicCache(config=self.model.config)
        options = {"logits_to_keep": 1} if keeps_logits(self.model) else {}
        with layer_progress(self.model, "prompt, once for all caches: layers"):
            self.model(ids, past_key_values=cache, **options)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def uncompressed(self) -> DynamicCache:
        """A cache of transformers' own with these tokens."""
        cache = DynamicCache(config=self.model.config)
        self._fill(cache)
        return cache

    def compressed(self, config: KVQuantConfig) -> TightCache:
        cache = TightCache(config, model=self.model)
        self._fill(cache)
        cache.bytes_used()  # writes what is pending
        return cache

    @torch.no_grad()
    def _fill(self, cache: Any) -> None:
        for number, (keys, values) in enumerate(self.states):
            cache.update(keys, values, number)


def can_share(model: Any) -> bool:
    """Whether keys and values are all that a cache of this model holds, of all tokens."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
