"""Greedy text of a step function, as exported models are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache

COUNT = 200


@torch.no_grad()
def greedy(
    step: Callable[[Tensor, Tensor], Tensor], ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Tokens and their logits; step(ids, position) gives logits."""
    at = ids.shape[1]
    logits = [step(ids, torch.arange(at))[:, -1]]
    for position in range(at, at + count - 1):
        token = logits[-1].argmax(-1, keepdim=True)
        logits.append(step(token, torch.tensor([position]))[:, -1])
    whole = torch.stack(logits, 1)  # [B, count, vocab]
    return whole.argmax(-1), whole


def with_tight_cache(
    model: Any, quant: KVQuantConfig | str, **options: Any
) -> Callable[[Tensor, Tensor], Tensor]:
    cache = TightCache(quant, model)
    return lambda ids, position: model(ids, past_key_values=cache, **options).logits
