"""tightkv eval: free-running text, probes, tool calls, kept results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.attention import use_attention
from tightkv.tools.cli import main
from tightkv.tools.cli.eval import report as eval_report
from tightkv.tools.cli.eval.command import TASKS
from tightkv.tools.eval import results as store_module
from tightkv.tools.eval.forward import (
    CacheRun,
    MakeCache,
    after_prefix,
    ignore,
    shared_tokens,
)
from tightkv.tools.eval.results import Store, code_digest, result_key
from tightkv.tools.eval.tasks.base import Task, paired
from tightkv.tools.eval.tasks.free_running import FreeTask, _gumbel
from tightkv.tools.eval.tasks.probes import (
    MAX_DEPTHS,
    Passage,
    Probe,
    ProbeTask,
    build_passkeys,
    build_recall,
    make_passkeys,
)
from tightkv.tools.eval.tasks.quality import QualityTask, Schedule
from tightkv.tools.eval.tasks.tools import CALL_TOKENS, Call, ToolTask, build_conversation, judge
from tightkv.tools.eval.windows import Windows
from tiny_folder import TEMPLATE, byte_tokenizer, write_tiny_folder

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
DEPTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
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
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 100])
def test_scores_are_those_of_a_plain_forward_pass(chunk: int | None) -> None:
    model, ids = tiny(), prompt(3, 90)
    run = CacheRun(model)
    run.feed(ids[:, :30], last_only=True)
    log_probs, top = run.score(ids[:, 30:], 25, chunk)
    with torch.inference_mode(), use_attention(model, "sdpa"):
        log_p = model(ids, use_cache=False).logits.log_softmax(-1)[:, 64:89]
    wanted = log_p.gather(-1, ids[:, 65:, None])[..., 0]
    torch.testing.assert_close(log_probs, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(top, log_p.argmax(-1) == ids[:, 65:])
    with pytest.raises(ValueError, match=r"targets=9 of 9 tokens; allowed: 1 to 8"):
        run.score(ids[:, :9], 9)


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


# --- quality -----------------------------------------------------------------------------------
def test_the_worst_position_and_the_text_before_it() -> None:
    model, tokenizer = byte_model(), byte_tokenizer()
    windows = Windows(prompt(3, 187), ("a", "b", "c"))
    task = QualityTask(tokenizer, windows, Schedule(prefill=40, chunk=16, batch=2))
    (data,) = measured(task, model, BROKEN)
    worst = data["worst"]
    assert data["kl_p99"] <= data["kl_p999"] <= worst["kl"]
    row, at = windows.ids[worst["window"]], worst["position"]
    assert worst["context"] == tokenizer.decode(row[max(0, at - 48) : at])
    assert worst["next"] == tokenizer.decode(row[at : at + 1])
    assert worst["text"] == "abc"[worst["window"]]
    # Its KL, once more and by hand.
    ids = row[None, :at]
    log_p = CacheRun(model).feed(ids)[0, -1].log_softmax(-1)
    run = CacheRun(model, make(model, BROKEN)())
    run.feed(ids[:, :40])
    for start in range(40, at, 16):
        logits = run.feed(ids[:, start : start + 16])
    log_q = logits[0, -1].log_softmax(-1)
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    assert kl == pytest.approx(worst["kl"], rel=0.02)


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


# --- probes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("context", [900, 2500])
def test_passkeys_stand_at_their_depths(context: int, template: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    passage = build_passkeys(tokenizer, FILLER, context, 4, seed=1)
    facts = make_passkeys(4, 1, FILLER)
    assert [probe.expected for probe in passage.probes] == [fact.answer for fact in facts]
    for probe, fact in zip(passage.probes, facts, strict=True):
        ids = passage.prefix + probe.question + probe.answer
        assert context - 80 < len(ids) <= context
        text = tokenizer.decode(ids)
        assert text.endswith(f" is {fact.answer}") and "The code that belongs to" in text
        assert text.count(fact.answer) == 2 and text.count(fact.question) == 1
        assert tokenizer.decode(probe.answer) == f" {fact.answer}"
        document = text[: text.index("Question:")]
        assert abs(document.index(fact.fact) / len(document) - probe.depth) < 0.1


def test_recall_fills_its_context_with_different_keys() -> None:
    tokenizer = byte_tokenizer()
    passage = build_recall(tokenizer, 1500, 3, seed=0)
    for probe in passage.probes:
        text = tokenizer.decode(passage.prefix + probe.question)
        start, end = text.index("{"), text.index("}") + 1
        pairs = json.loads(text[start:end])
        assert 1400 < len(text) <= 1500 and len(pairs) > 40
        key = text.rpartition('key "')[2].partition('"')[0]
        assert text.endswith(f'The value of the key "{key}" is "')
        assert pairs[key] == probe.expected == tokenizer.decode(probe.answer)
        assert list(pairs).index(key) / len(pairs) == pytest.approx(probe.depth)
    assert [round(p.depth, 1) for p in passage.probes] == [0.2, 0.5, 0.8]
    assert build_recall(tokenizer, 1500, 3, seed=1) != passage


def test_probes_that_cannot_be_built() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match=r"depths=17; allowed: 1 to 16"):
        make_passkeys(MAX_DEPTHS + 1, 0, "")
    with pytest.raises(ValueError, match="too few to fill a context of 90000"):
        build_passkeys(tokenizer, FILLER, 90000, 2, 0)
    with pytest.raises(ValueError, match=r"context of 150 tokens holds \d+ pairs .* at least 5"):
        build_recall(tokenizer, 150, 5, 0)


@pytest.fixture(scope="module")
def passages() -> tuple[Passage, ...]:
    tokenizer = byte_tokenizer()
    return tuple(build_passkeys(tokenizer, FILLER, n, 5, 0) for n in (700, 1000))


def test_passkeys_are_scored_as_in_one_forward_pass(passages: tuple[Passage, ...]) -> None:
    model = byte_model()
    exact = ProbeTask("passkey", passages).reference(model, ignore)["probes"]
    for passage, scores in zip(passages, (exact[:5], exact[5:]), strict=True):
        for probe, score in zip(passage.probes, scores, strict=True):
            ids = torch.tensor([passage.prefix + probe.question + probe.answer])
            with torch.inference_mode(), use_attention(model, "sdpa"):
                log_p = model(ids, use_cache=False).logits.log_softmax(-1)
            n = len(probe.answer)
            wanted = log_p[0, -n - 1 : -1].gather(-1, ids[0, -n:, None]).sum()
            assert score["log_prob"] == pytest.approx(float(wanted), abs=1e-3)


@pytest.mark.parametrize(("family", "contexts"), [("llama", [700, 1000]), ("gemma3", [700])])
def test_a_broken_cache_moves_the_likelihoods(
    family: str, contexts: list[int], passages: tuple[Passage, ...]
) -> None:
    model = byte_model(family=family)
    task = ProbeTask("passkey", passages[: len(contexts)])
    exact, fine, broken = measured(task, model, EXACT, FINE, BROKEN)

    def distance(data: Any) -> float:
        return max(abs(row["log_prob"] - row["reference"]) for row in data["probes"])

    assert distance(exact) < 1e-3 < 0.03 < distance(broken)
    assert distance(fine) < distance(broken) / 10
    assert [row["context"] for row in broken["by_context"]] == contexts
    assert [row["depth"] for row in broken["probes"]] == len(contexts) * DEPTHS


def test_a_broken_cache_finds_the_models_own_answers_less_likely(
    passages: tuple[Passage, ...],
) -> None:
    """A random model knows no passkeys: its own exact answers stand for them."""
    model = byte_model(initializer_range=0.2)

    def own_answer(passage: Passage, probe: Probe) -> Probe:
        ids = torch.tensor([passage.prefix + probe.question])
        tokens, _ = CacheRun(model).decode(ids, 5, lambda logits, i: logits.argmax(-1), ignore)
        return replace(probe, answer=tuple(tokens[0].tolist()))

    first = passages[0]
    known = replace(first, probes=tuple(own_answer(first, probe) for probe in first.probes))
    exact, fine, broken = measured(ProbeTask("passkey", (known,)), model, EXACT, FINE, BROKEN)
    assert exact["top"] == exact["reference_top"] == 1
    assert abs(exact["log_prob"]["difference"]) < 1e-3
    assert abs(fine["log_prob"]["difference"]) < 0.1
    assert broken["log_prob"]["difference"] < -1 and broken["top"] < 0.5


def test_a_pair_of_means_by_hand() -> None:
    got = paired([1.0, 2.0, 6.0], [1.0, 1.0, 1.0])
    assert got["mean"] == 3 and got["reference"] == 1 and got["difference"] == 2
    assert got["stderr"] == pytest.approx(math.sqrt(7 / 3))
    assert paired([1.0], [2.0])["stderr"] is None


# --- tool calls --------------------------------------------------------------------------------
CALL = Call("Wake me at 7:30 tomorrow.", "set_alarm", {"hour": 7, "minute": 30})


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ('{"name": "set_alarm", "arguments": {"hour": 7, "minute": 30}}', (True, True, True)),
        ('{"name": "set_alarm", "arguments": {"hour": 8, "minute": 30}}', (True, True, False)),
        ('{"name": "set_alarm", "arguments": {"hour": 7}}', (True, False, False)),
        ('{"name": "no_tool", "arguments": {}}', (True, False, False)),
        ('{"name": ["x"], "arguments": {}}', (True, False, False)),
        ("7", (True, False, False)),
        ('{"name": "set_alarm", "arguments": {"hour": 7, "minute": 30}', (False, False, False)),
        ("", (False, False, False)),
        ("[" * 100_000, (False, False, False)),
    ],
)
def test_replies_are_judged(reply: str, wanted: tuple[bool, bool, bool]) -> None:
    assert tuple(judge(reply, CALL).values()) == wanted


def test_conversations_show_right_calls_and_end_in_a_request() -> None:
    tokenizer = byte_tokenizer()
    talk = build_conversation(tokenizer, 1500, 3, seed=2)
    assert shared_tokens(talk.prompts) > 1000
    for ids, call in zip(talk.prompts, talk.calls, strict=True):
        text = tokenizer.decode(ids)
        assert len(ids) + CALL_TOKENS <= 1500
        *shown, last = text.split("\n\n")
        assert last == f"Request: {call.request}\nCall:" and len(shown) >= 8
        for part in shown:
            reply = part.partition("Call: ")[2]
            assert judge(reply, call)["valid"]
        assert judge(call.text, call)["correct"]
    with pytest.raises(ValueError, match=r"context of 400 tokens holds \d calls; at least 4"):
        build_conversation(tokenizer, 400, 1, 0)


def test_the_exact_cache_writes_the_same_calls() -> None:
    model, tokenizer = byte_model(initializer_range=0.3), byte_tokenizer()
    task = ToolTask(tokenizer, (build_conversation(tokenizer, 700, 2, 0),))
    exact, broken = measured(task, model, EXACT, BROKEN)
    reference = task.reference(model, ignore)
    replies = [[reply["reply"] for reply in data["replies"]] for data in (reference, exact, broken)]
    assert replies[0] == replies[1] != replies[2]
    assert exact["asked"] == 2 and exact["reference_valid"] == exact["valid"] == 0  # random weights


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


def test_settings_of_tasks_say_what_goes_in(passages: tuple[Passage, ...]) -> None:
    tokenizer = byte_tokenizer()
    tasks = [
        *(ProbeTask("passkey", passages[:n]) for n in (1, 2)),
        *(free(temperature, rows=n) for temperature in (0.0, 1.0) for n in (2, 3)),
        *(ToolTask(tokenizer, (build_conversation(tokenizer, 700, 2, n),)) for n in (0, 1)),
        *(
            QualityTask(tokenizer, Windows(prompt(1, 90), (name,)), Schedule(40, chunk))
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
    *("--prompt-tokens", "150", "--new-tokens", "6", "--depths", "2", "--calls", "1"),
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


def test_several_models_the_worst_first(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = ("--tasks", "quality", "free", "passkey", "needles", "--needles", "1")
    fine = json.dumps({"preset": "k8v8", **SMALL})
    argv = [*command, "--presets", COARSE, fine, *tasks]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert 0 <= text.index("wild (") < text.index("calm (")  # each in a report of its own
    assert text.count("0 (0) of 2") == 4  # random weights find nothing
    assert main([*argv, "--json", "--out", str(tmp_path / "rows.jsonl")]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    worst, best = data["models"]
    assert worst["model"]["name"].endswith("wild") and data["schema"] == worst["schema"] == 2
    assert worst["rows"][0]["quality"]["kl"] > best["rows"][0]["quality"]["kl"]
    assert worst["settings"]["contexts"] == [512, 900]  # the model's own
    assert worst["rows"][0]["tools"] is None
    assert printed.err.count("2 of 2 results are from") == 8 and "quality: " in printed.err
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["model"] == worst["model"]


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


def test_contexts_go_up_to_the_models_own_or_to_the_cap(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    del command[2]
    argv = [*command, "--presets", COARSE, "--tasks", "recall", "--max-context", "700", "--json"]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["contexts"] == [512, 700]
    assert data["notes"][-1].startswith("contexts end at 700 tokens; --max-context 900 is all")
    assert {probe["context"] for probe in data["rows"][0]["recall"]["probes"]} == {512, 700}


def test_what_the_command_refuses(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*command, "--presets", COARSE]
    for extra, wanted in (
        (["--temperature", "-1"], "--temperature -1.0; it must be 0 (greedy) or more"),
        (["--results", str(tmp_path / "no" / "x.jsonl")], "folder of the results file"),
        (["--tasks", "passkey", "--depths", "17"], "depths=17; allowed: 1 to 16"),
    ):
        assert main([*argv, *extra]) == 2, extra
        printed = capsys.readouterr()
        assert wanted in printed.err.splitlines()[-1] and not printed.out, extra
    assert main(["eval", command[1], command[1], "--presets", COARSE]) == 2
    assert "is given twice; leave one out" in capsys.readouterr().err


def test_models_are_sorted_by_what_was_measured() -> None:
    def data(name: str, **tasks: Any) -> dict[str, Any]:
        rows = [{**dict.fromkeys(TASKS), **tasks}]
        return {"model": {"name": name}, "rows": rows, "reference": {"needles": None}}

    def names(*models: dict[str, Any]) -> list[str]:
        return [model["model"]["name"] for model in eval_report.worst_first(models)]

    low, high = data("low", quality={"kl": 0.1}), data("high", quality={"kl": 0.2})
    assert names(low, high) == ["high", "low"]
    mild = data("mild", passkey={"log_prob": {"difference": -0.1}})
    bad = data("bad", passkey={"log_prob": {"difference": -2.0}})
    assert names(mild, bad) == ["bad", "mild"]
