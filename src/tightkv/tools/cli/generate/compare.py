"""Two runs on one prompt, read once: where their texts diverge, and the KL between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.tools.cli.generate.live import layer_progress
from tightkv.tools.eval.forward import keeps_logits

CHUNK = 16  # tokens a forward pass; so few are read back through the cache
_AROUND = 8  # tokens shown on either side of the divergence


@dataclass(frozen=True)
class Divergence:
    """Where the second text leaves the first; `token` None: nowhere."""

    token: int | None
    before: str
    first: str
    second: str


def find_divergence(tokenizer: Any, first: Sequence[int], second: Sequence[int]) -> Divergence:
    """The first token that differs, and the words around it."""
    if list(first) == list(second):
        return Divergence(None, "", "", "")
    pairs = zip(first, second, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))

    def words(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    return Divergence(
        at,
        words(first[max(0, at - _AROUND) : at]),
        words(first[at : at + _AROUND]),
        words(second[at : at + _AROUND]),
    )


@torch.inference_mode()
def mean_kl(
    model: Any, prompt: Tensor, tokens: Sequence[int], logits: Tensor, cache: Any
) -> float | None:
    """Mean KL in nats from the distributions `logits` [T, V] to those read through `cache`.

    The cache, empty at first, is given the prompt [1, N] and then the tokens [T] in chunks. The
    first token is not scored: the prompt attends to itself exactly. None if there is no other.
    """
    if len(tokens) < 2:
        return None
    model(prompt, past_key_values=cache, **({"logits_to_keep": 1} if keeps_logits(model) else {}))
    forced = torch.tensor([list(tokens[:-1])], device=prompt.device)
    total = 0.0
    for start in range(0, forced.shape[1], CHUNK):
        chunk = forced[:, start : start + CHUNK]
        seen = model(chunk, past_key_values=cache).logits[0].float().log_softmax(-1)  # [t, V]
        wanted = logits[start + 1 : start + 1 + len(seen)].float().log_softmax(-1)
        total += F.kl_div(seen, wanted.to(seen.device), reduction="sum", log_target=True).item()
    return max(0.0, total / forced.shape[1])


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
