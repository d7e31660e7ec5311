"""The one-way layering of the package, checked by import-linter (contracts in pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

import pytest
from importlinter.cli import lint_imports

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def test_no_contract_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    status = lint_imports(config_filename=str(PYPROJECT), no_cache=True)
    report = capsys.readouterr().out
    assert status == 0, report
    assert "2 kept, 0 broken" in report
