"""Small files of LAMBADA's and GSM8K's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_lambada(folder: Path, count: int = 12) -> Path:
    names = ("Maria", "Victor", "Helen", "Oscar")
    rows = [
        {"text": f"{names[i % 4]} met friend {i} at the station, and it was {names[i % 4]}"}
        for i in range(count)
    ]
    return write_lines(folder / "lambada.jsonl", rows)


def write_gsm8k(folder: Path, count: int = 5) -> Path:
    rows = [
        {
            "question": f"There are {i} red and {i + 1} blue stones. How many stones are there?",
            "answer": f"There are {i} + {i + 1} = {2 * i + 1} stones.\n#### {2 * i + 1}",
        }
        for i in range(count)
    ]
    return write_lines(folder / "gsm8k.jsonl", rows)
