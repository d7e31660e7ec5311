"""Progress of long work on standard error: a line that changes on a terminal, else a few lines."""

from __future__ import annotations

import threading
import time

from tightkv.tools.cli.shared import terminal

_REDRAW_SECONDS = 1.0
_REMIND_SECONDS = 30.0  # where every line stays
QUICK_SECONDS = 3.0  # what is done by then needs no progress
_LONG_SECONDS = 5.0  # a step that took so long leaves a line on a terminal, too


class Working:
    """Work that takes a while: `with Working("loading") as work: work.step("compiling")`.

    With a `total` its steps are counted: `with Working("quality", 120) as work: work.advance()`.
    A terminal shows what is done and its seconds. Elsewhere each step is a line, counted work a
    line at its end, and what goes on is named again twice a minute. Nothing is shown of work that
    ends within `delay` seconds.
    """

    def __init__(self, title: str, total: int | None = None, delay: float = 0.0) -> None:
        self._title, self._total, self._delay = title, total, delay
        self._done, self._start = 0, time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Working:
        if not self._delay and (self._total is None or terminal.is_terminal()):
            self._draw()
        self._thread.start()
        return self

    def step(self, title: str) -> None:
        """What is done from now on."""
        self._leave_line()
        self._title, self._start = title, time.monotonic()
        self._draw()

    def advance(self, steps: int = 1) -> None:
        self._done += steps

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        self._thread.join()
        terminal.clear()
        if kind is None:
            self._leave_line()

    def _line(self) -> str:
        counts = "" if self._total is None else f": {self._done} of {self._total}"
        seconds = time.monotonic() - self._start
        return f"tightkv: {self._title}{counts}" + (f", {seconds:.0f} s" if seconds >= 1 else "")

    def _draw(self) -> None:
        show = terminal.show if terminal.is_terminal() else terminal.print_line
        show(self._line())

    def _leave_line(self) -> None:
        long = time.monotonic() - self._start >= _LONG_SECONDS
        if long if terminal.is_terminal() else self._total is not None:
            terminal.print_line(self._line())

    def _tell(self) -> None:
        if self._delay and not self._over.wait(self._delay):
            self._draw()
        period = _REDRAW_SECONDS if terminal.is_terminal() else _REMIND_SECONDS
        while not self._over.wait(period):
            self._draw()
