"""The one-way layering of the package, checked by import-linter (contracts in pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_no_contract_is_broken() -> None:
    # In a process of its own: the linter switches off every logger that exists when it runs.
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--config", str(PYPROJECT), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout
