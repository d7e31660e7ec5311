"""benchmarks/depth: prompts that share contexts, judging of answers, statistics, going on."""

from __future__ import annotations

import importlib
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiny_folder import TEMPLATE, byte_tokenizer, write_tiny_folder

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "depth"
NAMES = ("tasks", "sources", "generators", "generate", "score", "summarize", "convert", "prepare")


@pytest.fixture(scope="module")
def depth() -> Any:
    """The scripts, which import each other as neighbours."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


def one(depth: Any, name: str, family: str = "gsm8k", **changes: Any) -> Any:
    fields = {
        "id": f"{family}/{name}@64",
        "family": family,
        "problem": name,
        "depth": 64,
        "stream": "s",
        "pieces": 2,
        "question": f"What is {name}?",
        "check": {"kind": "number", "answer": "7"},
        "max_tokens": 8,
    }
    return depth.tasks.Prompt(**{**fields, **changes})


# --- the task file -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tasks.json", "tasks.json.xz"])
def test_a_task_file_holds_each_text_once_and_comes_back(
    depth: Any, tmp_path: Path, name: str
) -> None:
    file = depth.tasks.TaskFile()
    file.add_stream("s", ["first ", "second ", "third "])
    file.add_stream("t", ["second ", "fourth "])
    file.prompts = [one(depth, "a", stop=("\n",)), one(depth, "b", stream="t", pieces=1)]
    file.save(tmp_path / name)
    again = depth.tasks.TaskFile.load(tmp_path / name)
    assert (again.texts, again.streams, again.prompts) == (file.texts, file.streams, file.prompts)
    assert len(again.texts) == 4
    assert again.context(again.prompts[0]) == ["first ", "second "]
    assert again.context(again.prompts[1]) == ["second "]
    (tmp_path / "other.json").write_text('{"schema": 9}')
    with pytest.raises(ValueError, match="schema 9; supported: 1"):
        depth.tasks.TaskFile.load(tmp_path / "other.json")


def test_prompts_of_a_stream_share_their_prefix(depth: Any) -> None:
    file = depth.tasks.TaskFile()
    file.add_stream("s", ["first ", "second "])
    tokenizer = byte_tokenizer(TEMPLATE)
    encoder = depth.tasks.Encoder(tokenizer, file)
    long, short = one(depth, "a"), one(depth, "b", pieces=1)
    raw = one(depth, "c", chat=False)
    ids = [encoder.encode(prompt) for prompt in (long, short, raw)]
    texts = [tokenizer.decode(own) for own in ids]
    assert texts == [
        "<user>first second What is a?<answer>",
        "<user>first What is b?<answer>",
        "first second What is c?",
    ]


def test_a_run_that_is_cut_short_has_some_of_every_family(depth: Any) -> None:
    def prompts(family: str, streams: int, each: int) -> list[Any]:
        names = [(s, i) for s in range(streams) for i in range(each)]
        return [
            one(depth, f"{s}-{i}", family, stream=f"{family} {s}", pieces=each - i)
            for s, i in names
        ]

    all_of_them = [*prompts("gsm8k", 4, 5), *prompts("ruler", 20, 2)]
    order = list(depth.tasks.in_turn(all_of_them))
    assert sorted(p.id for p in order) == sorted(p.id for p in all_of_them)
    half = [p.family for p in order[:30]]
    assert 8 <= half.count("gsm8k") <= 12
    first = [p for p in order if p.stream == "gsm8k 0"]
    assert [p.pieces for p in first] == [1, 2, 3, 4, 5]


# --- what prompts are made of ------------------------------------------------------------------
WORDS = [
    "the",
    "water",
    "of",
    "this",
    "old",
    "river",
    "turns",
    "quickly",
    "past",
    "many",
    "quiet",
    "towns",
    "and",
    "fields",
]


def tokens_of(text: str) -> int:
    return -(-len(text) // 3)


def prose(count: int = 400) -> list[str]:
    rng = random.Random(1)
    return [" ".join(rng.choices(WORDS, k=40)) for _ in range(count)]


@pytest.mark.parametrize(
    "kind",
    ["single", "codes", "multikey", "multivalue", "multiquery", "variables", "common", "frequent"],
)
def test_contexts_have_their_length_and_every_answer(depth: Any, kind: str) -> None:
    maker = depth.generators.Maker(tokens_of, prose(), random.Random(0))
    texts, asked = getattr(maker, kind)(4000)
    whole = "".join(texts)
    assert 0.85 * 4000 < sum(map(tokens_of, texts)) <= 4000
    for question, answers in asked:
        assert all(answer in whole for answer in answers)
        assert not any(answer in question for answer in answers)


def test_variables_are_assigned_before_they_are_read(depth: Any) -> None:
    maker = depth.generators.Maker(tokens_of, prose(), random.Random(0))
    texts, asked = maker.variables(4000)
    lines = [text.strip() for text in texts if text.startswith("VAR ")]
    values: dict[str, str] = {}
    for line in lines:
        _, name, _, *rest = line.split()
        values[name] = values[rest[1]] if rest[0] == "VAR" else rest[0]
    for question, names in asked:
        assert all(values[name] in question for name in names)
    # links of chains stand apart: a chain cannot be read off one place
    places = [i for i, text in enumerate(texts) if text.startswith("VAR ")]
    assert places[-1] - places[0] > len(texts) // 2


def test_common_words_are_the_common_ones(depth: Any) -> None:
    maker = depth.generators.Maker(tokens_of, prose(), random.Random(0))
    for kind in ("common", "frequent"):
        texts, [(_, answers)] = getattr(maker, kind)(6000)
        counts: dict[str, int] = {}
        for word in "".join(texts).replace(",", " ").split():
            counts[word] = counts.get(word, 0) + 1
        most = sorted(counts, key=counts.__getitem__, reverse=True)[: len(answers)]
        assert sorted(most) == sorted(answers)


def test_records_are_asked_for_inside_of_their_context(depth: Any) -> None:
    file = depth.tasks.TaskFile()
    contexts = depth.sources.Contexts(file, tokens_of)
    depth.generators.add_tools(contexts, random.Random(0), 14)
    depth.generators.add_json(contexts, random.Random(0), 14)
    assert len(file.prompts) == 28
    for prompt in file.prompts:
        context = "".join(file.context(prompt))
        assert 0.9 * prompt.depth < tokens_of(context) <= prompt.depth
        assert prompt.check["kind"] == "json"
        wanted = prompt.check["answer"]
        order = wanted.get("order") or wanted["arguments"]["order"]
        assert context.count(order) >= 1
        assert depth.score.score(prompt.check, f"Sure: {json.dumps(wanted)}") == 1
        wrong = json.dumps(wanted).replace(order, "A1")
        assert depth.score.score(prompt.check, wrong) == 0


def test_problems_follow_solved_ones_and_end_before_another(depth: Any) -> None:
    file = depth.tasks.TaskFile()
    contexts = depth.sources.Contexts(file, tokens_of)
    solved = [f"Problem:\n{text}\n\nSolution: {i}\n\n" for i, text in enumerate(prose(600))]
    asked = [(str(i), f"Q{i}", {"kind": "math", "answer": "1"}) for i in range(9)]
    depth.sources._after_solved(contexts, "math", solved, asked, random.Random(0), 16, streams=2)
    for prompt in file.prompts:
        context = "".join(file.context(prompt))
        assert 0.9 * prompt.depth < tokens_of(context) <= prompt.depth
        assert prompt.stop == ("\nProblem:",) and f"\n{prompt.stop[0]}" in context
    assert {prompt.depth for prompt in file.prompts} == set(depth.sources.DEPTHS)


def test_next_lines_need_a_name_of_the_context(depth: Any) -> None:
    context = ["# file: a/x.py\ndef measure_height(tree):\n    return 1\n\n"]
    body = "\n".join(f"value_{i} = {i}" for i in range(12))
    text = (
        f'{body}\nresult = measure_height(value_1)\n"""\nmeasure_height(value_2)\n"""\nother(1)\n'
    )
    found = list(depth.sources._next_lines([("a/y.py", text)], context))
    assert found == [("a/y.py", 12, 0)]


# --- judging -----------------------------------------------------------------------------------
HUMAN_EVAL = {
    "kind": "code",
    "before": 'import math\n\ndef helper(x):\n    return x + 1\n\ndef area(r):\n    """Area."""\n',
    "test": "def check(f):\n    assert f(2) == helper(math.pi * 4 - 1)\ncheck(area)\n",
    "entry": "area",
}


@pytest.mark.parametrize(
    ("answer", "points"),
    [
        ("Here:\n```python\ndef area(r):\n    return math.pi * r * r\n```\nDone.", 1),
        ("```python\nimport math\n\ndef area(r):\n    return math.pi * r ** 2", 1),  # cut off
        ("```python\n    return math.pi * r * r\n```", 1),  # the body alone
        ("```python\nreturn math.pi * r * r\n```", 1),
        ("```python\nx = 1\n```\n```python\ndef area(r):\n    return math.pi * r * r\n```", 1),
        ("```python\ndef area(r):\n    return 3 * r * r\n```", 0),
        ("```python\ndef area(r):\n    return (\n```", 0),
        ("I do not know.", 0),
        ("```python\nimport sys\nsys.exit(0)\n```", 0),  # ends well, but before the tests
        ("```python\nimport os\nos._exit(0)\n```", 0),
    ],
)
def test_code_is_right_if_its_tests_pass(depth: Any, answer: str, points: float) -> None:
    assert depth.score.score(HUMAN_EVAL, answer) == points


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "x = bytearray(4 << 30)",
        "while True: print('x' * 1000)",
        "open('large', 'wb').write(bytes(4 << 20))",
        "files = [open(__import__('os').devnull) for _ in range(200)]",
        "import subprocess as s, sys\ns.check_call([sys.executable, '-c', 'while True: pass'])",
    ],
)
def test_programs_have_limits(depth: Any, source: str) -> None:
    start = time.monotonic()
    assert not depth.score.passes(f"{source}\nprint({depth.score._END!r})", seconds=1)
    assert time.monotonic() - start < 10


def test_a_program_starts_in_an_empty_folder_and_leaves_nothing(depth: Any) -> None:
    source = "import os\nassert os.listdir() == []\nopen('made', 'w').write('x')\n"
    end = f"print({depth.score._END!r})"
    assert depth.score.passes(source + end) and depth.score.passes(source + end)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (("number", "18"), "9 * 2 = 18. The answer is $18.", "The answer is 17. (18 - 1)"),
        (("number", "1000"), "so it is 1,000", "so it is 1,001"),
        (("number", "5"), "The answer is 5.0. Question: 7", "The answer is five"),
        (("math", "\\frac{3}{4}"), "thus $\\boxed{\\dfrac{3}{4}}$", "\\boxed{\\frac{4}{3}}"),
        (("math", "\\frac{3}{4}"), "\\boxed{0.75}", "\\boxed{0.7}"),
        (("math", "-\\frac{1}{2}"), "\\boxed{-\\frac12}", "\\boxed{\\frac12}"),
        (("math", "(3, \\infty)"), "\\boxed{(3,\\infty)}", "\\boxed{[3,\\infty)}"),
        (("math", "90^\\circ"), "\\boxed{90}", "\\boxed{9}"),
        (("math", "x^{2}+1"), "\\boxed{x^{2} + 1}", "\\boxed{x^{2}"),
        (("math", "12,000"), "Final answer: the answer is $12000$.", "The answer is 12"),
        (("line", "return x + y"), "    return x + y\nz = 1", "return y + x"),
    ],
)
def test_numbers_formulas_and_lines(
    depth: Any, check: tuple[str, str], right: str, wrong: str
) -> None:
    one = {"kind": check[0], "answer": check[1]}
    assert depth.score.score(one, right) == 1
    assert depth.score.score(one, wrong) == 0


def test_several_strings_give_a_share(depth: Any) -> None:
    check = {"kind": "strings", "answers": ["123", "456", "Amber", "x"]}
    assert depth.score.score(check, "They are 123, amber.") == 0.5
    any_of = {"kind": "any", "answers": ["23 years", "23"]}
    assert depth.score.score(any_of, "By 23 years.") == 1
    assert depth.score.score(any_of, "By 230 years.") == 0
    with pytest.raises(ValueError, match="'taste' is not known"):
        depth.score.score({"kind": "taste"}, "")


# --- statistics --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1), (5, 5, 1), (1, 0, 1), (0, 6, 2 / 64), (10, 2, 2 * (1 + 12 + 66) / 4096)],
)
def test_mcnemars_p(depth: Any, lost: int, won: int, p: float) -> None:
    assert depth.summarize.mcnemar(lost, won) == pytest.approx(p)
    assert depth.summarize.mcnemar(won, lost) == pytest.approx(p)


def test_standard_errors_count_problems(depth: Any) -> None:
    rng = random.Random(0)
    values = [(str(i), float(rng.random() < 0.3)) for i in range(500)]
    mean = sum(value for _, value in values) / 500
    alone = depth.summarize.Clustered(values)
    assert alone.mean == pytest.approx(mean)
    assert alone.stderr == pytest.approx(math.sqrt(mean * (1 - mean) / 499))
    # the same answers four times over are no new evidence
    assert depth.summarize.Clustered(values * 4).stderr == pytest.approx(alone.stderr)
    low, high = alone.interval()
    assert (low + high) / 2 == pytest.approx(mean, abs=0.005)
    assert high - low == pytest.approx(2 * 1.96 * alone.stderr, rel=0.1)
    assert depth.summarize.Clustered([("a", 1.0)]).stderr is None


def scores(cache: str, right: dict[tuple[str, int], float], family: str = "gsm8k") -> list[Any]:
    return [
        {
            "cache": cache,
            "family": family,
            "id": f"{family}/{name}@{4096 * (1 + int(name) % 2)}",
            "problem": name,
            "depth": 4096 * (1 + int(name) % 2),
            "seed": seed,
            "score": points,
            "text": f"{points}",
        }
        for (name, seed), points in right.items()
    ]


def test_caches_are_compared_on_what_both_answered(depth: Any) -> None:
    keys = [(str(i), seed) for i in range(10) for seed in (0, 1)]
    exact = {key: float(int(key[0]) < 5) for key in keys}
    own = {**exact, ("0", 0): 0.0, ("1", 1): 0.0, ("7", 0): 1.0}
    del own["9", 1]
    rows = depth.summarize.summarize(
        [*scores("auto", exact), *scores("k2v2", own), *scores("k4v4", exact, "math")],
        "auto",
        by_depth=False,
    )
    assert [(row["family"], row["cache"]) for row in rows] == [("gsm8k", "k2v2"), ("all", "k2v2")]
    row = rows[0]
    assert (row["answers"], row["problems"], row["won"], row["lost"]) == (19, 10, 1, 2)
    assert row["score"] == pytest.approx(9 / 19) and row["reference"] == pytest.approx(10 / 19)
    assert row["difference"] == pytest.approx(-1 / 19)
    assert row["p"] == 1 and row["same"] == pytest.approx(16 / 19)
    deep = depth.summarize.summarize(
        [*scores("auto", exact), *scores("k2v2", own)], "auto", by_depth=True
    )
    assert [row["depth"] for row in deep if row["family"] == "gsm8k"] == [4096, 8192]
    assert sum(row["answers"] for row in deep if row["family"] == "all") == 19
    assert "| gsm8k at 4,096 | k2v2 |" in depth.summarize.table(deep)
    with pytest.raises(ValueError, match="no answers of 'fp8'; there are those of auto, k2v2"):
        depth.summarize.summarize([*scores("auto", exact), *scores("k2v2", own)], "fp8", False)


# --- generating --------------------------------------------------------------------------------
def test_first_seeds_come_first_and_answers_stay(depth: Any, tmp_path: Path) -> None:
    prompts = [one(depth, name) for name in "abc"]
    path = tmp_path / "auto.jsonl"
    assert depth.generate.answers(path) == []
    path.write_text(
        json.dumps({"id": prompts[1].id, "seed": 0}) + "\n" + '{"id": "gsm8k/c@64", "se'
    )
    rows = depth.generate.answers(path)
    left = depth.generate.missing(prompts, range(2), rows)
    assert [(p.problem, seed) for p, seed in left] == [
        ("a", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)
    ]  # fmt: skip


def test_answers_come_after_a_row_that_was_cut_off(
    depth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them joins its line, where it would be lost with it."""

    class Engine:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def add_request(self, name: str, *_: Any) -> None:
            self.asked.append(name)

        def step(self) -> list[Any]:
            answer = SimpleNamespace(text="7", token_ids=[1], finish_reason="stop")
            name = self.asked.pop(0)
            return [SimpleNamespace(request_id=name, finished=True, outputs=[answer])]

    vllm = SimpleNamespace(SamplingParams=lambda **_: None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    path = tmp_path / "auto.jsonl"
    path.write_text('{"id": "gsm8k/c@64", "se')
    work = [(one(depth, name), 0) for name in "ab"]
    args = SimpleNamespace(batch=1, temperature=0.0, top_p=1.0)
    encoded = {prompt.id: [1, 2] for prompt, _ in work}
    assert depth.generate.answer(Engine(), work, encoded, args, path, math.inf) == 2
    assert [row["id"] for row in depth.generate.answers(path)] == [p.id for p, _ in work]


def test_caches_have_names(depth: Any) -> None:
    arguments = depth.generate.cache_arguments
    off = {"additional_config": {"tightkv": False}}
    assert arguments("auto", None) == arguments("again", None) == {"kv_cache_dtype": "auto", **off}
    assert arguments("fp8", None) == {"kv_cache_dtype": "fp8", **off}
    assert arguments("k2v2+calibrated", "c.tkc") == {
        "kv_cache_dtype": "auto",
        "additional_config": {"tightkv": {"preset": "k2v2", "calibration": "c.tkc"}},
    }
    with pytest.raises(ValueError, match="needs --calibration"):
        arguments("k2v2+calibrated", None)
    with pytest.raises(ValueError, match=r"cache 'fp8\+calibrated'"):
        arguments("fp8+calibrated", "c.tkc")


def test_answers_with_other_settings_are_not_mixed(depth: Any, tmp_path: Path) -> None:
    words = ["m", "--tasks", "t.json", "--out", str(tmp_path)]
    depth.generate.check_settings(depth.generate.parse_args(words))
    depth.generate.check_settings(depth.generate.parse_args([*words, "--seeds", "5"]))
    with pytest.raises(ValueError, match=r"other settings \(temperature\)"):
        depth.generate.check_settings(depth.generate.parse_args([*words, "--temperature", "1"]))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.thorough
def test_from_prompts_to_a_table(depth: Any, tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model", template=TEMPLATE)
    file = depth.tasks.TaskFile()
    file.add_stream("s", ["far away " * 12, "nearby " * 20])
    file.prompts = [one(depth, name, pieces=i % 3) for i, name in enumerate("abcd")]
    file.save(tmp_path / "tasks.json")
    out = tmp_path / "answers"
    command = [sys.executable, str(FOLDER / "generate.py"), str(model)]
    command += ["--tasks", str(tmp_path / "tasks.json"), "--out", str(out), "--dtype", "float32"]
    command += ["--device", "cpu", "--batch", "2", "--seeds", "2", "--caches", "auto", "again"]
    subprocess.run(command, check=True, timeout=250)
    rows = depth.generate.answers(out / "auto.jsonl")
    assert {(row["id"], row["seed"]) for row in rows} == {
        (prompt.id, seed) for prompt in file.prompts for seed in (0, 1)
    }
    assert all(row["tokens"] == 8 or row["finish"] == "stop" for row in rows)
    before = (out / "auto.jsonl").read_bytes()
    subprocess.run(command, check=True, timeout=250)  # nothing is missing: no engine starts
    assert (out / "auto.jsonl").read_bytes() == before
    depth.score.main(["--tasks", str(tmp_path / "tasks.json"), str(out)])
    depth.summarize.main([str(out), "--model", "tiny", "--out", str(tmp_path / "rows.jsonl")])
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert row["kind"] == "depth" and row["answers"] == 8 and row["cache"] == "again"
    assert row["same"] == 1  # the same random numbers, and sums in float32


# --- weights -----------------------------------------------------------------------------------
def test_pieces_become_the_file_again(depth: Any, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(2500)
    (tmp_path / "model.gguf").write_bytes(data)
    paths = depth.convert.pack(tmp_path / "model.gguf", tmp_path / "pieces", size=1000)
    assert [path.stat().st_size for path in paths] == [1000, 1000, 500]
    depth.convert.join(tmp_path / "pieces", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == data
    paths[1].write_bytes(bytes(1000))
    with pytest.raises(ValueError, match="piece-001 is damaged"):
        depth.convert.join(tmp_path / "pieces", tmp_path / "third.gguf")
    assert not (tmp_path / "third.gguf").exists()


def test_names_of_tensors(depth: Any) -> None:
    name = depth.convert.name_of
    assert name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert name("output.weight") == "lm_head.weight"
    with pytest.raises(ValueError, match=r"'blk\.0\.ssm_in\.weight' is none of Qwen2"):
        name("blk.0.ssm_in.weight")
