"""benchmarks/vllm_quality.py: KL from the most likely tokens, the caches, a run of engines."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import FOLDER, load_script
from tiny_folder import write_tiny_folder

Position = tuple[float, dict[int, float]]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("vllm_quality")


def position(token: float, *top: float) -> Position:
    return math.log(token), {i: math.log(p) for i, p in enumerate(top)}


def test_tokens_that_are_not_listed_count_as_one(script: Any) -> None:
    p, q = position(0.5, 0.5, 0.25)[1], position(0.5, 0.25, 0.25)[1]
    wanted = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert script.kl(p, q) == pytest.approx(wanted)
    assert script.kl(p, p) == 0
    # what only one has is among the others
    assert script.kl(p, {0: math.log(0.5), 7: math.log(0.25)}) == pytest.approx(0)


def test_figures_of_a_cache(script: Any) -> None:
    same, off = position(0.5, 0.6, 0.2), position(0.25, 0.2, 0.6)
    own = [[same] * 4, [same] * 4]
    other = [[off, same, same, off], [off, same, same, same]]  # the first position is not scored
    found = script.compare(own, other, 1)
    large = script.kl(same[1], off[1])
    assert large > script.LARGE
    assert found["positions"] == 6 and found["kl"] == pytest.approx(large / 6)
    assert found["kl_stderr"] == pytest.approx(large / 6)  # window means of a third and of none
    assert found["kl_above"] == pytest.approx(1 / 6) and found["kl_p999"] == pytest.approx(large)
    assert found["top1"] == pytest.approx(5 / 6)
    assert found["perplexity_increase"] == pytest.approx(2 ** (1 / 6) - 1)
    assert script.compare(own[:1], own[:1], 1)["kl_stderr"] is None


def test_names_of_caches(script: Any) -> None:
    names = script.named_caches(["k4v4", "fp8", "auto"], "c.tkc")
    assert names == ["auto", "again", "k4v4", "k4v4 calibrated", "fp8"]
    arguments = [script.cache_arguments(name, "c.tkc") for name in names]
    assert [found["kv_cache_dtype"] for found in arguments] == ["auto"] * 4 + ["fp8"]
    assert [found["additional_config"]["tightkv"] for found in arguments] == [
        False, False, {"preset": "k4v4"}, {"preset": "k4v4", "calibration": "c.tkc"}, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cache 'k9v9'; supported: k8v8"):
        script.named_caches(["k9v9"], None)


def test_windows_with_nothing_to_score_are_refused_before_an_engine(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_quality.py", "m", "--window", "256"])
    with pytest.raises(ValueError, match="prefill=256 leaves nothing to score"):
        script.main()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.thorough
def test_engines_give_rows(tmp_path: Path) -> None:
    model, out = write_tiny_folder(tmp_path / "model"), tmp_path / "rows.jsonl"
    words = [str(model), "--caches", "k2v2", "--windows", "2", "--window", "400"]
    words += ["--prefill", "250", "--out", str(out), "--name", "tiny"]
    subprocess.run([sys.executable, str(FOLDER / "vllm_quality.py"), *words], check=True)
    rows = {row["cache"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == ["again", "k2v2"]
    assert all(row["kind"] == "vllm-quality" and row["model"] == "tiny" for row in rows.values())
    assert 100 * abs(rows["again"]["kl"]) < rows["k2v2"]["kl"]
    assert rows["again"]["bytes_per_token"] == 2 * 2 * 2 * 32 * 4  # layers, sides, heads, head_dim
    assert rows["k2v2"]["bytes_per_token"] < rows["again"]["bytes_per_token"] / 8
