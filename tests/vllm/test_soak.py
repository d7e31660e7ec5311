"""benchmarks/soak.py: that it sees what goes wrong. test_vllm_engine.py runs it for a while."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.modules["soak"] = script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_answers_may_differ_at_ties_alone(soak: Any) -> None:
    alone = soak.Answer([5, 6, 7, 8], [1.0, 0.01, 1.0, 1.0])
    tally = soak.Tally()
    for told in ([5, 6, 7, 8], [5, 6], [5, 9, 9, 9], [5, 6, 9, 8]):
        tally.compare("one", told, alone, 0.05)
    assert (tally.equal, tally.tied) == (2, 1)  # [5, 6] was aborted
    assert tally.problems == ["one: token 2 differs, 1.000 nats apart"]


def test_growth_is_seen_behind_the_noise_of_single_rounds(soak: Any) -> None:
    flat, growing = [500.0, 540.0, 501.0, 502.0] * 5, [500.0 + i for i in range(20)]
    assert abs(soak.Tally(memory=flat, finished=400).growth) < soak.GROWTH / 2
    assert soak.Tally(memory=growing, finished=400).growth > soak.GROWTH


def test_what_a_killed_worker_leaves_is_named(
    soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "WAIT", 0.0)
    (tmp_path / "shm").touch()
    told = {"worker": 2**22 + 1, "shared": [str(tmp_path / "shm")], "seconds": 1.0}
    assert list(soak.problems_of_kill(told)) == [f"a killed worker was not noticed: {told}"]
    told["error"] = "RuntimeError: cancelled"
    assert list(soak.problems_of_kill(told)) == [f"a killed worker leaves {tmp_path / 'shm'}"]
    assert list(soak.problems_of_kill({**told, "shared": []})) == []
