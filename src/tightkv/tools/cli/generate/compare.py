"""Two runs on one prompt: where their texts diverge, and the KL between their distributions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    only_last = "logits_to_keep" in inspect.signature(model.forward).parameters
    model(prompt, past_key_values=cache, **({"logits_to_keep": 1} if only_last else {}))
    forced = torch.tensor([list(tokens[:-1])], device=prompt.device)
    total = 0.0
    for start in range(0, forced.shape[1], CHUNK):
        chunk = forced[:, start : start + CHUNK]
        seen = model(chunk, past_key_values=cache).logits[0].float().log_softmax(-1)  # [t, V]
        wanted = logits[start + 1 : start + 1 + len(seen)].float().log_softmax(-1)
        total += F.kl_div(seen, wanted.to(seen.device), reduction="sum", log_target=True).item()
    return max(0.0, total / forced.shape[1])
