"""Progress of long work on standard error: bars and seconds on a terminal, else lines."""

from __future__ import annotations

import threading
import time
from typing import Any

from tightkv.tools.cli.shared import terminal

_REDRAW_SECONDS = 1.0
_REMIND_SECONDS = 30.0  # where every line stays
QUICK_SECONDS = 3.0  # what is done by then needs no progress
_LONG_SECONDS = 5.0  # a step that took so long leaves a line on a terminal, too


class Progress:
    """Work of known steps: `with Progress("quality", 120) as bar: bar.advance(1)`.

    Where there are lines, they come at every tenth, `line_seconds` or more apart.
    """

    def __init__(self, title: str, total: int, line_seconds: float = 0.0) -> None:
        self.title, self.total, self.done = title, total, 0
        self.line_seconds = line_seconds
        self._bar: Any = None
        self._next_tenth = 1
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if terminal.is_terminal():
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            terminal.clear()
            self._bar = tqdm(total=self.total, desc=self.title, leave=False)
        return self

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if self._bar is not None:
            self._bar.update(steps)
        elif 10 * self.done >= self._next_tenth * self.total:
            self._next_tenth = 10 * self.done // self.total + 1
            now = time.monotonic()
            if now - self._last_line >= self.line_seconds:
                self._last_line = now
                terminal.print_line(
                    f"tightkv: {self.title}: {self.done} of {self.total}, {now - self._start:.0f} s"
                )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Working:
    """Work that cannot be counted: `with Working("loading") as work: work.step("compiling")`.

    A terminal shows the step and its seconds. Elsewhere each step is a line, unless it comes
    `line_seconds` or less after another; one that goes on is named again twice a minute.
    Nothing is shown of work that ends within `delay` seconds.
    """

    def __init__(self, title: str, line_seconds: float = 0.0, delay: float = 0.0) -> None:
        self.line_seconds, self.delay = line_seconds, delay
        self._title, self._start = title, time.monotonic()
        self._last_line = float("-inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Working:
        if not self.delay:
            self._draw()
        self._thread.start()
        return self

    def step(self, title: str) -> None:
        """What is done from now on."""
        self._leave_line()
        self._title, self._start = title, time.monotonic()
        self._draw()

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        self._thread.join()
        terminal.clear()
        if kind is None:
            self._leave_line()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _line(self) -> str:
        seconds = f", {self._seconds:.0f} s" if self._seconds >= 1 else ""
        return f"tightkv: {self._title}{seconds}"

    def _draw(self) -> None:
        if terminal.is_terminal():
            terminal.show(self._line())
        elif time.monotonic() - self._last_line >= self.line_seconds:
            self._last_line = time.monotonic()
            terminal.print_line(self._line())

    def _leave_line(self) -> None:
        if terminal.is_terminal() and self._seconds >= _LONG_SECONDS:
            terminal.print_line(self._line())

    def _tell(self) -> None:
        if self.delay and not self._over.wait(self.delay):
            self._draw()
        period = _REDRAW_SECONDS if terminal.is_terminal() else _REMIND_SECONDS
        while not self._over.wait(period):
            self._draw()
