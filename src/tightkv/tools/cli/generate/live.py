"""One answer of model.generate: its tokens and seconds, and what is shown while it is written."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.eval.forward import end_tokens


@dataclass(frozen=True)
class Generation:
    """What one run gave."""

    tokens: list[list[int]]  # new tokens of each prompt, up to its end-of-text token
    timing: dict[str, Any]
    cache: Any
    logits: Tensor | None  # [new tokens, vocabulary] of the only prompt, where asked for


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when the prompt comes, and each token."""

    def __init__(self) -> None:
        self.times = list[float]()

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """There is nothing to close."""


def generate(
    model: Any,
    inputs: Mapping[str, Tensor],
    cache: Any,
    options: Mapping[str, Any],
    clock: TokenClock,
    before: float = 0.0,
    keep_logits: bool = False,
) -> Generation:
    """Run the model on encoded prompts [B, tokens], left-padded, after `before` s of reading."""
    how = {"return_dict_in_generate": True, "output_logits": keep_logits, **options}
    out = model.generate(**inputs, past_key_values=cache, streamer=clock, **how)
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    tokens = [_until_end(row, end_tokens(model)) for row in new.tolist()]
    logits = torch.cat(out.logits) if keep_logits else None  # [new, vocabulary]
    timing = _timing(clock.times, int(inputs["attention_mask"].sum()), tokens, before)
    return Generation(tokens, timing, cache, logits)


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    last = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: last + 1]


def _timing(
    times: Sequence[float], prompt_tokens: int, tokens: Sequence[list[int]], before: float = 0.0
) -> dict[str, float | None]:
    """Seconds and rates of the prompt and of each new token; `times` are those of a `TokenClock`.

    The first step after the prompt may compile kernels, so it is left out where others follow.
    """
    skip = 2 if len(times) > 3 else 1
    found: dict[str, float | None] = {}
    for name, count, seconds in (
        ("prefill", prompt_tokens, before + times[1] - times[0]),
        ("decode", sum(max(0, len(row) - skip) for row in tokens), times[-1] - times[skip]),
    ):
        found[f"{name}_seconds"] = seconds
        found[f"{name}_tokens_per_second"] = count / seconds if count and seconds > 0 else None
    return found


class LiveAnswer(TokenClock):
    """Listens to `model.generate`: that it reads the prompt, then how many tokens, or their text.

    `text` (a TextStreamer, or None) writes the answer to standard output.
    """

    def __init__(self, prompt: str, tokens: str, most: int, text: Any = None) -> None:
        super().__init__()
        self.text, self._tokens = text, Working(tokens, most)
        self._shown = ExitStack()
        self._shown.enter_context(Working(prompt))

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.times) == 2:  # the prompt comes first
            self._shown.close()
            if self.text is None:
                self._shown.enter_context(self._tokens)
        if self.text is not None:
            self.text.put(value)
        elif len(self.times) > 1:
            self._tokens.advance()

    def end(self) -> None:
        if self.text is not None:
            self.text.end()

    def close(self) -> None:
        """Leave the terminal as it was; also after an error."""
        self._shown.close()
