"""tightkv bench decode on a CPU: whole steps of caches that grow alike."""

from __future__ import annotations

import pytest
import torch

from tightkv import KVQuantConfig
from tightkv.tools.bench import cpu
from tightkv.tools.bench.cpu import Milliseconds, _contenders, decode_rows, interleaved, ratios
from tightkv.tools.bench.inputs import Shape

CFG = KVQuantConfig.preset("k8v8", page_size=32, exact_pages=1)
SHAPE = Shape(2, 200, query_heads=6, kv_heads=3, head_dim=64)


def test_all_contenders_attend_to_the_same_tokens() -> None:
    contenders = _contenders(CFG, SHAPE, repeats=2)
    outputs = {}
    for name, contender in contenders.items():
        for _ in range(65):
            contender.append()
        outputs[name] = contender.attend().float().reshape(2, 6, 64)
    assert contenders["tightkv"].cache.table.lengths == [200, 200]
    exact = outputs["sdpa fp32"]
    for name, found in outputs.items():
        error = (found - exact).norm() / exact.norm()
        assert error < (1e-5 if "fp32" in name else 2e-2), name


class Clock:
    """Stands still but where a contender says that it took time."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, list[str]()

    def __call__(self) -> float:
        return self.seconds


class Noting:
    """Takes `attention` seconds a step, and `sealing` more for one append in 32."""

    def __init__(self, name: str, clock: Clock, attention: float, sealing: float = 0.0) -> None:
        self.name, self.clock, self.appends = name, clock, 0
        self.attention, self.sealing = attention, sealing

    def append(self) -> None:
        self.appends += 1
        self.clock.calls.append(f"{self.name} appends")
        self.clock.seconds += self.sealing if self.appends % 32 == 0 else 0.0

    def attend(self) -> torch.Tensor:
        self.clock.calls.append(f"{self.name} attends")
        self.clock.seconds += self.attention
        return torch.zeros(())


def test_contenders_take_turns_and_sealing_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cpu, "perf_counter", clock)
    contenders = {
        "fast": Noting("fast", clock, 0.002, sealing=0.032),
        "slower": Noting("slower", clock, 0.018),
        "slow": Noting("slow", clock, 0.022),
    }
    found = interleaved(contenders, page_size=32, repeats=4)
    assert clock.calls[:4] == ["fast appends", "fast attends", "slower appends", "slower attends"]
    assert clock.calls.count("fast attends") == 1 + 4 * 32
    assert clock.calls.count("slower attends") == 1 + 4 * 32
    assert clock.calls.count("slow attends") == 1 + 3  # more than ten times the fastest
    assert found["fast"].attention == pytest.approx(2) and found["fast"].step == pytest.approx(3)
    assert found["slow"].step == pytest.approx(22)


def test_ratios_are_of_whole_steps_with_attention_beside_them() -> None:
    found = ratios(
        {
            "tightkv": Milliseconds(4.0, 2.0),
            "reference": Milliseconds(100.0, 90.0),
            "sdpa fp32": Milliseconds(6.0, 5.5),
            "sdpa bf16": Milliseconds(7.0, 5.0),
        }
    )
    assert found["fastest sdpa"] == 1.5 and found["fastest sdpa, attention alone"] == 2.5
    assert found["reference"] == 25 and found["append share"] == 0.5


def test_sequences_too_short_for_the_rounds_are_refused() -> None:
    """Steps would measure other lengths than the row says."""
    with pytest.raises(ValueError, match="tokens=65; 2 rounds of 32 steps need more than 65"):
        _contenders(CFG, Shape(1, 65), repeats=2)
    assert len(_contenders(CFG, Shape(1, 66), repeats=2)["tightkv"].cache.table.lengths) == 1


@pytest.mark.filterwarnings("error")
def test_a_row_has_both_figures() -> None:
    (row,) = decode_rows(CFG, [Shape(1, 64, query_heads=2, kv_heads=1, head_dim=64)], repeats=1)
    assert (
        set(row["ms"])
        == set(row["attention_ms"])
        == {
            "tightkv",
            "reference",
            *(f"sdpa {dtype}{way}" for dtype in ("fp32", "bf16") for way in ("", " packed")),
        }
    )
    assert all(row["ms"][name] >= row["attention_ms"][name] for name in row["ms"])
    assert {"fastest sdpa", "fastest sdpa, attention alone"} <= set(row["ratios"])
