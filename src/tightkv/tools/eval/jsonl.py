"""Examples from local files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def read_examples(path: str | Path, fields: Sequence[str]) -> list[dict[str, str]]:
    """One object a line, each with these fields as texts; empty lines are skipped."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"file {str(path)!r} does not exist")
    wanted = " and ".join(f'"{field}"' for field in fields)
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"file {str(path)!r} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"file {str(path)!r}, line {number} is not JSON ({error}); "
                f"each line must be an object with {wanted}"
            ) from None
        if not isinstance(row, dict) or not all(isinstance(row.get(f), str) for f in fields):
            raise ValueError(
                f"file {str(path)!r}, line {number} must be a JSON object with {wanted} as texts"
            )
        examples.append({field: row[field] for field in fields})
    if not examples:
        raise ValueError(f"file {str(path)!r} has no lines; each must be an object with {wanted}")
    return examples
