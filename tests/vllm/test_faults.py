"""benchmarks/faults.py: a handful of its rounds, and that it sees what goes wrong."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_outputs import Engines

ROOT = Path(__file__).resolve().parents[2]
# Whose files say what they are, and whose do not.
CASES = {
    "checked": {"tier": "checked", "others": ["other_weights"]},
    "vllm": {"tier": "vllm", "others": []},
}


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("faults")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    few = {"name": "dense", "faults": 40, "kills": 1, "seed": 0, "prompts": 4}
    jobs = {name: {"faults": {**few, **case}} for name, case in CASES.items()}
    return Engines(jobs, {}, tmp_path_factory.mktemp("faults"))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", ["checked", pytest.param("vllm", marks=pytest.mark.thorough)])
def test_faults_in_files_give_no_wrong_answer(script: Any, tables: Engines, tier: str) -> None:
    rows = tables[tier]["rows"]
    assert sum(row["faults"] for row in rows) > 40
    assert not [row for row in rows if not script.is_fine(row)]
    found = {row["fault"]: row for row in rows}
    assert found["restart"]["right"] == found["restart"]["answers"] == 4
    assert found["killed_writer"]["right"] + found["killed_writer"]["missed"] == 16
    if tier == "checked":
        assert found["store_of_other_weights"]["missed"] == 4
        assert sum(row["missed"] for row in rows) > 20
    else:  # so the experiment can tell
        assert sum(row["wrong"] for row in rows) > 0


def test_answers_are_equal_to_the_bit_or_wrong(script: Any) -> None:
    def answer(loaded: int, token: int = 5, logprob: float = -1.0) -> Any:
        return script.Answer(loaded, [token], [[(token, logprob)]])

    known = {64: answer(64), 0: answer(0, logprob=-1.5)}
    tally = script.Tally()
    for told in (answer(64), answer(0, logprob=-1.5), answer(64, 6), answer(0), answer(32)):
        tally.judge(told, known)
    tally.judge_error(OSError("store/abc.bin is damaged"), ["abc.bin"])
    tally.judge_error(OSError("damaged"), ["abc.bin"])
    assert tally["answers"] == 7
    assert (tally["right"], tally["missed"], tally["refused"], tally["wrong"]) == (1, 1, 1, 4)
    assert tally["wrong_tokens"] == 2  # another token, and a load that there was not before


def test_faults_in_saved_caches_are_refused(script: Any, tmp_path: Path) -> None:
    job = {"case": "llama", "folder": str(tmp_path), "faults": 50, "seed": 1}
    found = script.saved_faults.run_saved(job)
    assert sum(tally["faults"] for tally in found.values()) == 50
    assert found.pop("killed_save")["right"] == 10
    assert all(tally["refused"] == tally["faults"] for tally in found.values())


@pytest.mark.vllm
def test_a_file_of_another_block_is_refused_and_deleted(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("vllm.v1.kv_offload.tiering.fs.manager")
    files = importlib.import_module("checked_files")
    one, two = (tmp_path / "model_r0" / "abc" / "de_g0" / f"{name}.bin" for name in "ab")
    data = random.Random(0).randbytes(4096)
    files.store_blocks([(one, memoryview(data)), (two, memoryview(data[::-1]))])
    read = bytearray(4096)
    files.load_block(one, memoryview(read))
    assert read == data
    for change in (
        lambda whole: two.read_bytes(),
        lambda whole: whole[:-1],
        lambda whole: whole + b"0",
        lambda whole: script.flipped(random.Random(1), whole),
    ):
        whole = one.read_bytes()
        one.write_bytes(change(whole))
        with pytest.raises(OSError, match=f"{one} is damaged or of another block"):
            files.load_block(one, memoryview(read))
        assert read == data and not one.exists()
        files.store_blocks([(one, memoryview(data))])
