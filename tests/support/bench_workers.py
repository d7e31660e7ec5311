"""Processes in place of those of engines in bench engine: module functions, as spawning needs."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tightkv.tools.bench.engine_plan import EnginePlan


def one_row(plan: EnginePlan, kv: str, model: str, pipe: Connection, said: Path) -> None:
    """Waits for its turn, and says which others have started; fp8 fails."""
    said.with_suffix(".here").touch()
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    pipe.recv()
    others = sorted(path.stem for path in said.parent.glob("*.here"))
    row = {"kv": kv, "measure": "capacity", "value": time.monotonic(), "others": others}
    pipe.send(row)
    if kv == "fp8":
        raise ValueError("this one fails")


def too_slow(plan: EnginePlan, kv: str, model: str, pipe: Connection, said: Path) -> None:
    time.sleep(60)


def silent(plan: EnginePlan, kv: str, model: str, pipe: Connection, said: Path) -> None:
    """Closes its end, and goes on."""
    pipe.close()
    time.sleep(60)


def ends_at_once(plan: EnginePlan, kv: str, model: str, pipe: Connection, said: Path) -> None:
    """Before it has opened the file of its output, as a process that cannot be started."""
    os._exit(3)


def crashes(plan: EnginePlan, kv: str, model: str, pipe: Connection, said: Path) -> None:
    said.write_text("nothing special\n")
    pipe.send({"kv": kv, "measure": "capacity", "value": 1})
    sys.stderr.close()
    os.kill(os.getpid(), signal.SIGILL)
