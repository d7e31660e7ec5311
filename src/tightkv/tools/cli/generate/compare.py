"""Two runs on one prompt, read once: a fact hidden in it, where texts diverge, and the KL."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.eval.forward import TAIL_TOKENS, last_logits
from tightkv.tools.eval.tasks.needles import Needle, make_needles, says

Cache = TypeVar("Cache", DynamicCache, TightCache)
CHUNK = 16  # tokens a forward pass; so few are read back through the cache
_AROUND = 8  # tokens shown on either side of the divergence
_DEPTH = 0.5  # where the needle is in the text


def choose_needle(text: str) -> Needle:
    """The same one at every run; its answer is not in the text.

    A small model goes on after its answer, where words are nearly equally likely, unless told not.
    """
    needle = make_needles(1, 0, text)[0]
    return replace(needle, question=f"{needle.question} Answer in one sentence.")


def hide(text: str, fact: str) -> str:
    """The text with the fact as a paragraph of its own, after the first that ends past _DEPTH."""
    at = text.find("\n\n", int(_DEPTH * len(text)))
    at = len(text) if at < 0 else at
    return f"{text[:at]}\n\n{fact}{text[at:]}"


def judged(needle: Needle, answers: Sequence[str]) -> dict[str, Any]:
    """A needle and what each cache answered, as --json prints them."""
    return {
        "fact": needle.fact,
        "question": needle.question,
        "expected": needle.answer,
        "depth": _DEPTH,
        "answers": [{"text": text, "found": says(text, needle.answer)} for text in answers],
    }


def find_divergence(tokenizer: Any, first: Sequence[int], second: Sequence[int]) -> dict[str, Any]:
    """The first token where the compressed cache's text leaves the other, and words around it."""
    pairs = zip(first, second, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    equal = list(first) == list(second)

    def words(tokens: Sequence[int]) -> str:
        return "" if equal else str(tokenizer.decode(list(tokens)))

    return {
        "equal": equal,
        "divergence_token": None if equal else at,
        "before": words(first[max(0, at - _AROUND) : at]),
        "uncompressed": words(first[at : at + _AROUND]),
        "compressed": words(second[at : at + _AROUND]),
    }


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
    model(prompt, past_key_values=cache, **last_logits(model))
    forced = torch.tensor([list(tokens[:-1])], device=prompt.device)
    total = 0.0
    for start in range(0, forced.shape[1], CHUNK):
        chunk = forced[:, start : start + CHUNK]
        seen = model(chunk, past_key_values=cache).logits[0].float().log_softmax(-1)  # [t, V]
        wanted = logits[start + 1 : start + 1 + len(seen)].float().log_softmax(-1)
        total += F.kl_div(seen, wanted.to(seen.device), reduction="sum", log_target=True).item()
    return max(0.0, total / forced.shape[1])


class SharedPrompt:
    """The first tokens of a prompt, and the exact keys and values [1, Hkv, N, D] of each layer."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        """Read tokens [1, N] with the attention that the model has now; none is a prompt too."""
        self.model, self.tokens = model, ids.shape[1]
        self.states: list[tuple[Tensor, Tensor]] = []
        start = time.perf_counter()
        if self.tokens:
            cache = DynamicCache(config=model.config)
            reading = Working(f"reading {self.tokens} tokens of the prompt once for both caches")
            with reading, torch.no_grad():
                model(ids, past_key_values=cache, **last_logits(model))
            self.states = [(layer.keys, layer.values) for layer in cache.layers]
        self.seconds = time.perf_counter() - start  # what reading took

    def uncompressed(self) -> DynamicCache:
        """A cache of transformers' own with these tokens."""
        return self._fill(DynamicCache(config=self.model.config))

    def compressed(self, config: KVQuantConfig) -> TightCache:
        cache = self._fill(TightCache(config, model=self.model))
        cache.bytes_used()  # writes what is pending
        return cache

    @torch.no_grad()
    def _fill(self, cache: Cache) -> Cache:
        for number, (keys, values) in enumerate(self.states):
            cache.update(keys, values, number)
        return cache


def can_share(model: Any) -> bool:
    """Whether keys and values are all that a cache of this model holds, of all tokens."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def read_shared(model: Any, ids: Tensor) -> SharedPrompt:
    """All of a prompt [1, N] but its last tokens, which each cache reads itself."""
    count = max(0, ids.shape[1] - 1 - TAIL_TOKENS) if can_share(model) else 0
    return SharedPrompt(model, ids[:, :count])
