"""benchmarks/speculation.py: what its engines are given, and what its rows say."""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speculation.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("speculation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_engines_differ_in_cache_and_drafts_alone(script: Any) -> None:
    args = argparse.Namespace(
        context=100, tokens=20, dtype="bfloat16", batches=[1, 8], accepted=0.5, device="cuda"
    )
    args.kv_gib, args.engine = 1.0, "{}"
    plain, ours, without = (
        script.engine_arguments(args, cache, drafts, "model", "head")
        for cache, drafts in (("auto", 3), ("k4v4", 3), ("auto", 0))
    )
    assert {key for key in plain if plain[key] != ours[key]} == {"additional_config"}
    assert plain["speculative_config"]["synthetic_acceptance_length"] == 1 + 0.5 + 0.25 + 0.125
    assert plain["compilation_config"]["cudagraph_capture_sizes"] == [1, 4, 8, 32]
    assert "speculative_config" not in without


class Engine:
    """Sequences that get their first token one after another, and `speed` per step from then on."""

    def __init__(self, speed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.speed, self.now = speed, 0.0
        self.tokens: dict[str, int] = {}
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.most = params.max_tokens
        self.tokens[name] = 0

    def has_unfinished_requests(self) -> bool:
        return min(self.tokens.values()) < self.most

    def step(self) -> list[Any]:
        self.now += 1.0
        fresh = next((name for name, count in self.tokens.items() if not count), None)
        for name, count in self.tokens.items():
            if name == fresh or (fresh is None and count < self.most):
                self.tokens[name] = min(self.most, count + (1 if fresh else self.speed))
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * count)])
            for name, count in self.tokens.items()
            if count
        ]


def test_prompts_are_not_counted(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(speed=3, monkeypatch=monkeypatch)
    found = script.decode(engine, [[1], [2]], SimpleNamespace(max_tokens=16))
    assert found == {"seconds": 5.0, "tokens": 30, "steps": 5}


def test_rows_say_what_speculation_gains(script: Any) -> None:
    def row(cache: str, drafts: int, tpot: float) -> dict[str, Any]:
        return {"cache": cache, "drafts": drafts, "batch": 1, "tpot_ms": tpot}

    own = script.with_ratios([row("auto", 0, 8.0), row("auto", 3, 4.0)], [])
    failed = {"cache": "k4v4", "drafts": 5, "error": "exit code 1"}
    ours = script.with_ratios([row("k4v4", 0, 6.0), row("k4v4", 3, 2.0), failed], own)
    assert own[1]["ratios"] == {"to no speculation": 2.0, "to auto": 1.0}
    assert ours[1]["ratios"] == {"to no speculation": 3.0, "to auto": 2.0}
    assert ours[2] == failed
