"""Scripts of benchmarks/, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
