"""One answer of model.generate: its tokens and seconds, and what is shown while it is written."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.tools.cli.shared import terminal
from tightkv.tools.cli.shared.output import human_bytes
from tightkv.tools.cli.shared.progress import Progress
from tightkv.tools.eval.forward import end_tokens

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0  # where every line stays


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
    clock: TokenClock | None = None,
    before: float = 0.0,
    keep_logits: bool = False,
) -> Generation:
    """Run the model on encoded prompts [B, tokens], left-padded, after `before` s of reading."""
    clock = TokenClock() if clock is None else clock
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
    """Listens to `model.generate`: progress of the prompt, then figures beside the text.

    `text` (a TextStreamer, or None) writes the answer to standard output. Where that and standard
    error are the same terminal, the figures stand in its last line, below the text.
    """

    def __init__(self, model: Any, cache: Any, title: str, most: int, text: Any = None) -> None:
        super().__init__()
        self.cache, self.title, self.most, self.text = cache, title, most, text
        self._drawn = 0.0
        self._prompt = ExitStack()
        self._prompt.enter_context(layer_progress(model, f"{title}: prompt, layers"))
        self._bottom = (
            BottomLine() if text and terminal.is_terminal() and sys.stdout.isatty() else None
        )

    def put(self, value: Tensor) -> None:
        super().put(value)
        count, now = len(self.times) - 1, self.times[-1]  # the prompt comes first
        if count == 1:
            self._prompt.close()
            self._drawn = now
        if self.text is not None:
            self.text.put(value)
        period = _REDRAW_SECONDS if terminal.is_terminal() else _LINE_SECONDS
        if count > 1 and now - self._drawn >= period:
            self._drawn = now
            self._draw(count, len(value) * (count - 1) / (now - self.times[1]))

    def end(self) -> None:
        if self.text is not None:
            self.text.end()
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was; also after an error."""
        self._prompt.close()
        terminal.clear()
        if self._bottom is not None:
            self._bottom.close()

    def _draw(self, count: int, rate: float) -> None:
        size = cache_size(self.cache.layers)
        line = (
            f"tightkv: {self.title}: {count} of {self.most} tokens, {rate:.1f} tokens/s, "
            f"KV cache {human_bytes(size.bytes)} ({size.tokens} tokens)"
        )
        if self._bottom is not None:
            self._bottom.draw(line)
        elif terminal.is_terminal():
            terminal.show(line)
        else:
            terminal.print_line(line)


class BottomLine:
    """The last line of a terminal, kept out of what scrolls."""

    def __init__(self) -> None:
        self._rows = 0

    def draw(self, line: str) -> None:
        columns, rows = shutil.get_terminal_size()
        if rows != self._rows:
            self._reserve(rows)
        self._write(f"\0337\033[{rows};1H\033[2K\033[2m{line[: columns - 1]}\033[0m\0338")

    def close(self) -> None:
        """Everything scrolls again, and the line is empty."""
        if self._rows:
            self._write(f"\0337\033[r\033[{self._rows};1H\033[2K\0338")
            self._rows = 0

    def _reserve(self, rows: int) -> None:
        """Make sure that the cursor is above the line: a new one, and back up in its column."""
        self._write(f"\033D\033M\0337\033[1;{rows - 1}r\0338")
        self._rows = rows

    def _write(self, codes: str) -> None:
        sys.stdout.flush()
        print(codes, end="", file=sys.stderr, flush=True)


@contextmanager
def layer_progress(model: Any, title: str) -> Iterator[None]:
    """A bar that moves on with every layer of a forward pass."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        yield
        return
    with Progress(title, len(layers), line_seconds=_LINE_SECONDS / 2) as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.advance()) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
