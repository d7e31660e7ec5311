"""A batch's prefill in `bench engine`: measured once, and its prompts used again."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import bench_workers
from tightkv.tools.bench import engine, engine_worker
from tightkv.tools.bench.engine_plan import EnginePlan, what_is_measured
from tightkv.tools.bench.loads import Load

CAPACITY = {"blocks": 100, "block_size": 16}


class PacedEngine:
    """An engine that takes two seconds a prompt it has not seen and 10 ms a decode step."""

    capacity: dict[str, int] = CAPACITY

    def __init__(self) -> None:
        self.made = 0
        self.seen: set[int] = set()
        self.asked: list[tuple[list[int], int]] = []

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        self.made += len(lengths)
        return [[self.made - i] * tokens for i, tokens in enumerate(lengths)]

    def steps(self, prompts: list[list[int]], new_tokens: int) -> list[engine_worker.Step]:
        return []

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        self.asked.append(([len(prompt) for prompt in prompts], new_tokens))
        new = {prompt[0] for prompt in prompts} - self.seen
        self.seen |= new
        return 2 * len(new) + 0.010 * (new_tokens - 1)


def test_a_batch_is_prefilled_once_and_then_decoded() -> None:
    paced = PacedEngine()
    row, prompts = engine_worker.batch_prefill(paced, Load.equal(3, 100), 8)
    assert row["value"] == pytest.approx(3 * 100 / 6) and row["batch"] == 3
    assert what_is_measured(row) == "prefill of 3 x 100, tokens/s"
    row = engine_worker.tpot(paced, Load.equal(3, 100), 8, 1, prompts)
    assert row["value"] == pytest.approx(10.0) and paced.made == 3


def test_a_small_batch_comes_before_what_is_counted() -> None:
    """Within the model's length, and not where it would fill the cache."""
    for max_tokens, sizes in ((9000, [512, 512, 40]), (512, [508, 508, 40]), (24, [20, 20, 20])):
        paced = PacedEngine()
        paced.capacity = {"blocks": 1000, "block_size": 16}
        engine_worker.warm_up(paced, max_tokens)
        assert paced.asked == [(sizes, 4)]
    paced = PacedEngine()
    paced.capacity = {"blocks": 99, "block_size": 16}  # 3 x 33 and vLLM's own
    engine_worker.warm_up(paced, 9000)
    engine_worker.warm_up(paced, 4)
    assert paced.asked == []
    paced.capacity = {"blocks": 100, "block_size": 16}
    engine_worker.warm_up(paced, 9000)
    assert len(paced.asked) == 1


def test_a_batch_that_does_not_fit_with_its_answers_is_left_out() -> None:
    paced = PacedEngine()
    assert engine_worker.batch_prefill(paced, Load.equal(11, 135), 8)[0]["value"] is not None
    row, prompts = engine_worker.batch_prefill(paced, Load.equal(11, 136), 8)
    assert row["value"] is None and prompts is None
    assert row["left_out"] == "11 x 145 tokens need 110 blocks, the cache has 100"


@pytest.mark.parametrize(("device", "measured"), [("cuda", "prefill tpot"), ("cpu", "tpot")])
def test_batches_are_prefilled_on_a_gpu(device: str, measured: str) -> None:
    plan = EnginePlan(model="m", sizes=[Load.equal(2, 9)], device=device)
    found = engine_worker.rows(PacedEngine(), plan)
    assert [row["measure"] for row in found] == measured.split()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_engines_take_turns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the next one imports meanwhile; what fails ends neither the others nor the run."""
    monkeypatch.setattr(engine_worker, "run", bench_workers.one_row)
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.05)
    plan = EnginePlan(model="m", sizes=[Load.equal(2, 9)], device=device)
    rows = list(engine.engine_rows(plan, ["k4v4", "fp8", "auto"]))
    assert [row["kv"] for row in rows] == ["auto", "k4v4", "fp8", "fp8"]
    assert rows[-1]["error"] == "ValueError: this one fails"
    times = [row["value"] for row in rows[:3]]
    assert times == sorted(times)
    assert rows[2]["others"] == ["0", "1", "2"]
    if device == "cpu":
        assert rows[0]["others"] == ["0"]


def test_a_worker_whose_parent_has_ended_does_not_wait() -> None:
    parent, pipe = multiprocessing.Pipe()
    parent.close()
    with pytest.raises(EOFError):
        pipe.recv()


@pytest.mark.parametrize("worker", [bench_workers.too_slow, bench_workers.silent])
def test_an_engine_that_takes_too_long_is_ended(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_worker, "run", worker)
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0.05)
    plan = EnginePlan(model="m", sizes=[Load.equal(2, 9)], timeout=0.3)
    (row,) = engine.engine_rows(plan, ["auto"])
    assert row["error"] == "not done after 0.3 seconds"


def test_an_engine_that_is_killed_says_by_what(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_worker, "run", bench_workers.crashes)
    plan = EnginePlan(model="m", sizes=[Load.equal(2, 9)])
    row, error = engine.engine_rows(plan, ["auto"], tmp_path / "log")
    assert row["value"] == 1 and "SIGILL" in error["error"]
    assert (tmp_path / "log").read_text() == "nothing special\n"


def test_an_engine_that_says_nothing_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_worker, "run", bench_workers.ends_at_once)
    plan = EnginePlan(model="m", sizes=[Load.equal(2, 9)])
    rows = list(engine.engine_rows(plan, ["auto", "k4v4"], tmp_path / "log"))
    assert [row["error"] for row in rows] == ["exit code 3"] * 2


def test_rows_that_come_as_a_process_ends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last row is there just after it was waited for in vain."""
    sent: list[dict[str, Any]] = []

    class Ending:
        exitcode, ended = 0, False

        def poll(self, seconds: float) -> bool:
            if not self.ended:  # nothing in time; but then
                self.ended = True
                sent.append({"measure": "tpot"})
                return False
            return bool(sent)

        def is_alive(self) -> bool:
            return not self.ended

        def recv(self) -> Any:
            return sent.pop()

        def ignore(self, *_: Any) -> None:
            pass

        send = close = start = kill = join = ignore

    process = Ending()

    class Context:
        def Pipe(self) -> Any:
            return process, process

        def Process(self, **_: Any) -> Any:
            return process

    monkeypatch.setattr(engine, "_PROCESSES", Context())
    plan = EnginePlan(model="m", sizes=[Load.equal(2, 9)], shape=None)
    assert list(engine.engine_rows(plan, ["auto"])) == [{"measure": "tpot"}]


def test_random_prompts_are_of_the_vocabulary_and_differ() -> None:
    class Model:
        def get_vocab_size(self) -> int:
            return 7

    class Config:
        model_config = Model()

    class Llm:
        class llm_engine:
            vllm_config = Config()

    made = engine_worker.Engine(Llm())
    one, two = made.prompts([500, 500])
    assert set(one) == set(two) == {3, 4, 5, 6} and one != two
    assert made.prompts([500])[0] not in (one, two)
