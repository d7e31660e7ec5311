"""Results that have been measured, kept in a file of JSON lines, so that a run can be resumed."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import tightkv
from tightkv.config import cache_root
from tightkv.files.atomic import check_appendable
from tightkv.tools.eval.tasks.base import digest
from tightkv.tools.rows import append_rows

# Parts of the package that measure nothing.
_NOT_MEASURING = ("tools/bench", "tools/cli", "tools/validate")
_SUFFIXES = (".py", ".c", ".cu", ".cuh", ".h", ".so")


class Store(dict[str, Any]):
    """A result by its key; `fresh` finds nothing but still keeps what is measured."""

    def __init__(self, path: str | Path | None = None, fresh: bool = False) -> None:
        self.path = cache_root() / "eval.jsonl" if path is None else Path(path)
        check_appendable(self.path)
        self._lost = False
        super().__init__({} if fresh else _read(self.path))

    def keep(self, key: str, about: Mapping[str, Any], result: Any) -> None:
        """Written at once: an interrupted run goes on after it. A full disk stops no run."""
        self[key] = result
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = {"kind": "eval-result", "key": key, "time": time, **about, "result": result}
        try:
            _end_line(self.path)
            append_rows(self.path, [row])
        except OSError as error:
            if not self._lost:
                warnings.warn(f"results are not stored in {self.path}: {error}", stacklevel=2)
            self._lost = True


def result_key(about: Mapping[str, Any]) -> str:
    """Of model, config, task and settings, and of the code that measures."""
    versions = [torch.__version__, transformers.__version__, code_digest()]
    return digest([dict(about), versions])


@cache
def code_digest() -> str:
    """16 hex digits of the package's own source: a changed kernel gives new results."""
    root = Path(tightkv.__file__).resolve().parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        place = file.relative_to(root)
        if file.suffix in _SUFFIXES and not str(place).startswith(_NOT_MEASURING):
            found.update(str(place).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    """The last result of each key; a line that was cut off by an interruption is none."""
    results: dict[str, Any] = {}
    if not path.is_file():
        return results
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("kind") == "eval-result" and "key" in row:
            results[str(row["key"])] = row.get("result")
    return results


def _end_line(path: Path) -> None:
    """What follows a line that was cut off begins on a line of its own."""
    if path.is_file() and path.stat().st_size:
        with path.open("r+b") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
