"""One run of model.generate with a cache: the tokens and the seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from tightkv.tools.eval.forward import end_tokens


@dataclass(frozen=True)
class Timing:
    """Seconds of the prompt and of each new token after the first."""

    prompt_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_rate(self) -> float | None:
        return _rate(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float | None:
        return _rate(self.decode_tokens, self.decode_seconds)


@dataclass(frozen=True)
class Generation:
    """What one run gave."""

    tokens: list[list[int]]  # new tokens of each prompt, up to its end-of-text token
    timing: Timing
    cache: Any
    logits: Tensor | None  # [new tokens, vocabulary] of the only prompt, where asked for


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token comes, and passes it on."""

    def __init__(self, listener: Any = None) -> None:
        self.listener, self.times = listener, list[float]()

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if self.listener is not None:
            self.listener.put(value)

    def end(self) -> None:
        if self.listener is not None:
            self.listener.end()


def generate(
    model: Any,
    inputs: Mapping[str, Tensor],
    cache: Any,
    *,
    options: Mapping[str, Any],
    listener: Any = None,
    keep_logits: bool = False,
) -> Generation:
    """Run the model on encoded prompts [B, tokens], left-padded."""
    clock = TokenClock(listener)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        streamer=clock,
        return_dict_in_generate=True,
        output_logits=keep_logits,
        **options,
    )
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    tokens = [_until_end(row, end_tokens(model)) for row in new.tolist()]
    logits = torch.cat(out.logits) if keep_logits else None  # [new, vocabulary]
    prompt_tokens = int(inputs["attention_mask"].sum())
    return Generation(tokens, _timing(clock.times, prompt_tokens, tokens), cache, logits)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    last = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: last + 1]


def _timing(times: Sequence[float], prompt_tokens: int, tokens: Sequence[list[int]]) -> Timing:
    """`times` are those of the prompt's arrival and of every step.

    The first step after the prompt may compile kernels, so it is left out where others follow.
    """
    skip = 2 if len(times) > 3 else 1
    decoded = sum(max(0, len(row) - skip) for row in tokens)
    return Timing(prompt_tokens, times[1] - times[0], decoded, times[-1] - times[skip])
