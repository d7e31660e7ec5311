"""A progress bar on standard error; lines where that is no terminal or tqdm is missing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """`with Progress("quality", 120) as bar: bar.advance(1)`."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self._bar: Any = None
        self._next_tenth = 1
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self._bar = tqdm(total=self.total, desc=self.title, file=sys.stderr, leave=False)
        return self

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self._bar is not None:
            self._bar.update(steps)
        elif 10 * self.done >= self._next_tenth * self.total:
            self._next_tenth = 10 * self.done // self.total + 1
            seconds = time.monotonic() - self._start
            line = f"{self.title}: {self.done} of {self.total}, {seconds:.0f} s"
            print(f"tightkv: {line}", file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
