"""Standard error of a command: lines that stay, and one line of a terminal that changes."""

from __future__ import annotations

import os
import shutil
import sys
import threading

_CLEAR = "\r\033[K"
_lock = threading.RLock()
_shown = False


def is_terminal() -> bool:
    """Whether a line can be drawn again."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_line(line: str) -> None:
    """A line that stays; the one that changes makes room."""
    with _lock:
        clear()
        print(line, file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Draw the line that changes, cut to the width of the terminal."""
    global _shown
    with _lock:
        width = shutil.get_terminal_size().columns - 1
        print(_CLEAR + line[:width], end="", file=sys.stderr, flush=True)
        _shown = True


def clear() -> None:
    """Take away the line that changes, if there is one."""
    global _shown
    with _lock:
        if _shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            _shown = False
