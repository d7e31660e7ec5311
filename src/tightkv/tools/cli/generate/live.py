"""What is shown while a model answers: its text, tokens per second and the cache's bytes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.tools.cli.shared import terminal
from tightkv.tools.cli.shared.output import human_bytes
from tightkv.tools.cli.shared.progress import Progress

_REDRAW_SECONDS = 0.25
_LINE_SECONDS = 10.0  # where every line stays


class LiveAnswer(BaseStreamer):  # type: ignore[misc]
    """Listens to `model.generate`: progress of the prompt, then figures beside the text.

    `text` (a TextStreamer, or None) writes the answer to standard output. Where that and standard
    error are the same terminal, the figures stand in its last line, below the text.
    """

    def __init__(self, model: Any, cache: Any, title: str, most: int, text: Any = None) -> None:
        self.cache, self.title, self.most, self.text = cache, title, most, text
        self.count, self._first, self._drawn = -1, 0.0, 0.0  # the prompt comes first
        self._prompt = ExitStack()
        self._prompt.enter_context(layer_progress(model, f"{title}: prompt, layers"))
        self._bottom = (
            BottomLine() if text and terminal.is_terminal() and sys.stdout.isatty() else None
        )

    def put(self, value: Tensor) -> None:
        self.count += 1
        now = time.monotonic()
        if self.count == 1:
            self._prompt.close()
            self._first = self._drawn = now
        if self.text is not None:
            self.text.put(value)
        period = _REDRAW_SECONDS if terminal.is_terminal() else _LINE_SECONDS
        if self.count > 1 and now - self._drawn >= period:
            self._drawn = now
            self._draw(now, len(value))

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

    def _draw(self, now: float, rows: int) -> None:
        rate = rows * (self.count - 1) / (now - self._first)
        size = cache_size(self.cache.layers)
        line = (
            f"tightkv: {self.title}: {self.count} of {self.most} tokens, {rate:.1f} tokens/s, "
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
