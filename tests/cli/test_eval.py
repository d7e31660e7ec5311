"""tightkv eval: texts, windows, scores, needles, greedy texts, the command and its JSON."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.attention import use_attention
from tightkv.pages.layout import ring_tokens
from tightkv.tools import rows
from tightkv.tools.cli import main
from tightkv.tools.cli.eval import page
from tightkv.tools.cli.eval.sizes import TASKS
from tightkv.tools.cli.shared.config_flags import label, parse_configs
from tightkv.tools.eval.forward import TAIL_TOKENS, CacheRun, ignore, shared_tokens
from tightkv.tools.eval.results import cache_facts, model_fingerprint
from tightkv.tools.eval.tasks.free_running import FreeTask, same_tokens
from tightkv.tools.eval.tasks.needles import (
    ANSWER_TOKENS,
    MAX_NEEDLES,
    Needle,
    NeedleTask,
    build_haystack,
    make_needles,
)
from tightkv.tools.eval.tasks.quality import (
    Schedule,
    check_compresses,
    compare,
    measure_quality,
)
from tightkv.tools.eval.text import Text, default_texts, read_text
from tightkv.tools.eval.windows import Windows, cut_windows
from tightkv.tools.rows import source_commit
from tiny_folder import TEMPLATE, byte_tokenizer, write_tiny_folder

DOC = Path(__file__).resolve().parents[2] / "docs" / "eval.md"
SMALL = {"page_size": 32, "exact_pages": 1, "sinks": 1}
SCHEDULE = Schedule(prefill=40, chunk=16, batch=2)


def small(name: str) -> KVQuantConfig:
    return KVQuantConfig.preset(name, **SMALL)


def caches(model: Any, *configs: KVQuantConfig) -> dict[str, Callable[[], TightCache]]:
    return {cfg.name: partial(TightCache, cfg, model=model) for cfg in configs}


def windows(rows: int = 3, tokens: int = 187) -> Windows:
    return Windows(prompt(rows, tokens), tuple("ab"[i % 2] for i in range(rows)))


EXACT = KVQuantConfig(key_bits=16, value_bits=16, **SMALL)


# --- texts -------------------------------------------------------------------------------------
def test_the_default_texts_are_two_different_proses() -> None:
    first, second = default_texts()
    assert first.name != second.name and first.sha256 != second.sha256
    shared = set(first.content.split("\n\n")) & set(second.content.split("\n\n"))
    for text in (first, second):
        paragraphs = text.content.split("\n\n")
        assert len(text.content) > 100_000
        assert len(set(paragraphs)) == len(paragraphs) > 20 * len(shared)
        assert not re.search(r"^(>>>|\+--|[*=~-]{3,}$)|::=", text.content, re.MULTILINE)
        assert sum(" the " in paragraph for paragraph in paragraphs) > 0.5 * len(paragraphs)


def test_a_text_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Grüße,\n\nand more.\n", encoding="utf-8")
    assert read_text(file).content == "Grüße,\n\nand more.\n"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt' is not UTF-8"):
        read_text(file)
    with pytest.raises(FileNotFoundError, match=r"none\.txt' does not exist"):
        read_text(tmp_path / "none.txt")


# --- windows -----------------------------------------------------------------------------------
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(20, 400), min_size=1, max_size=4),
    tokens=st.integers(2, 20),
    count=st.integers(1, 12),
)
def test_windows_are_disjoint_and_spread(lengths: list[int], tokens: int, count: int) -> None:
    room = [length // tokens for length in lengths]
    # Every position of a text is another pair of letters, so a window says where it is from.
    texts = [
        Text(str(i), "".join(chr(33 + (n * 7 + i) % 90) for n in range(length)))
        for i, length in enumerate(lengths)
    ]
    tokenizer = byte_tokenizer()
    if sum(room) < count:
        with pytest.raises(ValueError, match=f"hold {sum(room)} windows of {tokens} tokens"):
            cut_windows(tokenizer, texts, tokens, count)
        return
    cut = cut_windows(tokenizer, texts, tokens, count)
    assert cut.ids.shape == (count, tokens) and len(cut.sources) == count
    shares = [cut.sources.count(text.name) for text in texts]
    # Even, unless a text is used up.
    assert all(
        share in (max(shares), max(shares) - 1) or share == n
        for share, n in zip(shares, room, strict=True)
    )
    for text, share in zip(texts, shares, strict=True):
        end = 0
        for row, source in zip(cut.ids, cut.sources, strict=True):
            if source == text.name:
                at = text.content.find(tokenizer.decode(row), end)
                assert at >= end
                end = at + tokens
        assert end <= len(text.content) and (share == 0) == (end == 0)


def test_windows_reach_over_the_whole_text() -> None:
    text = Text("t", "".join(chr(33 + n % 90) * 10 for n in range(90)))  # 900 tokens
    cut = cut_windows(byte_tokenizer(), [text], 10, 3)
    starts = [text.content.find(byte_tokenizer().decode(row)) for row in cut.ids]
    assert starts[0] < 300 <= starts[1] < 600 <= starts[2]


def test_a_text_too_short_for_a_window() -> None:
    with pytest.raises(ValueError, match=r"'tiny' has 5 tokens, fewer than a window of 8"):
        cut_windows(byte_tokenizer(), [Text("tiny", "abcde")], 8, 1)


def test_windows_begin_as_the_models_texts_do() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )
    cut = cut_windows(tokenizer, [Text("t", "abcdefghijkl")], 5, 2)
    assert cut.ids[:, 0].tolist() == [0, 0]
    assert [tokenizer.decode(row[1:]) for row in cut.ids] == ["bcde", "hijk"]


# --- scores ------------------------------------------------------------------------------------
def test_scores_by_hand() -> None:
    p = torch.tensor([[[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.7, 0.0]]])
    q = torch.tensor([[[0.25, 0.5, 0.25, 0.0], [0.1, 0.2, 0.6, 0.1]]])
    scores = compare(p.log(), q.log(), torch.tensor([[0, 2]]))
    wanted = [
        0.5 * torch.log(torch.tensor(2.0)) - 0.25 * torch.log(torch.tensor(2.0)),
        0.7 * torch.log(torch.tensor(0.7 / 0.6)),
    ]
    torch.testing.assert_close(scores.kl[0], torch.stack(wanted))
    torch.testing.assert_close(scores.nll[0], -torch.tensor([0.25, 0.6]).log())
    torch.testing.assert_close(scores.reference_nll[0], -torch.tensor([0.5, 0.7]).log())
    assert scores.same_top.tolist() == [[False, True]]
    summary = scores.summary()
    assert summary.positions == 2 and summary.top1 == 0.5
    assert summary.kl == pytest.approx(float(sum(wanted)) / 2)
    assert summary.kl_p99 == summary.kl_p999 == pytest.approx(float(max(wanted)))
    assert summary.perplexity == pytest.approx((4 / 0.6) ** 0.5)


def test_sixteen_bits_are_the_uncompressed_cache() -> None:
    model = tiny()
    got = measure_quality(model, windows(), caches(model, EXACT), SCHEDULE)["k16v16"]
    assert 0 <= got.summary.kl + 1e-7 < 1e-6
    assert got.summary.perplexity == pytest.approx(got.summary.reference_perplexity, rel=1e-5)
    assert got.summary.top1 > 0.99


def test_the_reference_is_a_plain_forward_pass() -> None:
    model, cut = tiny(), windows()
    got = measure_quality(model, cut, caches(model, EXACT), SCHEDULE)["k16v16"]
    with torch.inference_mode(), use_attention(model, "eager"):
        log_p = model(cut.ids, use_cache=False).logits.log_softmax(-1)
    nll = -log_p[:, 40:-1].gather(-1, cut.ids[:, 41:, None]).squeeze(-1)
    assert got.scores.reference_nll.shape == nll.shape == (3, 146)
    torch.testing.assert_close(got.scores.reference_nll, nll, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.scores.nll, nll, rtol=2e-3, atol=2e-3)


def test_fewer_bits_are_further_away() -> None:
    model = tiny()
    done = measure_quality(
        model, windows(), caches(model, small("k8v8"), small("k4v4"), small("k2v2")), SCHEDULE
    )
    kl = [quality.summary.kl for quality in done.values()]
    assert 0 < 5 * kl[0] < kl[1] < kl[2] / 5
    held = [quality.bytes_held for quality in done.values()]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "lfm2", "qwen3_5"])
def test_hybrid_models_are_measured(family: str) -> None:
    model = tiny(family)
    done = measure_quality(model, windows(2), caches(model, small("k8v8"), small("k2v2")), SCHEDULE)
    assert 0 < done["k8v8"].summary.kl < 1e-3 < done["k2v2"].summary.kl
    assert done["k8v8"].summary.reference_perplexity == done["k2v2"].summary.reference_perplexity


def test_scores_do_not_depend_on_the_batch_or_on_the_others() -> None:
    model, cut = tiny(), windows()
    both = measure_quality(model, cut, caches(model, small("k4v4"), small("k2v2")), SCHEDULE)
    alone = measure_quality(
        model, cut, caches(model, small("k2v2")), Schedule(prefill=40, chunk=16, batch=3)
    )
    torch.testing.assert_close(
        both["k2v2"].scores.kl, alone["k2v2"].scores.kl, rtol=1e-3, atol=1e-6
    )
    assert both["k2v2"].bytes_bf16 == alone["k2v2"].bytes_bf16 == 4 * 4 * 2 * 32 * 186


def test_every_forward_pass_is_told_and_every_text_summed() -> None:
    model, passes = tiny(), list[int]()
    configs = caches(model, small("k4v4"), small("k2v2"))
    done = measure_quality(model, windows(), configs, SCHEDULE, passes.append)
    assert sum(passes) == 2 * SCHEDULE.passes(3, 187) == 2 * 2 * (1 + 10)
    by_text = done["k2v2"].by_text()
    assert [by_text[name].positions for name in "ab"] == [2 * 146, 146]
    mean = (2 * by_text["a"].kl + by_text["b"].kl) / 3
    assert done["k2v2"].summary.kl == pytest.approx(mean)


def test_the_scored_tokens_read_compressed_pages() -> None:
    """Positions that fit the window are as exact as it is, those after them are not."""
    for bits, most in ((16, 1e-6), (8, 5e-5)):
        model, cfg = tiny(), small("k2v2").replace(window_bits=bits)
        schedule = Schedule(prefill=8, chunk=8, batch=3)
        done = measure_quality(model, windows(), caches(model, cfg), schedule)
        kl = done["k2v2"].scores.kl.mean(0)
        assert kl[:20].max() < most < 1e-4 < kl[-20:].min()


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chunk=0; it must be at least 1"):
        Schedule(chunk=0)
    with pytest.raises(ValueError, match=r"prefill=186 leaves nothing .* 187 tokens; .* 1 to 185"):
        measure_quality(tiny(), windows(), {}, Schedule(prefill=186))
    held = ring_tokens(small("k4v4"))
    check_compresses(small("k4v4"), held + 2)
    check_compresses(EXACT, 4)
    with pytest.raises(ValueError, match=rf"ring holds {held} tokens .*take more than {held + 1}"):
        check_compresses(small("k4v4"), held + 1)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        measure_quality(model, windows(), caches(model, EXACT), SCHEDULE)


# --- sizes -------------------------------------------------------------------------------------
def test_bits_count_scales_and_means() -> None:
    model = tiny()  # head_dim 32

    def bits_of(cfg: KVQuantConfig) -> dict[str, float]:
        return cache_facts(model, partial(TightCache, cfg, model=model))["bits"]

    bits = bits_of(KVQuantConfig.preset("k4v2", **SMALL))
    assert bits["key"] == 4 + 16 / 32 + 16 / 32  # codes, a scale a token, an fp16 mean a page of 32
    assert bits["value"] == 2 + 16 / 32
    assert bits_of(EXACT) == {"key": 16, "value": 16, "mean": 16}
    half = KVQuantConfig.preset("k4v4", key_centering="none", protected_first=2, **SMALL)
    assert bits_of(half)["value"] == (4.5 + 8.5) / 2


# --- needles -----------------------------------------------------------------------------------
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FILLER = " ".join(
    f"{LETTERS[i % 26].upper()}{LETTERS[i % 7] * 3}y, whose letter is {LETTERS[i * 5 % 26]}, says "
    f"nothing {'in particular' if i % 3 else 'at all'}."
    for i in range(200)
)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@pytest.mark.parametrize("seed", range(20))
def test_questions_do_not_copy_the_needles(seed: int) -> None:
    needles = make_needles(MAX_NEEDLES, seed, FILLER)
    assert len({needle.answer for needle in needles}) == MAX_NEEDLES
    for needle in needles:
        fact, question = words(needle.fact), words(needle.question)
        assert words(needle.answer)[0] in fact and words(needle.answer)[0] not in question
        runs = {tuple(fact[i : i + 4]) for i in range(len(fact) - 3)}
        assert not runs & {tuple(question[i : i + 4]) for i in range(len(question) - 3)}
        # Someone or something of the fact is asked about.
        assert set(question) & set(fact) - {"the", "is", "of", "for", "a"}


def test_needles_differ_by_seed_and_avoid_the_text() -> None:
    assert make_needles(5, 0, FILLER) == make_needles(5, 0, FILLER)
    assert make_needles(5, 0, FILLER) != make_needles(5, 1, FILLER)
    taken = make_needles(5, 0, FILLER)[0].answer
    for seed in range(10):
        assert make_needles(1, seed, f"{FILLER} {taken}")[0].answer != taken
    with pytest.raises(ValueError, match=r"needles=6; allowed: 1 to 5"):
        make_needles(6, 0, "")
    with pytest.raises(ValueError, match="already has every one of"):
        make_needles(5, 0, "4821 7350 1964 5207 8613 2931 9376 6048")


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("context", [900, 2000, 4000])
def test_needles_are_in_the_prompt_at_their_depths(context: int, template: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    needles = make_needles(5, 3, FILLER)
    hay = build_haystack(tokenizer, FILLER, context, needles)
    assert hay.context == context and len(hay.prompts) == 5
    shared = shared_tokens(hay.prompts)
    for needle, ids in zip(needles, hay.prompts, strict=True):
        text = tokenizer.decode(ids)
        assert context - 120 < len(ids) + ANSWER_TOKENS <= context
        document = text[text.index("Aaaay, whose") : text.index("Question:")]
        assert text.count(needle.question) == 1
        assert text.endswith("Answer:" if template is None else "<answer>")
        for i, other in enumerate(needles):
            assert document.count(f"{other.fact}\n\n") == 1
            depth = document.index(other.fact) / len(document)
            assert abs(depth - (i + 0.5) / 5) < 0.1
        assert ids[:shared] == hay.prompts[0][:shared]
        # The tail of the context is read again with the question.
        assert len(ids) - shared >= TAIL_TOKENS + len(needle.question)


def test_a_context_that_cannot_be_built() -> None:
    needles = make_needles(5, 0, FILLER)
    with pytest.raises(ValueError, match=r"too few to fill a context of 90000"):
        build_haystack(byte_tokenizer(), FILLER, 90000, needles)
    with pytest.raises(ValueError, match=r"a context of 300 tokens has no room"):
        build_haystack(byte_tokenizer(), FILLER, 300, needles)


def asked(model: Any, *configs: KVQuantConfig, needles: list[Needle] | None = None) -> Any:
    tokenizer = byte_tokenizer()
    hay = build_haystack(tokenizer, FILLER, 900, needles or make_needles(3, 0, FILLER))
    every = {"plain": None, **caches(model, *configs)}
    task = NeedleTask(tokenizer, (hay,))
    return tokenizer, hay, {name: task.read(model, made, ignore) for name, made in every.items()}


def answers(data: Any) -> list[str]:
    return [row["answer"] for row in data["answers"]]


def test_answers_are_the_models_own() -> None:
    """Each as if it had been asked alone, with generate and no cropping."""
    model = tiny(vocab_size=258, initializer_range=0.3)
    tokenizer, hay, done = asked(model, EXACT, small("k2v2"))
    plain = done["plain"][0]
    for ids, answer in zip(hay.prompts, answers(plain), strict=True):
        with use_attention(model, "sdpa"):
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0
            )
        text = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        assert answer == text.lstrip().split("\n")[0].strip()
    assert done["k16v16"][0] == plain
    assert answers(done["k2v2"][0]) != answers(plain)
    assert plain["context"] == 900 and plain["prompt_tokens"] == max(map(len, hay.prompts))


@pytest.mark.parametrize("family", ["gemma3", "lfm2", "qwen3_5"])
def test_layers_that_cannot_be_cropped(family: str) -> None:
    model = tiny(family, vocab_size=258, initializer_range=0.3)
    _, _, done = asked(model, EXACT)
    assert done["k16v16"] == done["plain"]


def test_an_answer_counts_as_a_whole_word(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(["It is 17.", "It is 171.", "A Goat, surely", "goats"])
    monkeypatch.setattr(CacheRun, "write_line", lambda *args: next(replies))
    needles = [Needle("f", f"q{i}", word) for i, word in enumerate(["17", "17", "goat", "goat"])]
    _, _, done = asked(tiny(vocab_size=258), needles=needles)
    plain = done["plain"][0]
    assert [row["found"] for row in plain["answers"]] == [True, False, True, False]
    assert plain["found"] == 2


# --- greedy match ------------------------------------------------------------------------------
def test_equal_tokens_are_counted_to_the_first_difference() -> None:
    first = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    second = [[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4]]
    assert same_tokens(first, second) == [4, 0, 2]


def test_greedy_texts_part_with_coarse_codes_only() -> None:
    model, passes = tiny(), list[int]()
    task = FreeTask(windows(3, 160), 24, temperature=0.0)
    exact = task.reference(model, passes.append)
    made = caches(model, EXACT, small("k2v2")).values()
    same, coarse = (task.measure(model, make, exact, passes.append) for make in made)
    assert same["lengths"] == [24, 24, 24]
    assert min(coarse["lengths"]) < 24 and coarse["cap"] == 24
    assert coarse["median"] == sorted(coarse["lengths"])[1]
    assert sum(passes) == 3 * 24
    run = CacheRun(model)
    logits = run.feed(windows(3, 160).ids)
    assert run.cache.get_seq_length() == 160 and logits.shape == (3, 160, 97)


# --- configs and provenance --------------------------------------------------------------------
def test_labels_say_what_differs_from_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"preset": "k3v3", "page_size": 128, "sinks": 0}')
    configs = parse_configs(["k4v4", "k2v2", str(file), '{"key_bits": 16, "value_bits": 16}'])
    assert list(configs) == ["k4v4", "k2v2", "k3v3 page_size=128 sinks=0", "k16v16"]
    assert configs["k2v2"] == KVQuantConfig.preset("k2v2")
    assert label(KVQuantConfig(key_method="prod")) == "k4prodv4"
    with pytest.raises(ValueError, match="'k4v4' is given twice"):
        parse_configs(["k4v4", '{"preset": "k4v4"}'])


def test_the_fingerprint_is_of_the_weights() -> None:
    assert model_fingerprint(tiny()) == model_fingerprint(tiny())
    assert model_fingerprint(tiny()) != model_fingerprint(tiny(seed=1))
    other = tiny()
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    assert model_fingerprint(other) != model_fingerprint(tiny())
    commit = source_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-modified)?", commit)


def test_a_changed_source_tree_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    file = tmp_path / "src" / "tightkv" / "tools" / "rows.py"
    file.parent.mkdir(parents=True)
    shutil.copy(rows.__file__, file)
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "All")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    spec = importlib.util.spec_from_file_location("copied", file)
    assert spec is not None and spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    commit = copied.source_commit()
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    (tmp_path / "notes.txt").write_text("beside the source")
    assert copied.source_commit() == commit
    file.write_text(file.read_text() + "# changed\n")
    assert copied.source_commit() == f"{commit}-modified"


# --- the command -------------------------------------------------------------------------------
SIZES = (
    *("--window", "150", "--windows", "2", "--prefill", "40", "--batch", "2"),
    *("--contexts", "900", "4000", "--needles", "2", "--prompts", "2", "--prompt-tokens", "150"),
    *("--new-tokens", "6"),
)
COARSE = json.dumps({"preset": "k2v2", **SMALL})
FINE = json.dumps({"preset": "k8v8", **SMALL})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def own_results(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result is kept from one test to the next; the bundled model stays where it is."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "filler.txt"
    file.write_text(FILLER, encoding="utf-8")
    return file


def error_of(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["eval", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]  # what only the model can tell comes after its loading
    assert not out and line.startswith("tightkv: error: ") and err.count("error: ") == 1
    return line.removeprefix("tightkv: error: ")


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf by its path; a config counts as one."""
    if isinstance(value, dict) and not path.endswith("config"):
        return [x for key, own in value.items() for x in flatten(own, f"{path}.{key}".lstrip("."))]
    if isinstance(value, list):
        return [leaf for own in value for leaf in flatten(own, path + "[]")]
    return [(path, value)]


def check_schema(data: dict[str, Any], whole: bool) -> None:
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| ([a-z ]+) \|", DOC.read_text(), re.MULTILINE)
    documented = {path: kinds.split(" or ") for path, kinds in rows}
    types = {"int": int, "float": float, "str": str, "bool": bool, "object": dict}
    leaves = flatten(data)
    for path, value in leaves:
        kinds = documented[path.replace("reference.needles[]", "rows[].needles[]")]
        allowed = [types[kind] for kind in kinds if kind != "null"]
        assert (value is None and "null" in kinds) or type(value) in allowed, (path, value)
    if whole:
        tasks = {"reference.needles", *(f"rows[].{task}" for task in TASKS)}
        assert set(documented) - tasks <= {path for path, _ in leaves}


def test_the_command_measures_all_and_writes_all(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    argv = [
        *("eval", folder, "--text", text_file, "--presets", COARSE, FINE, *SIZES, "--json"),
        *("--out", out, "--dtype", "float32", "--device", "cpu"),
    ]
    assert main([str(word) for word in argv]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    check_schema(data, whole=True)
    assert "quality: 16 of 16" in printed.err and "free: 18 of 18" in printed.err
    assert "needles: 6 of 6" in printed.err
    coarse, fine = data["rows"]
    assert coarse["name"].startswith("k2v2 ") and KVQuantConfig.from_dict(fine["config"]) == small(
        "k8v8"
    )
    assert coarse["quality"]["kl"] > 20 * fine["quality"]["kl"] > 0
    assert coarse["quality"]["positions"] == 2 * 109
    assert fine["needles"][0]["asked"] == 2 and len(data["reference"]["needles"]) == 1
    assert data["settings"]["contexts"] == [900] and "4000" in data["notes"][-1]
    assert data["texts"][0]["name"] == str(text_file)

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"] for line in lines] == [coarse["name"], fine["name"]]
    assert lines[0]["kind"] == "eval" and lines[0]["quality"] == coarse["quality"]
    assert lines[0]["model"] == data["model"] and lines[0]["texts"] == data["texts"]


def test_one_task_and_its_table(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", str(folder), "--text", str(text_file), "--presets", COARSE, *SIZES]
    out = tmp_path / "rows.jsonl"
    out.write_text("{}\n")
    assert main([*argv, "--tasks", "free", "--json", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    check_schema(data, whole=False)
    assert len(out.read_text().splitlines()) == 2  # appended
    assert data["rows"][0]["quality"] is None and data["reference"]["perplexity"] is None
    assert main([*argv, "--tasks", "quality"]) == 0
    table = capsys.readouterr().out
    assert re.search(
        r"^cache +bits K +bits V +KL +KL p99 +KL p99.9 +top-1 +perplexity", table, re.MULTILINE
    )
    assert "2 windows of 150 tokens, 218 positions scored" in table
    assert "needles" not in table and "free log p" not in table


def test_bad_arguments_are_one_line(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = (folder, "--text", text_file, "--presets", COARSE, *SIZES)
    for extra, wanted in (
        (("--chunk", 0), "--chunk 0; it must be at least 1"),
        (("--windows", 0), "--windows 0"),
        (("--prefill", 149), "--prefill 149 leaves nothing to score of a window of 150"),
        (("--presets", "k5v5"), "unknown preset 'k5v5'"),
        (("--presets", "k4v4", "k4v4"), "'k4v4' is given twice"),
        (("--config", tmp_path / "none.json"), "none.json' does not exist"),
        (("--text", tmp_path / "none.txt"), "none.txt' does not exist"),
        (("--out", tmp_path / "no" / "rows.jsonl"), "folder of the output file"),
        (("--rows", tmp_path / "rows.jsonl"), "give --report FOLDER too"),
        (("--report", tmp_path / "page", "--tasks", "free"), "add it to --tasks"),
        (("--report", tmp_path / "page", "--rows", tmp_path / "none.jsonl"), "none.jsonl"),
        (("--window", 60), "60 tokens are too few to measure k2v2"),
        (("--window", 1025), "--window is 1025; the model was made for 1024"),
        (("--windows", 200), "windows of 150 tokens, not 200"),
        (("--contexts", 5000), "the model was made for 1024"),
        (("--needles", 9), "needles=9; allowed: 1 to 5"),
    ):
        assert wanted in error_of(capsys, *base, *extra), extra
    assert "does not exist" in error_of(capsys, tmp_path / "nowhere", "--quick")
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    message = error_of(capsys, *base, "--text", short, "--tasks", "quality")
    assert "short.txt' has 10 tokens, fewer than a window of 150" in message


VLLM_ROW = {"kind": "vllm-quality", "model": "m", "dtype": "bfloat16", "top1": 0.9, "kl": 0.01}
TASK_ROW = {
    **{"kind": "depth", "model": "m", "family": "gsm8k", "depth": None, "cache": "k2v2"},
    **{"answers": 560, "score": 0.3, "reference": 0.32, "difference": -0.02, "p": 0.25},
    **{"difference_stderr": 0.015, "interval": [-0.05, 0.01]},
}


def test_the_page_has_models_rivals_tasks_and_the_noise_floor(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rivals, report = tmp_path / "rivals.jsonl", tmp_path / "page"
    compared = {"package": "hqq", "cache": "hqq 2", "kl": 0.5, "top1": 0.7, "model": "m"}
    old = {**VLLM_ROW, "cache": "fp8", "kl": 0.9}
    new = {**old, "kl": 0.002, "kl_stderr": 0.001, "bytes_per_token": 2000.0}
    floor = {**VLLM_ROW, "cache": "again", "kl": 0.0001, "bytes_per_token": 4000.0}
    unsized = {**VLLM_ROW, "cache": "fp8", "model": "old"}  # a row, but no place in the picture
    plain = {**compared, "cache": "dynamic", "kl": 0.0}  # itself: not shown
    rows = [compared, plain, old, new, floor, unsized, TASK_ROW, {**TASK_ROW, "depth": 8192}]
    rivals.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv: list[Any] = ["eval", folder, "--text", text_file, "--presets", COARSE, *SIZES]
    argv += ["--report", report, "--rows", rivals, "--dtype", "float32", "--device", "cpu"]
    assert main([*map(str, argv), "--out", str(tmp_path / "own.jsonl"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["tasks"] == ["quality"]
    coarse, exact = data["rows"]
    assert exact["name"] == "k16v16"
    assert 20 * abs(exact["quality"]["kl"]) < coarse["quality"]["kl"]
    assert exact["bytes_per_token"] == 2 * 2 * 2 * 32 * 2  # layers, sides, heads, head_dim, bytes
    assert 0 < coarse["bytes_per_token"] < exact["bytes_per_token"] / 4

    found = json.loads((report / "report.json").read_text())
    caches = {(one["model"], one["cache"]): one for one in found["caches"]}
    assert set(caches) == {
        (folder.name, coarse["name"]), (folder.name, "k16v16"), ("m", "fp8"), ("m", "again"),
        ("m", "hqq 2"), ("old", "fp8"),
    }  # fmt: skip
    own = caches[folder.name, coarse["name"]]
    for name in ("kl", "kl_stderr", "kl_p999", "kl_above", "top1", "positions"):
        assert own[name] == coarse["quality"][name]
    assert {name for (_, name), one in caches.items() if one["floor"]} == {"k16v16", "again"}
    assert caches["m", "fp8"]["kl"] == 0.002  # the later row
    assert len(found["tasks"]) == 2 and found["commit"] == data["commit"]

    text = (report / "report.md").read_text()
    order = ["caches of transformers", ", transformers", ", vLLM", "## Tasks at depth"]
    places = [text.index(word) for word in order]
    assert places[1] < places[2] < places[3] and places[0] < places[2]  # the worst first
    assert "| noise floor (again) | 4,000 | 0.00010 |" in text
    assert "| fp8 | 2,000 | 0.00200 ± 0.00100 |" in text
    assert "| m | gsm8k at 8,192 | k2v2 | 560 | 30.0% | 32.0% | -2.0% ± 1.5% |" in text
    picture = (report / "report.svg").read_text()
    assert picture.count('<g id="axes_') == 2  # a panel per model

    # rows of --out are rows of another page
    assert main([*map(str, argv[:-5]), str(tmp_path / "own.jsonl"), *argv[-4:]]) == 0
    assert coarse["name"] in (report / "report.md").read_text()
    capsys.readouterr()
    rivals.write_text(json.dumps({"kind": "decode", "kl": 1}) + "\n")
    message = error_of(capsys, *argv[1:])
    assert "line 1" in message and "kind 'decode'; --rows takes eval" in message
    for line in ('{"kind": "depth"}', json.dumps(VLLM_ROW), "[]", "{"):
        rivals.write_text(f"{json.dumps(TASK_ROW)}\n{line}\n")
        assert "rivals.jsonl' cannot be shown" in error_of(capsys, *argv[1:])


def sized(model: str, kl: float, window: int = 2048, cache: str = "k4v4") -> dict[str, Any]:
    quality = {"kl": kl, "top1": 0.9}
    size = {"windows": 8, "window": window, "prefill": 256, "chunk": 16}
    facts = {"kind": "eval", "name": cache, "model": {"name": model, "dtype": "bfloat16"}}
    return {**facts, "quality": quality, "settings": size, "bytes_per_token": 1000.0}


def test_the_page_compares_what_was_measured_alike(tmp_path: Path) -> None:
    """Windows of one size, the newest row of each, models by the names that rivals give them."""
    rival = {**VLLM_ROW, "cache": "fp8", "bytes_per_token": 2000.0}
    task = {**TASK_ROW, "against": "auto"}
    pages = {
        "sizes": [sized("a/b/m", 0.3, 512), sized("a/b/m", 0.2), sized("a/b/m", 0.1), rival],
        "alike": [sized("a/b/m", 0.2), sized("a/c/m", 0.1), sized("owner/m", 0.3)],
        "tasks": [rival, task, {**task, "score": 0.4}, {**task, "against": "fp8"}],
    }
    found = {}
    for name, measured in pages.items():
        (tmp_path / name).mkdir()
        page.write(str(tmp_path / name), measured)
        found[name] = json.loads((tmp_path / name / "report.json").read_text())
    caches = [(one["model"], one["source"], one["kl"]) for one in found["sizes"]["caches"]]
    about = "transformers, bfloat16, 8 x {} tokens (256, then by 16)"
    assert caches == [
        *(("m", about.format(512), 0.3), ("m", about.format(2048), 0.1)),
        ("m", "vLLM, bfloat16", 0.01),
    ]
    assert (tmp_path / "sizes" / "report.svg").read_text().count('<g id="axes_') == 1
    assert [one["model"] for one in found["alike"]["caches"]] == ["a/b/m", "a/c/m", "owner/m"]
    assert [(one["score"], one["against"]) for one in found["tasks"]["tasks"]] == [
        (0.4, "auto"), (0.3, "fp8")
    ]  # fmt: skip


def test_what_is_measured_now_wins_over_older_rows(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "own.jsonl", tmp_path / "page"
    argv = ["eval", folder, "--text", text_file, "--presets", COARSE, *SIZES, "--out", out]
    argv += ["--report", report, "--dtype", "float32", "--device", "cpu"]
    assert main([str(word) for word in argv]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kl = rows[0]["quality"]["kl"]
    rows[0]["quality"]["kl"] = 7.0
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(word) for word in (*argv, "--rows", out)]) == 0
    found = json.loads((report / "report.json").read_text())["caches"]
    assert [one["kl"] for one in found if one["cache"] == rows[0]["name"]] == [kl]


# --- lm_eval -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def adapter() -> Any:
    pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    import tightkv.tools.eval.lm_eval as module

    return module


def local_task(name: str, **options: Any) -> Any:
    """Four documents, longer than the exact newest tokens of the configs used here."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = [
        {
            "text": f"{FILLER[i * 40 : i * 40 + 160]} So",
            "choices": [" yes", " not at all"],
            "gold": i % 2,
        }
        for i in range(4)
    ]
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **kwargs: {"test": Dataset.from_list(rows)},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            **options,
        }
    )


def choice_task() -> Any:
    return local_task(
        "choices",
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )


def text_task() -> Any:
    return local_task(
        "texts",
        output_type="generate_until",
        doc_to_target="{{choices[gold]}}",
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )


def results_of(lm: Any) -> tuple[list[Any], list[Any]]:
    from lm_eval.evaluator import evaluate

    tasks = {"choices": choice_task(), "texts": text_task()}
    done = evaluate(lm, tasks, bootstrap_iters=0, log_samples=True)
    assert done["results"]["choices"]["sample_len"] == 4
    choices, texts = ([s["resps"] for s in done["samples"][name]] for name in tasks)
    return choices, texts


def numbers(responses: list[Any]) -> torch.Tensor:
    return torch.tensor([[float(choice[0][0]) for choice in doc] for doc in responses])


def test_lm_eval_reads_scores_through_the_cache(adapter: Any, folder: Path) -> None:
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    assert get_model("tightkv") is adapter.TightLM
    # lm_eval's command line gives this device on every machine.
    device = "cuda:0" if not torch.cuda.is_available() else "cpu"
    options = {"dtype": "float32", "device": device, "batch_size": 2}
    exact = adapter.TightLM(str(folder), quant=EXACT, **options)
    model, tokenizer = exact.model, exact.tokenizer
    coarse = adapter.TightLM(model, tokenizer=tokenizer, quant=COARSE, batch_size=2)
    got, words = results_of(exact)
    far, _ = results_of(coarse)
    model.set_attn_implementation("sdpa")
    plain = HFLM(model, tokenizer=tokenizer, batch_size=2)
    wanted, plain_words = results_of(plain)
    torch.testing.assert_close(numbers(got), numbers(wanted), rtol=1e-3, atol=1e-2)
    assert words == plain_words
    assert (numbers(far) - numbers(wanted)).abs().max() > 0.1


def test_lm_eval_refuses_what_it_would_ignore(adapter: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown model argument 'peft' \(allowed: pretrained"):
        adapter.TightLM(str(folder), peft="x")
    with pytest.raises(ValueError, match="chunk=0; it must be at least 1"):
        adapter.TightLM(str(folder), chunk=0)
    with pytest.raises(ValueError, match="unknown preset 'k9v9'"):
        adapter.TightLM(str(folder), quant="k9v9")


@pytest.mark.thorough
# --- the bundled model -------------------------------------------------------------------------
@pytest.mark.slow
def test_the_bundled_model_loses_more_with_fewer_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("--results", str(tmp_path / "kept.jsonl"))
    sizes = (*kept, "--tasks", "quality", "--window", "336", "--windows", "1", "--prefill", "240")
    assert main(["eval", "--presets", "k4v4", "k2v2", *sizes, "--chunk", "32", "--json"]) == 0
    fine, coarse = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < 4 * fine["quality"]["kl"] < coarse["quality"]["kl"] < 0.2
    assert fine["quality"]["top1"] >= coarse["quality"]["top1"] > 0.8
    assert (fine["bits"]["key"], fine["bits"]["value"]) == (4.5, 4.25)
