"""benchmarks/hybrid_hits.py: what its rows say of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import load_script


@pytest.mark.parametrize("given", [True, False])
def test_rows_name_the_model_that_was_measured(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, written = load_script("hybrid_hits"), list[Any]()

    def run(words: list[str], **_: Any) -> Any:
        Path(words[-1]).write_text('[{"length": 1000}]')
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "write", lambda rows, args, name: written.append((rows, name)))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1024}))
    model = ["--model", str(tmp_path)] if given else ["--shape", "lfm2"]
    monkeypatch.setattr(sys, "argv", ["hybrid_hits.py", *model, "--caches", "auto"])
    assert script.main() == 0
    name = str(tmp_path) if given else "lfm2"
    assert written == [([{"cache": "auto", "length": 1000}], name)]
