"""Models to measure without their weights: a config.json is enough for random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).with_name("models").glob("*.json"))
}


def write_shape(name: str, folder: Path) -> Path:
    """A model folder with nothing but a config.json."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r}; supported: {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1), encoding="utf-8")
    return folder
