"""How long greedy continuations of the compressed and the uncompressed cache stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tightkv.tools.eval.forward import Advance, CacheRun, MakeCache, ignore
from tightkv.tools.eval.windows import Windows


@dataclass(frozen=True)
class GreedyMatch:
    """Tokens before the continuations part, a prompt each; `cap` where they never do."""

    lengths: tuple[int, ...]
    cap: int

    @property
    def median(self) -> float:
        return float(median(self.lengths))

    @property
    def min(self) -> int:
        return min(self.lengths)


def measure_greedy(
    model: Any,
    prompts: Windows,
    caches: Mapping[str, MakeCache],
    new_tokens: int = 64,
    advance: Advance | None = None,
) -> dict[str, GreedyMatch]:
    """All prompts are rows of one cache. `advance` is told of every forward pass."""
    if new_tokens < 1:
        raise ValueError(f"new_tokens={new_tokens}; it must be at least 1")
    step_done = advance or ignore
    wanted = greedy_tokens(CacheRun(model), prompts, new_tokens, step_done)
    out = {}
    for name, make in caches.items():
        got = greedy_tokens(CacheRun(model, make()), prompts, new_tokens, step_done)
        out[name] = GreedyMatch(tuple(same_tokens(wanted, got)), new_tokens)
    return out


def greedy_tokens(run: CacheRun, prompts: Windows, new_tokens: int, advance: Advance) -> Tensor:
    """The likeliest tokens [B, new_tokens] after each prompt."""
    return run.decode(prompts.ids, new_tokens, lambda logits, i: logits.argmax(-1), advance).tokens


def same_tokens(first: Tensor, second: Tensor) -> list[int]:
    """How many leading tokens of each row [B, T] are equal."""
    differs = first != second
    never = torch.full(differs.shape[:1], differs.shape[1], device=differs.device)
    return [int(n) for n in torch.where(differs.any(1), differs.int().argmax(1), never)]
