"""Standard error of a command: lines that stay, and one line of a terminal that changes."""

import os
import shutil
import sys
import threading
from contextlib import suppress
from typing import TextIO

_CLEAR = "\r\033[K"
_lock = threading.RLock()
_shown = False


def open_streams() -> None:
    """Streams that the caller closed (`>&-`) lead nowhere; no other file may get their numbers.

    Standard input stays None: a command that would read it asks for its input in another way.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(nowhere, True)
            if number:
                setattr(sys, name, os.fdopen(nowhere, "w", closefd=False))


def flush_streams() -> None:
    """What a reader that has gone (head, less) or a full disk does not take is dropped.

    Else the interpreter would try again at its end, and fail with a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)


def _drop(stream: TextIO) -> None:
    """Lead a stream nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):  # a stream of a test has no number
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def is_terminal() -> bool:
    """Whether a line can be drawn again."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_line(line: str) -> None:
    """A line that stays; the one that changes makes room."""
    with _lock:
        clear()
        _write(line + "\n")


def show(line: str) -> None:
    """Draw the line that changes, cut to the width of the terminal."""
    global _shown
    with _lock:
        width = shutil.get_terminal_size().columns - 1
        _write(_CLEAR + line[:width])
        _shown = True


def clear() -> None:
    """Take away the line that changes, if there is one."""
    global _shown
    with _lock:
        if _shown:
            _write(_CLEAR)
            _shown = False


def _write(text: str) -> None:
    """Progress that nobody reads any more must not end the work."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)
