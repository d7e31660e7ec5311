"""tightkv eval: free-running text, kept results, the command with several models."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.attention import use_attention
from tightkv.tools.cli import main
from tightkv.tools.eval import results as store_module
from tightkv.tools.eval.forward import (
    CacheRun,
    MakeCache,
    after_prefix,
    ignore,
)
from tightkv.tools.eval.results import Store, code_digest, result_key
from tightkv.tools.eval.tasks.base import Task, paired
from tightkv.tools.eval.tasks.free_running import FreeTask, _gumbel
from tightkv.tools.eval.tasks.needles import NeedleTask, build_haystack, make_needles
from tightkv.tools.eval.tasks.quality import QualityTask, Schedule
from tightkv.tools.eval.windows import Windows
from tiny_folder import byte_tokenizer, write_tiny_folder

SMALL = {"page_size": 32, "exact_pages": 1, "sinks": 1}
EXACT = KVQuantConfig(key_bits=16, value_bits=16, **SMALL)
FINE = KVQuantConfig.preset("k8v8", **SMALL, window_bits=16)
BROKEN = KVQuantConfig(
    key_bits=2,
    value_bits=2,
    page_size=32,
    exact_pages=1,
    sinks=0,
    key_centering="none",
    feedback="off",
)
FILLER = " ".join(f"Sentence {chr(97 + i % 26)} says nothing of note today." for i in range(300))


def make(model: Any, cfg: KVQuantConfig) -> MakeCache:
    return partial(TightCache, cfg, model=model)


def measured(task: Task, model: Any, *configs: KVQuantConfig) -> list[Any]:
    """Every config, with all work told as announced."""
    told: list[int] = []
    exact = task.reference(model, told.append)
    assert sum(told) == task.reference_steps
    exact = json.loads(json.dumps(exact, allow_nan=False))  # as it comes from a file
    found = []
    for cfg in configs:
        told.clear()
        found.append(task.measure(model, make(model, cfg), exact, told.append))
        assert sum(told) == task.steps
        json.dumps(found[-1], allow_nan=False)
    return found


def byte_model(**changes: Any) -> Any:
    return tiny(vocab_size=258, max_position_embeddings=4096, **changes)


# --- the shared run ----------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_scores_are_those_of_a_plain_forward_pass(chunk: int) -> None:
    model, ids = tiny(), prompt(3, 90)
    run = CacheRun(model)
    run.feed(ids[:, :64], last_only=True)
    log_probs = run.score(ids[:, 64:], chunk)
    with torch.inference_mode(), use_attention(model, "sdpa"):
        log_p = model(ids, use_cache=False).logits.log_softmax(-1)[:, 64:89]
    wanted = log_p.gather(-1, ids[:, 65:, None])[..., 0]
    torch.testing.assert_close(log_probs, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_question_finds_the_prefix_alone(family: str) -> None:
    model, ids = tiny(family), prompt(1, 150)[0].tolist()
    for cfg in (None, FINE):
        made = None if cfg is None else make(model, cfg)
        logits = []
        for run in after_prefix(model, made, ids[:120], 3):
            assert run.cache.get_seq_length() == 120
            logits.append(run.feed(torch.tensor([ids[120:]])))
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


# --- free-running text -------------------------------------------------------------------------
def free(temperature: float = 1.0, batch: int = 8, rows: int = 8) -> FreeTask:
    windows = Windows(prompt(rows, 120), ("t",) * rows)
    return FreeTask(windows, new_tokens=24, temperature=temperature, seed=3, batch=batch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_exact_cache_differs_by_nothing_and_a_broken_one_by_much(temperature: float) -> None:
    task = free(temperature)
    exact, fine, broken = measured(task, tiny(initializer_range=0.15), EXACT, FINE, BROKEN)
    assert exact["log_prob"]["difference"] == exact["log_prob"]["stderr"] == 0
    assert exact["lengths"] == [24] * 8 and abs(exact["kl"]) < 1e-4
    assert broken["median"] < fine["median"] and broken["cap"] == 24
    assert broken["kl"] > 50 * abs(fine["kl"]) and broken["kl"] > 0.2
    score, other = broken["log_prob"], fine["log_prob"]
    assert score["difference"] < -4 * score["stderr"] < 0
    assert abs(other["difference"]) < 0.05 < -score["difference"]


def test_answers_are_graded_by_the_exact_model() -> None:
    model, task = tiny(), free(rows=2)
    exact = task.reference(model, ignore)
    tokens = torch.tensor(exact["tokens"])
    ids = torch.cat([task.prompts.ids, tokens], 1)
    with torch.inference_mode(), use_attention(model, "sdpa"):
        log_p = model(ids, use_cache=False).logits.log_softmax(-1)[:, 119:-1]
    wanted = log_p.gather(-1, tokens[..., None])[..., 0].mean(1)
    assert exact["log_probs"] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert exact["own"] == pytest.approx(wanted.tolist(), abs=1e-4)
    data = task.measure(model, make(model, BROKEN), exact, ignore)
    rows = data["prompts"]
    assert data["kl"] == pytest.approx(sum(r["own"] - r["log_prob"] for r in rows) / 2)
    assert data["log_prob"]["mean"] == pytest.approx(sum(r["log_prob"] for r in rows) / 2)
    assert data["log_prob"]["reference"] == pytest.approx(wanted.mean().item(), abs=1e-4)


def test_draws_depend_on_the_seed_alone() -> None:
    model = tiny()
    tokens = free().reference(model, ignore)["tokens"]
    assert free(batch=3).reference(model, ignore)["tokens"] == tokens
    other = FreeTask(free().prompts, 24, 1.0, seed=4)
    assert other.reference(model, ignore)["tokens"] != tokens
    greedy = free(0.0).reference(model, ignore)
    assert greedy["tokens"] != tokens and greedy["log_probs"][0] > -math.log(97)


def test_gumbel_noise_draws_from_the_distribution() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = (p.log() + _gumbel(0, range(4000), 7, 4)).argmax(-1)
    shares = torch.bincount(draws, minlength=4) / 4000
    assert (shares - p).abs().max() < 4 * math.sqrt(0.25 / 4000)


def test_a_pair_of_means_by_hand() -> None:
    got = paired([1.0, 2.0, 6.0], [1.0, 1.0, 1.0])
    assert got["mean"] == 3 and got["reference"] == 1 and got["difference"] == 2
    assert got["stderr"] == pytest.approx(math.sqrt(7 / 3))
    assert paired([1.0], [2.0])["stderr"] is None


# --- kept results ------------------------------------------------------------------------------
def test_a_line_that_was_cut_off_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    Store(path).keep("one", {"task": "t"}, {"kl": 1.5})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    store = Store(path)
    assert "one" in store and store["one"] == {"kl": 1.5} and "two" not in store
    store.keep("two", {"task": "t"}, [1])
    store.keep("one", {"task": "t"}, {"kl": 2.5})
    again = Store(path)
    assert again["two"] == [1] and again["one"] == {"kl": 2.5}
    fresh = Store(path, fresh=True)
    assert "one" not in fresh
    assert Store(tmp_path / "none.jsonl").path.name == "none.jsonl"


def test_keys_change_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"model": "m", "config": {"key_bits": 4}, "task": "t", "settings": {"inputs": "a"}}
    key = result_key(about)
    assert key == result_key(json.loads(json.dumps(about))) and len(code_digest()) == 16
    changes: list[dict[str, Any]] = [
        {"model": "n"},
        {"config": {"key_bits": 3}},
        {"config": None},
        {"task": "u"},
        {"settings": {"inputs": "b"}},
    ]
    keys = {result_key({**about, **change}) for change in changes}
    monkeypatch.setattr(store_module, "code_digest", lambda: "other code")
    keys.add(result_key(about))
    assert len(keys | {key}) == len(changes) + 2


def test_settings_of_tasks_say_what_goes_in() -> None:
    tokenizer = byte_tokenizer()
    facts = make_needles(2, 0, FILLER)
    haystacks = tuple(build_haystack(tokenizer, FILLER, n, facts) for n in (700, 1000))
    tasks = [
        *(NeedleTask(tokenizer, haystacks[:n]) for n in (1, 2)),
        *(free(temperature, rows=n) for temperature in (0.0, 1.0) for n in (2, 3)),
        *(
            QualityTask(Windows(prompt(1, 90), (name,)), Schedule(40, chunk))
            for name in "ab"
            for chunk in (8, 16)
        ),
    ]
    assert len({json.dumps(task.settings) for task in tasks}) == len(tasks)
    # How work is divided into batches is none of it.
    assert free(batch=2).settings == free(batch=8).settings


# --- the command -------------------------------------------------------------------------------
COARSE = json.dumps({"preset": "k2v2", **SMALL})
SIZES = (
    *("--window", "150", "--windows", "1", "--prefill", "40", "--prompts", "2"),
    *("--prompt-tokens", "150", "--new-tokens", "6"),
)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Two models of different weights, and a file of results."""
    text = tmp_path / "filler.txt"
    text.write_text(FILLER)
    folders = []
    for name, spread in (("calm", 0.02), ("wild", 0.2)):
        folder = tmp_path / name
        folder.mkdir()
        write_tiny_folder(folder, initializer_range=spread, max_position_embeddings=900)
        folders.append(str(folder))
    kept = str(tmp_path / "kept.jsonl")
    return ["eval", *folders, "--text", str(text), *SIZES, "--results", kept]


def test_several_models(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ("--tasks", "quality", "free", "needles", "--needles", "1")
    fine = json.dumps({"preset": "k8v8", **SMALL})
    argv = [*command, "--presets", COARSE, fine, *tasks]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert 0 <= text.index("calm (") < text.index("wild (")  # each in a report of its own
    assert text.count("0 (0) of 1") == 4  # random weights find nothing
    assert main([*argv, "--json", "--out", str(tmp_path / "rows.jsonl")]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    calm, wild = data["models"]
    assert wild["model"]["name"].endswith("wild") and data["schema"] == wild["schema"] == 2
    assert wild["rows"][0]["quality"]["kl"] > calm["rows"][0]["quality"]["kl"]
    assert wild["settings"]["contexts"] == [512]
    (note,) = wild["notes"]
    assert note == "contexts of 1024, 2048, 4096, 8192 tokens are skipped: the model's limit is 900"
    assert printed.err.count("2 of 2 results are from") == 6 and "quality: " in printed.err
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["model"] == calm["model"]


def test_an_interrupted_run_goes_on(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fine = json.dumps({"preset": "k8v8", **SMALL})
    argv = [*command, "--presets", COARSE, fine, "--tasks", "quality", "free", "--json"]
    measure, calls = FreeTask.measure, list[int]()

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(FreeTask, "measure", interrupted)
        try:
            stopped = main(argv)
        except KeyboardInterrupt:
            stopped = 130
    assert stopped == 130
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [row["task"] for row in kept] == ["quality"] * 3 + ["free"] * 2
    capsys.readouterr()
    assert main(argv) == 0
    resumed = json.loads(capsys.readouterr().out)
    lines = (tmp_path / "kept.jsonl").read_text().splitlines()
    assert len(lines) == 12 and [json.loads(line) for line in lines[:5]] == kept
    assert main([*argv, "--fresh"]) == 0
    printed = capsys.readouterr()
    assert "results are from" not in printed.err
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 24
    for old, new in zip(resumed["models"], json.loads(printed.out)["models"], strict=True):
        for before, after in zip(old["rows"], new["rows"], strict=True):
            assert before["free"] == after["free"]
            assert before["quality"]["kl"] == after["quality"]["kl"]


def test_what_the_command_refuses(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*command, "--presets", COARSE]
    for extra, wanted in (
        (["--temperature", "-1"], "--temperature -1.0; it must be 0 (greedy) or more"),
        (["--results", str(tmp_path / "no" / "x.jsonl")], "folder of the results file"),
        (["--tasks", "needles", "--needles", "9"], "needles=9; allowed: 1 to 5"),
        (["--tasks", "needles", "--contexts", "950"], "--contexts 950 is the shortest; the model"),
    ):
        assert main([*argv, *extra]) == 2, extra
        printed = capsys.readouterr()
        assert wanted in printed.err.splitlines()[-1] and not printed.out, extra
    assert main(["eval", command[1], command[1], "--presets", COARSE]) == 2
    assert "is given twice; leave one out" in capsys.readouterr().err
