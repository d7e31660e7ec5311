"""tightkv bench decode on a CPU: whole steps of caches that grow alike."""

from __future__ import annotations

import pytest
import torch

from tightkv import KVQuantConfig
from tightkv.bench.cpu import Milliseconds, _contenders, decode_rows, interleaved, ratios
from tightkv.bench.problems import Shape

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


class Counting:
    """Says when it was called, and takes no time."""

    def __init__(self) -> None:
        self.calls = ""

    def append(self) -> None:
        self.calls += "a"

    def attend(self) -> torch.Tensor:
        self.calls += "t"
        return torch.zeros(())


def test_a_turn_is_as_many_steps_as_a_page_has_tokens() -> None:
    one, two = Counting(), Counting()
    interleaved({"one": one, "two": two}, page_size=32, repeats=3)
    assert one.calls == two.calls == "at" * (1 + 3 * 32)


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
