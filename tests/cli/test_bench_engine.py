"""tightkv bench engine: the figures of an engine whose times we know, and of a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tightkv import KVQuantConfig
from tightkv.fit.checkpoint import Checkpoint
from tightkv.fit.decide import Layers, fit
from tightkv.model_shape import read_model_shape
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench import engine, engine_plan, engine_worker
from tightkv.tools.bench.engine_plan import (
    SHAPES,
    EnginePlan,
    MixedLoad,
    engine_arguments,
    write_shape,
)
from tightkv.tools.bench.engine_worker import Step
from tightkv.tools.bench.loads import Load
from tightkv.tools.bench.random_weights import write_random_weights
from tightkv.tools.bench.timing import spread
from tightkv.tools.cli import main
from tightkv.tools.cli.bench import command, show

# --- engine: without vLLM ------------------------------------------------------------------------
CAPACITY = {"blocks": 100, "block_size": 16}


class SteadyEngine:
    """An engine that takes a second a prompt it has not seen and 10 ms a decode step."""

    capacity = CAPACITY

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.made = 0
        self.seen: set[int] = set()

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        self.made += len(lengths)
        return [[self.made - i] * tokens for i, tokens in enumerate(lengths)]

    def steps(self, prompts: list[list[int]], new_tokens: int) -> list[Step]:
        """12 ms each, 4 of them the host's, and 6 more where a sequence completes a page of 16."""
        found = []
        for i in range(1, new_tokens):
            lengths = [len(prompt) + i for prompt in prompts]
            full = any(n % 16 == 0 for n in lengths)
            found.append(Step(0.018 if full else 0.012, 0.004, lengths))
        return found

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        self.asked.append((len(prompts), new_tokens))
        new = {prompt[0] for prompt in prompts} - self.seen
        self.seen |= new
        return len(new) + 0.010 * (new_tokens - 1)


def test_tpot_is_the_time_of_further_tokens_alone() -> None:
    steady = SteadyEngine()
    row = engine_worker.tpot(steady, Load.equal(3, 100), 8, 2)
    assert row["value"] == pytest.approx(10.0) and row["unit"] == "ms"
    assert steady.asked == [(3, 9), (3, 1), (3, 9), (3, 1), (3, 9)]


def test_single_steps_stand_beside_the_figure_as_served() -> None:
    row = engine_worker.tpot(SteadyEngine(), Load.equal(3, 100), 16, 2)
    assert row["value"] == pytest.approx(10.0)
    assert row["steps"] == 32 and row["steps_completing"] == 2  # at 112 tokens, in each repeat
    assert row["step_ms"]["p50"] == pytest.approx(12) and row["host_ms"]["p99"] == pytest.approx(4)
    assert row["step_ms"]["p99"] == pytest.approx(18)
    assert row["completing_ms"]["p50"] == pytest.approx(18)
    assert row["not_completing_ms"]["p99"] == pytest.approx(12)
    assert row["ratios"] == {
        "p99 to p50 of steps": pytest.approx(1.5),
        "steps that complete pages to others": pytest.approx(1.5),
    }
    never = engine_worker.tpot(SteadyEngine(), Load.equal(3, 96), 8, 1)
    assert never["completing_ms"] is None and list(never["ratios"]) == ["p99 to p50 of steps"]
    waiting = [Step(0.012, None, [5])]
    assert engine_worker.single_steps(waiting, 16)["host_ms"] is None
    assert engine_worker.single_steps([], 16) == {}


def test_ragged_lengths_have_any_phase_and_the_middle_as_their_mean() -> None:
    load = Load.parse("256x512-1536")
    lengths = load.lengths
    assert lengths == Load(256, 512, 1536).lengths  # the same in every run
    assert sum(lengths) == 256 * load.context == 256 * 1024
    assert min(lengths) < 540 and max(lengths) > 1508
    assert len({length % 64 for length in lengths}) > 56
    assert lengths != sorted(lengths) and load.longer(7).lengths == [n + 7 for n in lengths]
    assert Load(3, 10, 20).lengths.count(15) >= 1 and sum(Load(3, 10, 20).lengths) == 45
    assert Load.parse("32x6k-10k") == Load(32, 6144, 10240) and str(load) == "256 x 512-1536"
    assert Load.parse("32x8k") == Load.parse("32x8192") == Load.equal(32, 8192)
    assert Load.parse("2x1.5k").longest == 1536 and str(Load.parse("2x1.5k")) == "2 x 1536"


def test_a_ragged_row_is_another_load_than_an_equal_one() -> None:
    ragged = engine_worker.tpot(SteadyEngine(), Load(3, 90, 110), 8, 1)
    equal = engine_worker.tpot(SteadyEngine(), Load.equal(3, 100), 8, 1)
    assert ragged["context"] == equal["context"] == 100 and ragged["ragged"] == [90, 110]
    assert "ragged" not in equal
    names = [engine_plan.what_is_measured(row) for row in (ragged, equal)]
    assert names == ["TPOT 3 x 90-110, ms", "TPOT 3 x 100, ms"]
    row, _ = engine_worker.batch_prefill(SteadyEngine(), Load(2, 90, 110), 8)
    assert row["value"] == pytest.approx(200 / 2) and row["tokens"] == 100
    assert engine_plan.what_is_measured(row) == "prefill of 2 x 90-110, tokens/s"


def test_single_steps_have_ratios_and_lines_of_their_own() -> None:
    own: dict[str, Any] = {}
    rows = []
    for kv, share in (("auto", 1.0), ("k4v4", 0.5)):
        row = engine_worker.tpot(SteadyEngine(), Load.equal(3, 100), 16, 1)
        row |= {"kv": kv, "bench": "engine", "arguments": {"dtype": "bfloat16"}, "gpu": "G"}
        row |= {"model": "m", "vllm": "1"}
        for name in ("step_ms", "host_ms"):
            row[name] = {key: share * value for key, value in row[name].items()}
        rows.append(engine._with_ratio(row, own))
    ratios = rows[1]["ratios"]
    assert ratios["to auto"] == 1 and ratios["step to auto"] == ratios["host to auto"] == 0.5
    assert ratios["p99 to p50 of steps"] > 1.4
    lines = show.engine_text(rows).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("single synchronized steps"))
    steps = lines[at + 2]
    assert "12.00 / 12.00 / 17.10 (1.00x)" in steps and "6.00 / 6.00 / 8.55 (0.50x)" in steps


def test_prefill_counts_prompts_that_are_not_cached_and_not_the_first() -> None:
    steady = SteadyEngine()
    row = engine_worker.prefill(steady, 300, 2)
    assert row["value"] == pytest.approx(300.0) and row["seconds"] == [1.0, 1.0]
    assert steady.asked == [(1, 1)] * 3


def test_the_first_prompts_of_new_lengths_are_all_counted() -> None:
    row = engine_worker.new_lengths(SteadyEngine(), 300)
    assert row["lengths"] == [263, 182, 49] and row["seconds"] == [1.0] * 3
    assert row["value"] == pytest.approx(182.0)
    assert engine_worker.new_lengths(SteadyEngine(), 99 * 16)["value"] is None


def test_a_mixed_load_is_timed_by_request() -> None:
    class Queue(SteadyEngine):
        """One request after another: a second to its first token, 10 ms to each other."""

        def answer_all(self, prompts: list[list[int]], answers: list[int]) -> list[list[float]]:
            times, now = [], 0.0
            for tokens in answers:
                times.append([now + 1 + 0.010 * i for i in range(tokens)])
                now = times[-1][-1]
            return times

    load = MixedLoad(5, (10, 20), (3, 3))
    row = engine_worker.mixed(Queue(), load)
    assert row["seconds"] == [pytest.approx(5.1)] and row["value"] == pytest.approx(15 / 5.1)
    assert 50 <= row["load"]["prompt_tokens"] <= 100 and row["load"]["output_tokens"] == 15
    assert row["ttft_ms"]["p50"] == pytest.approx(3040) and row["tpot_ms"]["p99"] == pytest.approx(
        10
    )


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    steady = SteadyEngine()
    # 11 x (135 + 8 + 1) tokens are 11 x 9 blocks; the last of 100 is vLLM's own
    assert engine_worker.tpot(steady, Load.equal(11, 135), 8, 1)["value"] is not None
    row = engine_worker.tpot(steady, Load.equal(11, 136), 8, 1)
    assert row["value"] is None
    assert row["left_out"] == "11 x 145 tokens need 110 blocks, the cache has 100"
    assert engine_worker.prefill(steady, 99 * 16 - 1, 1)["value"] is not None
    assert engine_worker.prefill(steady, 99 * 16, 1)["value"] is None


def test_engines_differ_in_their_cache_only() -> None:
    plan = EnginePlan(
        shape="llama-3.1-8b", sizes=[Load.equal(32, 8192), Load.equal(8, 100)], device="cuda"
    )
    own, fp8, ours = (engine_arguments(plan, kv, "m") for kv in ("auto", "fp8", "k4v4"))
    assert own["max_model_len"] == 8704 and own["max_num_seqs"] == 32
    assert own["dtype"] == "bfloat16"
    assert own["compilation_config"]["cudagraph_capture_sizes"] == [1, 8, 32]
    assert own["additional_config"] == {"tightkv": False}  # whatever TIGHTKV_* says
    assert ours == {**own, "additional_config": {"tightkv": {"preset": "k4v4"}}}
    assert fp8 == {**own, "kv_cache_dtype": "fp8"}
    options = {"preset": "k4v4", "window_bits": 16}
    other = engine_arguments(plan, json.dumps(options), "m")
    assert other == {**own, "additional_config": {"tightkv": options}}


def test_further_arguments_win_and_extend() -> None:
    given = {"max_num_seqs": 4, "additional_config": {"a": 1}}
    plan = EnginePlan(model="m", prefill=[511], kv_memory=7, engine_args=given)
    found = engine_arguments(plan, "k3v3", "m")
    assert found["max_num_seqs"] == 4 and found["max_model_len"] == 512
    assert found["additional_config"] == {"a": 1, "tightkv": {"preset": "k3v3"}}
    assert found["kv_cache_memory_bytes"] == 7 and found["enforce_eager"] is True
    assert found["dtype"] == "float32"


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_configs_that_can_be_read(name: str, tmp_path: Path) -> None:
    shape = read_model_shape(str(write_shape(name, tmp_path / name)))
    assert len(shape.layers) == SHAPES[name]["num_hidden_layers"]
    assert shape.layers[0].head_dim == SHAPES[name]["head_dim"]


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_are_a_checkpoint(tied: bool, tmp_path: Path) -> None:
    config = {**SHAPES["smollm2-135m"], "num_hidden_layers": 2, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_random_weights(tmp_path)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    shapes = dict(enumerate(read_model_shape(str(tmp_path)).layers))
    layers = Layers(shapes, refuse=lambda cfg: None)
    found = fit(Checkpoint(tmp_path, "random"), KVQuantConfig.preset("k4v4"), layers)
    assert found.cfg == found.asked  # keys need no more bits
    assert all(layer.metric is not None for layer in found.layers.values())
    rows = torch.cat([x.detach()[:100, :16] for x in model.parameters() if x.dim() == 2])
    assert 0.018 < float(rows.float().std()) < 0.022
    assert len(rows) == len(rows.unique(dim=0)) > 1000


def test_ratios_are_to_vllms_own_which_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"auto": 200.0, "k4v4": 150.0, "fp8": None}

    class Worker:
        output = ""

        def __init__(self, plan: EnginePlan, kv: str, *_: Any) -> None:
            self.kv = kv

        def rows(self) -> Iterator[dict[str, Any]]:
            yield {"kv": self.kv, "measure": "capacity", "value": values[self.kv]}

        def end(self) -> None:
            pass

    monkeypatch.setattr(engine, "_Worker", Worker)
    plan = EnginePlan(model="m", prefill=[1])
    found = list(engine.engine_rows(plan, ["k4v4", "auto", "fp8", "k4v4"]))
    assert [row["kv"] for row in found] == ["auto", "k4v4", "fp8"]
    assert [row.get("ratios", {}).get("to auto") for row in found] == [1.0, 0.75, None]


def test_why_an_engine_ended() -> None:
    output = "INFO start\nTraceback:\n  File\nValueError: too large: 3\nINFO shutting down\n"
    assert engine.why(1, output) == "ValueError: too large: 3"
    assert engine.why(1, "one\ntwo\n") == "two" and engine.why(3, "") == "exit code 3"
    assert "SIGILL" in engine.why(-4, output) and "--dtype float32" in engine.why(-4, output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either a model or --shape"),
        (["m", "--shape", "llama-3.1-8b"], "either a model or --shape"),
        (["m", "--size", "8*2"], "--size '8*2'; give BATCHxCONTEXT"),
        (["m", "--size", "0x2"], "size 0x2: 0; it must be at least 1"),
        (["m", "--size", "2x1.5"], "--size '2x1.5'; give BATCHxCONTEXT"),
        (["m", "--size", "2x9k-8k"], "size 2x9216-8192; the longest must not be below"),
        (["m", "--prefill", "0"], "prefill of 0: 0; it must be"),
        (["m", "--mixed", "0"], "mixed requests: 0; there must be at least 1"),
        (["m", "--mixed", "2", "--mixed-prompts", "9"], "--mixed-prompts '9'; give LOW-HIGH"),
        (["m", "--mixed", "2", "--mixed-answers", "9-3"], "mixed answer lengths 9-3; give 1 <="),
        (["m", "--repeats", "0"], "repeats: 0; it must be"),
        (["m", "--decode-tokens", "0"], "decode tokens: 0; it must be"),
        (["m", "--engine-args", "{"], "is not valid JSON"),
        (["m", "--engine-args", "[]"], "must be a JSON object"),
        (["m", "--engine-args", '{"additional_config": {"tightkv": 1}}'], "which --kv sets"),
        (["m", "--engine-args", '{"additional_config": 1}'], "additional_config=1; it must be"),
        (["m", "--engine-args", '{"kv_cache_dtype": "fp8"}'], "name the cache with --kv"),
        (["m", "--kv-memory", "4 rooms"], "size '4 rooms'"),
        (["m", "--kv", "k5v5"], "KV cache 'k5v5'; supported: auto, fp8"),
        (["m", "--kv", '{"preset"'], "or options of tightkv as a JSON object"),
        (["--shape", "llama"], "shape 'llama'; supported: llama-3.1-8b"),
    ],
)
def test_engine_refuses(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: True)
    assert main(["bench", "engine", *words]) == 2
    assert message in capsys.readouterr().err


def test_engine_without_vllm_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["bench", "engine", "m"]) == 2
    assert 'tightkv bench engine needs vLLM: pip install ".[vllm]"' in capsys.readouterr().err


# --- engine: with vLLM ---------------------------------------------------------------------------
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_caches_in_the_real_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_folder import write_tiny_folder

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("TIGHTKV_PRESET", "k2v2")  # must not reach vLLM's own cache
    model = write_tiny_folder(tmp_path / "model")
    out, log = tmp_path / "rows.jsonl", tmp_path / "log.txt"
    words = ["--kv", "k4v4", "--kv", "auto", "--size", "2x100", "--size", "400x60"]
    words += ["--size", "3x90-150"]
    words += ["--mixed", "9", "--mixed-prompts", "20-120", "--mixed-answers", "1-24"]
    words += [
        "--new-lengths",
        "--prefill",
        "200",
        "--decode-tokens",
        "24",
        "--repeats",
        "1",
        "--kv-memory",
        "4MiB",
    ]
    words += ["--out", str(out), "--log", str(log), "--engine-args", '{"max_num_seqs": 8}']
    code = main(["bench", "engine", str(model), *words])
    text, progress = capsys.readouterr()
    assert code == 0, log.read_text()[-4000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:  # nobody has to wait for the end
        assert row["value"] is None or f": {row['value']:.4g}, to auto " in progress
    measures = ["capacity", "prefill", "new_lengths", "tpot", "tpot", "tpot", "mixed"]
    assert [(r["kv"], r["measure"]) for r in rows] == [
        (kv, measure) for kv in ("auto", "k4v4") for measure in measures
    ]
    own, ours = rows[:7], rows[7:]
    assert not any("tightkv" in name for name in own[0]["attention"])
    assert [count for name, count in ours[0]["attention"].items() if "tightkv" in name] == [2]
    for row in own[0], ours[0]:
        assert row["value"] == row["blocks"] * row["block_size"] == row["reported"]
        assert f"KV cache size: {row['reported']:,} tokens" in log.read_text()
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 2, 32)
    float32_bytes = 2 * 2 * 32 * 4  # keys and values, heads, numbers
    expected = float32_bytes / layout.bytes_per_token
    assert ours[0]["ratios"]["to auto"] == pytest.approx(expected, rel=0.03)
    assert own[1]["value"] > 0 and ours[3]["ratios"]["to auto"] > 0
    assert "need" in own[4]["left_out"] and own[4]["value"] is None
    for row in own[5], ours[5]:
        assert row["ragged"] == [90, 150] and row["context"] == 120 and row["steps"] == 24
        assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p90"] <= row["step_ms"]["p99"]
        assert row["host_ms"] is None  # the host is the device
        page = (own if row["kv"] == "auto" else ours)[0]["block_size"]
        ends = [{n + i for n in Load(3, 90, 150).lengths} for i in range(1, 25)]
        assert row["steps_completing"] == sum(any(n % page == 0 for n in of) for of in ends) > 0
    assert ours[5]["ratios"]["step to auto"] > 0
    assert own[6]["load"] == ours[6]["load"] and own[6]["load"]["requests"] == 9
    assert 0 < ours[6]["ttft_ms"]["p50"] <= ours[6]["seconds"][0] * 1e3
    assert "capacity, tokens" in text and "TPOT 2 x 100, ms" in text
    served, steps, latencies = text.split("single synchronized steps")[0], *text.split("\n\n")[2:4]
    assert all("TPOT 3 x 90-150, ms" in part for part in (served, steps))
    assert "9 mixed requests, tokens/s" in latencies and "TTFT" in latencies
    assert "auto keeps 32 bits per number" in text


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_cannot_start_gives_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path), "--kv", "auto", "--prefill", "8", "--json"]
    assert main(["bench", "engine", *words]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["kv"] == "auto" and "Error" in row["error"]


def test_percentiles_lie_between_ranks() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == pytest.approx(
        {"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97}
    )
    assert set(spread([7.0]).values()) == {7.0}
