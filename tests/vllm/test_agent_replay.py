"""benchmarks/agent_replay.py: what it asks, and what its rows say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "agent_replay.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("agent_replay", SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.modules["agent_replay"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_agents_share_a_system_prompt_and_go_on_from_what_was_said(script: Any) -> None:
    sizes = {"system": 20, "context": 30, "question": 5, "answer": 3, "rounds": 3}
    one, two = (script.Replay(agents=4, vocabulary=100, **sizes) for _ in range(2))
    first, second = one.ask(0), one.ask(0)
    assert len(first) == 55 and second[:55] == first and len(second) == 63
    assert one.ask(1)[:20] == first[:20] and one.ask(1)[20:50] != first[20:50]
    assert two.ask(0) == first  # the same for every cache
    assert sorted(one.order()) == [0, 1, 2, 3]
    assert len(one.ask(0)) <= one.longest


def test_rows_are_of_rounds_and_of_the_late_ones_together(script: Any) -> None:
    turns = [script.Turn(i // 2, ttft=0.1 / (1 + i), prompt=100, cached=10 * i) for i in range(8)]
    rows = script.rows_of("k4v4", turns, rounds=4)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, "late"]
    late = rows[-1]
    assert late["requests"] == 4 and late["hit_rate"] == pytest.approx(0.55)
    assert rows[0]["ttft_ms_mean"] == pytest.approx(75) and rows[0]["hit_rate"] == 0.05
    assert rows[3]["ttft_ms_p90"] <= late["ttft_ms"] <= rows[2]["ttft_ms"]
