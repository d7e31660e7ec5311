"""Rows of results, and the commit they were measured at."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, after what the file has."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab", buffering=0) as file:  # one write: other writers' rows stay whole
        file.write(text.encode())


def source_commit() -> str | None:
    """The commit of the source tree this package runs from, marked if files differ from it.

    $SOURCE_COMMIT says it, where the tree is a copy whose git does not.
    """
    if given := os.environ.get("SOURCE_COMMIT"):
        return given
    package = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
    # A package installed somewhere inside another project's repository is not of that commit.
    if top is None or commit is None or Path(top) / "src" / "tightkv" != package:
        return None
    changes = git("status", "--porcelain", ":/src")
    return f"{commit}-unchecked" if changes is None else f"{commit}-modified" if changes else commit
