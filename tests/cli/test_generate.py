"""tightkv generate: its answers, its numbers, its comparison and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, TextStreamer

import models
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.cache_size import CacheSize, cache_size
from tightkv.pages.layout import PageLayout
from tightkv.tools.cli import main
from tightkv.tools.cli.generate import live
from tightkv.tools.cli.generate.compare import (
    SharedPrompt,
    can_share,
    choose_needle,
    find_divergence,
    hide,
    judged,
    mean_kl,
)
from tightkv.tools.cli.generate.live import TokenClock, _timing, _until_end, generate
from tightkv.tools.cli.generate.prompt import check_length, encode, long_context
from tightkv.tools.cli.generate.report import compare_text, single_text
from tightkv.tools.eval.tasks.needles import Needle
from tightkv.tools.model_loading.load import load_model
from tiny_folder import TEMPLATE, byte_tokenizer, write_tiny_folder

DOC = Path(__file__).resolve().parents[2] / "docs" / "generate.md"
SMALL_PAGES = ("--page-size", "32", "--exact-pages", "1")
# What the hand-worked bytes are for, whatever the defaults become.
KNOWN = ("--preset", "k4v4", "--page-size", "64", "--mean-bits", "16")
SENTENCE = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("chatty"), template=TEMPLATE)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    words = ["generate", *map(str, argv), "--json", "--device", "cpu"]
    assert main(words) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def error_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert main(["generate", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("tightkv: error: ")
    return lines[0]


def answer(data: dict[str, Any], run: int = 0) -> str:
    text: str = data["runs"][run]["answers"][0]["text"]
    return text


# --- answers -----------------------------------------------------------------------------------
def test_the_answer_is_that_of_the_model_with_a_tight_cache(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = SENTENCE * 4
    data = run_json(
        capsys, tiny, "--prompt", prompt, "--max-new-tokens", 40, "--preset", "k3v2", *SMALL_PAGES
    )
    model, tokenizer = load_model(str(tiny), device="cpu")
    cache = TightCache(KVQuantConfig.preset("k3v2", page_size=32, exact_pages=1), model=model)
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    assert answer(data) == tokenizer.decode(new, skip_special_tokens=True)
    assert data["runs"][0]["kv"]["bytes"] == cache.bytes_used()["compressed"]
    assert data["runs"][0]["cache"] == "k3v2"
    assert data["config"]["page_size"] == 32


def test_the_answer_streams_and_the_report_follows(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run_json(capsys, tiny, "--prompt", SENTENCE, "--max-new-tokens", 12, *KNOWN)
    words = ["generate", str(tiny), "--prompt", SENTENCE, "--max-new-tokens", "12", *KNOWN]
    assert main([*words, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(answer(data) + "\n\n")
    assert "45 prompt tokens at " in text and "12 new tokens at " in text
    assert "1.37x smaller" in text and "tokens take more" not in text
    assert "In the long run 148 bytes per token, bf16 512" in text


def test_prompt_file_and_standard_input_are_the_same(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    few = ("--max-new-tokens", 4)
    wanted = answer(run_json(capsys, tiny, "--prompt", "Grüße", *few))
    assert answer(run_json(capsys, tiny, "--prompt-file", tmp_path / "prompt.txt", *few)) == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO("Grüße"))
    assert answer(run_json(capsys, tiny, *few)) == wanted


def test_the_chat_template_is_used_unless_raw(
    chatty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--prompt", "hello", "--max-new-tokens", 4)
    templated = run_json(capsys, chatty, *few)
    raw = run_json(capsys, chatty, "--raw", *few)
    by_hand = run_json(
        capsys, chatty, "--raw", "--prompt", "<user>hello<answer>", "--max-new-tokens", 4
    )
    assert templated["runs"][0]["answers"][0]["prompt_tokens"] == len("<user>hello<answer>")
    assert raw["runs"][0]["answers"][0]["prompt_tokens"] == len("hello")
    assert answer(templated) == answer(by_hand) != answer(raw)


def test_a_batch_answers_as_each_prompt_alone(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["short", SENTENCE * 3, "a middling prompt"]
    few = ("--max-new-tokens", 24, "--dtype", "float32")
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    batch = run_json(capsys, tiny, *flags, *few)["runs"][0]
    assert [a["prompt_tokens"] for a in batch["answers"]] == [len(p) for p in prompts]
    for prompt, together in zip(prompts, batch["answers"], strict=True):
        assert answer(run_json(capsys, tiny, "--prompt", prompt, *few)) == together["text"]
    assert main(["generate", str(tiny), *flags, *map(str, few), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for i, together in enumerate(batch["answers"], start=1):
        assert f"[{i}] {together['text']}" in text


def test_sampling_is_seeded(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--prompt", SENTENCE, "--max-new-tokens", 24, "--dtype", "float32")

    def sample(seed: int, *more: str) -> str:
        return answer(
            run_json(capsys, tiny, *few, "--temperature", "1.5", "--seed", str(seed), *more)
        )

    assert sample(1) == sample(1) != sample(2)
    assert (
        sample(1, "--top-k", "1")
        == sample(2, "--top-k", "1")
        == answer(run_json(capsys, tiny, *few))
    )


def test_a_config_file_and_flags_reach_the_cache(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"kv_quant": {"key_bits": 8, "page_size": 32}}')
    data = run_json(
        capsys, tiny, "--prompt", "x", "--max-new-tokens", 2, "--config", file, "--value-bits", 3
    )
    assert data["runs"][0]["cache"] == "k8v3"
    assert data["config"] == KVQuantConfig(key_bits=8, value_bits=3, page_size=32).to_dict()


def test_answers_end_at_the_end_of_text() -> None:
    assert _until_end([5, 6, 1, 0, 0], [1]) == [5, 6, 1]
    assert _until_end([5, 6], [1]) == [5, 6]
    assert _until_end([9, 1], [1, 9]) == [9]


# --- numbers -----------------------------------------------------------------------------------
def test_bytes_are_those_of_the_layout(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 layers of 2 heads of 32: at 4 bits 1024 + 1024 code bytes, 128 + 128 of scales and 64 of
    mean, 2368 a record, 2 * 2 * 2368 / 64 = 148 bytes per token; 16 bits: 512."""
    data = run_json(capsys, tiny, "--prompt", SENTENCE * 8, "--max-new-tokens", 8, *KNOWN)
    kv = data["runs"][0]["kv"]
    assert kv["tokens"] == 8 * len(SENTENCE) + 7  # the last new token is never stored
    assert (kv["bytes_per_token"], kv["bf16_bytes_per_token"]) == (148, 512)
    assert kv["bf16_bytes"] == 512 * kv["tokens"]
    assert kv["ratio"] == kv["bf16_bytes"] / kv["bytes"]
    assert kv["long_ratio"] == 512 / 148
    assert (kv["compressed_layers"], kv["exact_layers"], kv["other_layers"]) == (2, 0, 0)
    layout = PageLayout(KVQuantConfig.from_dict(data["config"]), 2, 32)
    even = kv["break_even_tokens"]
    sizes = [2 * layout.total_bytes(n, encode_partial_page=False) for n in (even - 1, even)]
    assert sizes[0] >= 512 * (even - 1) and sizes[1] < 512 * even
    assert (
        kv["bytes"]
        == 2 * layout.total_bytes(kv["tokens"], encode_partial_page=False)
        < kv["bf16_bytes"]
    )


def test_the_report_says_when_the_cache_is_larger_and_when_it_is_smaller() -> None:
    def text(size: int, plain: int, other: int = 0) -> str:
        kv = CacheSize(100, size, plain, 148, 512, 321)
        run = {
            "cache": "k4v4",
            "answers": [{"text": "yes", "prompt_tokens": 90, "new_tokens": 1}],
            "timing": {"prefill_tokens_per_second": 12.34, "decode_tokens_per_second": None},
            "kv": {
                "bytes": kv.bytes,
                "bf16_bytes": kv.bf16_bytes,
                "ratio": kv.ratio,
                "bytes_per_token": 148.0,
                "bf16_bytes_per_token": 512.0,
                "long_ratio": kv.long_ratio,
                "break_even_tokens": kv.break_even,
                "compressed_layers": 2,
                "exact_layers": 1,
                "other_layers": other,
            },
        }
        return single_text({"runs": [run], "model": {"dtype": "float32"}}, streamed=False)

    larger = text(4096, 2048)
    assert larger.startswith("yes\n\n90 prompt tokens at 12.3 tokens/s, 1 new tokens at - tokens/s")
    assert "4.00 KiB now, bf16 2.00 KiB: 2.00x larger" in larger
    assert "fewer than 321 tokens take more than in bf16" in larger
    assert "2.00 KiB now, bf16 2.00 KiB: the same size" in text(2049, 2048)
    smaller = text(2048, 4096, other=3)
    assert "2.00 KiB now, bf16 4.00 KiB: 2.00x smaller" in smaller
    assert "take more" not in smaller
    assert "1 of these layers are not compressed, but float32." in smaller
    assert "3 layers (sliding-window or linear attention) stay as they are" in smaller


def test_seconds_of_prompt_and_decoding() -> None:
    """The first step after the prompt is left out where others follow."""
    both = _timing([10.0, 14.0, 19.0, 20.0, 21.0], 8, [[1, 2, 3, 4], [1, 2]])
    assert both == {
        "prefill_seconds": 4.0,
        "prefill_tokens_per_second": 2.0,
        "decode_seconds": 2.0,
        "decode_tokens_per_second": 1.0,
    }
    read = _timing([10.0, 11.0, 12.0], 8, [[1, 2]], before=3.0)
    assert (read["prefill_seconds"], read["prefill_tokens_per_second"]) == (4.0, 2.0)
    two = _timing([10.0, 14.0, 19.0], 8, [[1, 2]])
    assert (two["decode_seconds"], two["decode_tokens_per_second"]) == (5.0, 0.2)
    one = _timing([10.0, 14.0], 8, [[1]])
    assert one["decode_tokens_per_second"] is None


# --- compare -----------------------------------------------------------------------------------
def test_compare_without_compression_is_exact(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 bits leave keys and values alone."""
    flags = ("--key-bits", 16, "--value-bits", 16, "--dtype", "bfloat16", *SMALL_PAGES)
    data = run_json(
        capsys, tiny, "--compare", "--prompt", SENTENCE * 6, "--max-new-tokens", 60, *flags
    )
    assert data["compare"]["equal"] and data["compare"]["divergence_token"] is None
    assert answer(data, 0) == answer(data, 1)
    assert data["compare"]["scored_tokens"] == data["runs"][0]["answers"][0]["new_tokens"] - 1
    assert data["compare"]["mean_kl"] < 1e-4  # bf16 rounding of another order of sums


def test_compare_sees_coarse_codes_and_finer_ones_are_closer(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompt", SENTENCE * 6, "--max-new-tokens", 40, "--dtype", "float32", *SMALL_PAGES)
    runs = {
        preset: run_json(capsys, tiny, "--compare", *flags, "--preset", preset)
        for preset in ("k2v2", "k4v4", "k8v8")
    }
    kl = {preset: data["compare"]["mean_kl"] for preset, data in runs.items()}
    assert kl["k2v2"] > 4 * kl["k4v4"] > 16 * kl["k8v8"] > 0
    assert len({answer(data, 0) for data in runs.values()}) == 1
    coarse = runs["k2v2"]
    assert [run["cache"] for run in coarse["runs"]] == ["uncompressed", "k2v2"]
    assert [run["attention"] for run in coarse["runs"]] == ["sdpa", "tightkv"]
    assert coarse["runs"][0]["kv"]["ratio"] == 0.5  # a float32 model's plain cache is float32
    assert coarse["runs"][1]["kv"]["ratio"] > 1


def test_mean_kl_by_hand(tiny: Path) -> None:
    """Against one token at a time through the same cache, and a formula written out."""
    model, tokenizer = load_model(str(tiny), device="cpu", dtype="float32")
    prompt = tokenizer(SENTENCE * 3, return_tensors="pt")["input_ids"]
    tokens = tokenizer(SENTENCE)["input_ids"]
    config = KVQuantConfig.preset("k2v2", page_size=32, exact_pages=1)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        whole = torch.cat([prompt, torch.tensor([tokens])], 1)
        plain = model(whole).logits[0, prompt.shape[1] - 1 : -1]  # predicts `tokens`
        model.set_attn_implementation("tightkv")
        cache = TightCache(config, model=model)
        model(prompt, past_key_values=cache)
        total = 0.0
        for i, token in enumerate(tokens[:-1]):
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0]
            p, q = plain[i + 1].softmax(-1), logits.softmax(-1)
            total += float((p * (p / q).log()).sum())
    got = mean_kl(model, prompt, tokens, plain, TightCache(config, model=model))
    # Pages are sealed after 16 tokens rather than after each, which changes the sum a little.
    assert got == pytest.approx(total / (len(tokens) - 1), rel=0.1)
    assert mean_kl(model, prompt, tokens[:1], plain, TightCache(config, model=model)) is None
    exact = mean_kl(model, prompt, tokens, plain, DynamicCache(config=model.config))
    assert exact is not None and got is not None
    assert exact < 1e-5 * got  # rounding of chunks


@pytest.mark.parametrize(
    ("family", "compressed", "others"),
    [("gemma3", 2, 2), ("qwen3_5", 2, 2), ("lfm2", 2, 2), ("falcon_h1", 4, 0)],
)
def test_hybrid_models_can_be_compared(family: str, compressed: int, others: int) -> None:
    """Layers that stay as they are count in neither cache."""
    model, ids = models.tiny(family), models.prompt(count=80)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.set_attn_implementation("sdpa")
    plain_cache = DynamicCache(config=model.config)
    plain = generate(model, inputs, plain_cache, options, TokenClock(), keep_logits=True)
    model.set_attn_implementation("tightkv")
    tight_cache = TightCache("k8v8", model=model)
    generate(model, inputs, tight_cache, options, TokenClock())
    held, tight = cache_size(plain_cache.layers), cache_size(tight_cache.layers)
    assert (held.compressed_layers, tight.compressed_layers) == (0, compressed)
    assert held.counted_layers == tight.counted_layers == len(tight_cache.layers) - others
    assert held.tokens == tight.tokens == 80 + 19
    assert held.bf16_bytes == tight.bf16_bytes == held.bytes / 2  # the model is float32
    assert plain.logits is not None
    kl = mean_kl(model, ids, plain.tokens[0], plain.logits, TightCache("k8v8", model=model))
    assert kl is not None and kl < 1e-3


def test_layers_protected_at_16_bits_are_counted(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--protected-first", 1, "--protected-bits", 16, "--dtype", "bfloat16", *KNOWN)
    kv = run_json(capsys, tiny, "--prompt", SENTENCE, "--max-new-tokens", 2, *flags)["runs"][0][
        "kv"
    ]
    assert (kv["compressed_layers"], kv["exact_layers"]) == (1, 1)
    assert (kv["bytes_per_token"], kv["bf16_bytes_per_token"]) == (74 + 256, 512)
    assert kv["bf16_bytes"] == 512 * kv["tokens"]


def test_where_texts_part() -> None:
    tokenizer = byte_tokenizer()

    def divergence(first: str, second: str) -> Any:
        return find_divergence(
            tokenizer, *(tokenizer(text)["input_ids"] for text in (first, second))
        )

    there = divergence("the cat sat down there", "the cat ran away there")
    assert there == {
        "equal": False,
        "divergence_token": len("the cat "),
        "before": "the cat ",
        "uncompressed": "sat down",
        "compressed": "ran away",
    }
    assert list(divergence("the cat", "the").values()) == [False, 3, "the", " cat", ""]
    assert list(divergence("same", "same").values()) == [True, None, "", "", ""]


def test_compare_ends_with_the_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--prompt", SENTENCE * 6, "--max-new-tokens", "40", "--preset", "k2v2", *SMALL_PAGES)
    data = run_json(capsys, tiny, "--compare", *flags)
    assert main(["generate", str(tiny), "--compare", *flags, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    for run in (0, 1):
        assert answer(data, run) in captured.out  # both were streamed
    head, rule, plain, tight = captured.out.rstrip().splitlines()[-4:]
    assert head.split() == ["cache", "KV", "bytes", "vs", "bf16", "tokens/s", "KL"]
    assert set(rule) == {"-", " "}
    assert plain.startswith("uncompressed ") and tight.startswith("k2v2 ")
    assert f"{data['compare']['mean_kl']:.5f}" in tight
    assert "comparing the distributions" in captured.err


def test_the_divergence_is_shown() -> None:
    run = {
        "cache": "k2v2",
        "answers": [{"text": "a b c " * 40, "prompt_tokens": 9, "new_tokens": 9}],
        "timing": {"prefill_tokens_per_second": 1.0, "decode_tokens_per_second": 2.0},
        "kv": {
            **{"bytes": 10, "bf16_bytes": 20, "ratio": 2.0, "bytes_per_token": 1.0},
            **{"bf16_bytes_per_token": 4.0, "long_ratio": 4.0, "break_even_tokens": 3},
            **{"compressed_layers": 1, "exact_layers": 0, "other_layers": 0},
        },
    }
    compare = {
        **{"equal": False, "divergence_token": 7, "before": "it is", "uncompressed": " so"},
        **{"compressed": " not", "mean_kl": None, "scored_tokens": 0, "shared_tokens": 0},
    }
    data = {
        "runs": [run | {"cache": "uncompressed"}, run],
        "compare": compare,
        "needle": None,
        "model": {"dtype": "float32"},
    }
    lines = compare_text(data).splitlines()
    assert lines[1:4] == [
        "The texts diverge at token 7, after 'it is':",
        "  uncompressed: ' so'",
        "  k2v2:         ' not'",
    ]
    assert lines[-1].split() == ["k2v2", "10", "B", "2.00x", "2.0", "-"]


# --- a prompt that is read once ------------------------------------------------------------------
def test_a_shared_prompt_fills_a_cache_as_reading_does(tiny: Path) -> None:
    model, tokenizer = load_model(str(tiny), device="cpu", dtype="float32")
    ids = tokenizer(SENTENCE * 8, return_tensors="pt")["input_ids"]
    config = KVQuantConfig.preset("k3v3", page_size=32, exact_pages=1)
    read = TightCache(config, model=model)
    model.set_attn_implementation("sdpa")
    prompt = SharedPrompt(model, ids[:, :-5])
    model.set_attn_implementation("tightkv")
    given = prompt.compressed(config)
    with torch.no_grad():
        model(ids[:, :-5], past_key_values=read)
        one, two = (model(ids[:, -5:], past_key_values=cache).logits for cache in (read, given))
        exact = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, -5:]
    assert prompt.tokens == given.get_seq_length() - 5 == ids.shape[1] - 5
    assert given.bytes_used() == read.bytes_used()
    error, codes = (one - two).abs().max(), (one - exact).abs().max()
    assert error < 1e-3 * codes  # rounding of two attentions, against what codes change
    assert prompt.uncompressed().get_seq_length() == prompt.tokens


def test_only_caches_of_keys_and_values_alone_share_a_prompt() -> None:
    assert can_share(models.tiny("llama"))
    for family in ("gemma3", "qwen3_5", "falcon_h1"):
        assert not can_share(models.tiny(family)), family


def test_compare_says_what_was_read_once(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--compare", "--max-new-tokens", "3", "--prompt")
    assert run_json(capsys, tiny, *few, "x" * 300)["compare"]["shared_tokens"] == 300 - 1 - 64
    assert run_json(capsys, tiny, *few, "x" * 60)["compare"]["shared_tokens"] == 0
    assert main(["generate", str(tiny), *few, "x" * 300, "--device", "cpu"]) == 0
    told = capsys.readouterr()
    assert "The first 235 of 300 prompt tokens were read once" in told.out
    assert "reading 235 tokens of the prompt once for both caches" in told.err


# --- the needle ----------------------------------------------------------------------------------
def test_the_needle_is_in_the_middle_and_asked_for() -> None:
    text = "\n\n".join(f"Paragraph {i} of the text." for i in range(100))
    needle = choose_needle(text)
    assert needle == choose_needle(text) and needle.answer not in text
    hidden = hide(text, needle.fact)
    before, after = hidden.split(f"\n\n{needle.fact}\n\n")
    assert f"{before}\n\n{after}" == text and 0.5 <= len(before) / len(text) < 0.52
    assert hide("one line", "fact") == "one line\n\nfact"


def test_answers_to_the_needle(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is random, so its answers are judged by hand."""
    flags = ("--compare", "--needle", "--long-prompt", 300, "--max-new-tokens", 3)
    data = run_json(capsys, tiny, *flags)
    needle = data["needle"]
    answers = [run["answers"][0]["text"].strip() for run in data["runs"]]
    assert [a["text"] for a in needle["answers"]] == answers  # its question was the prompt
    assert len(answers) == 2 and not any(a["found"] for a in needle["answers"])
    asked = Needle("The number is 7.", "Which?", "7")
    assert [a["found"] for a in judged(asked, ["It is 7.", "17"])["answers"]] == [True, False]
    needle["answers"][0] = {"text": "7!", "found": True}
    text = compare_text(data)
    assert "  uncompressed: '7!' (found)" in text and " (not found)" in text


# --- while it answers ----------------------------------------------------------------------------
@pytest.mark.parametrize("text", [True, False])
def test_the_prompt_then_tokens_or_their_text(
    tiny: Path, capsys: pytest.CaptureFixture[str], text: bool
) -> None:
    model, tokenizer = load_model(str(tiny), device="cpu")
    streamer = TextStreamer(tokenizer, skip_prompt=True) if text else None
    cache = TightCache("k4v4", model=model)  # which may run the model once
    listener = live.LiveAnswer("k4v4: prompt", "k4v4: tokens", 6, streamer)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    done = generate(model, inputs, cache, options, listener)
    listener.close()
    told = capsys.readouterr()
    lines = [re.sub(r", \d+ s$", "", line) for line in told.err.splitlines() if "k4v4" in line]
    tokens = [] if text else ["tightkv: k4v4: tokens: 6 of 6"]
    assert lines == ["tightkv: k4v4: prompt", *tokens]
    assert told.out == (tokenizer.decode(done.tokens[0]) + "\n" if text else "")


# --- the long prompt ---------------------------------------------------------------------------
def test_a_long_prompt_is_as_long_as_asked(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # must not be read
    data = run_json(capsys, tiny, "--long-prompt", 300, "--max-new-tokens", 2)
    question = "\n\nGive a short summary of the text above."
    assert data["runs"][0]["answers"][0]["prompt_tokens"] == 300 + len(question)
    data = run_json(capsys, tiny, "--long-prompt", 300, "--prompt", "Why?", "--max-new-tokens", 2)
    assert data["runs"][0]["answers"][0]["prompt_tokens"] == 300 + len("\n\nWhy?")


def test_the_long_context_is_prose_about_code_blocks() -> None:
    tokenizer = byte_tokenizer()
    text = long_context(tokenizer, 3000)
    assert "code block" in text and len(tokenizer.encode(text)) == 3000
    with pytest.raises(ValueError, match="--long-prompt 9000000; the text has only"):
        long_context(tokenizer, 9_000_000)


# --- what is refused ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0; it must be at least 1"),
        (["--max-new-tokens", "-5"], "--max-new-tokens -5; it must be at least 1"),
        (["--temperature", "-0.5"], "--temperature -0.5; it must be at least 0"),
        (["--temperature", "nan"], "--temperature nan; it must be at least 0"),
        (["--temperature", "1", "--top-p", "0"], "--top-p 0.0; it must be above 0"),
        (["--temperature", "1", "--top-p", "1.5"], "--top-p 1.5; it must be above 0"),
        (["--temperature", "1", "--top-k", "0"], "--top-k 0; it must be at least 1"),
        (["--top-p", "0.9"], "give --temperature above 0 too"),
        (["--seed", "-1"], "--seed -1; it must be at least 0"),
        (["--long-prompt", "0"], "--long-prompt 0; it must be at least 1"),
        (["--compare", "--temperature", "1"], "--compare is greedy"),
        (["--needle", "--compare"], "give --compare and --long-prompt"),
        (["--needle", "--long-prompt", "9"], "give --compare and --long-prompt"),
        (["--needle", "--compare", "--long-prompt", "9", "--prompt", "a"], "leave the prompt out"),
        (["--compare", "--prompt", "another"], "--compare with 2 prompts; give one"),
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt-file", "absent"], "--prompt and --prompt-file both give the prompt"),
        (["--key-bits", "5"], "key_bits=5; supported: 2, 3, 4, 8, 16"),
        (["--device", "nowhere"], "device='nowhere'; supported: cpu, cuda, cuda:N, auto"),
        (["--attn", "nonsense"], "nonsense"),
        (["--attn", "flex_attention"], "cannot read a compressed cache; use tightkv"),
    ],
)
def test_bad_values_are_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in error_of(capsys, tiny, "--prompt", "x", *flags)


def test_prompts_that_cannot_be_read(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "absent.txt" in error_of(capsys, tiny, "--prompt-file", tmp_path / "absent.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in error_of(capsys, tiny, "--prompt-file", tmp_path / "bytes")
    monkeypatch.setattr(sys, "stdin", None)
    assert "no prompt; give --prompt TEXT" in error_of(capsys, tiny)


def test_a_prompt_too_long_for_the_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, tiny, "--prompt", "x" * 512, "--max-new-tokens", "1")
    assert "the prompt has 512 tokens; the model takes 512 with its answer" in message
    message = error_of(capsys, tiny, "--prompt", "x" * 500, "--max-new-tokens", "20")
    assert "makes 520; the model takes 512; give --max-new-tokens 12 or less" in message
    check_length(500, 12, 512)
    check_length(10**6, 10**6, None)


def test_missing_transformers_is_said(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert 'pip install ".[hf]"' in error_of(capsys, tiny, "--prompt", "x")


def test_padding_is_on_the_left_and_needs_no_pad_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    got = encode(tokenizer, ["ab", "abcd"], raw=False)
    assert got["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert got["input_ids"][0, 2:].tolist() == got["input_ids"][1, :2].tolist()


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    """In the middle of an answer: exit code 130 and no traceback."""
    folder = write_tiny_folder(tmp_path, max_position_embeddings=200_000, eos_token_id=None)
    words = ["generate", str(folder), "--prompt", "x", "--max-new-tokens", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tightkv", *words, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell's background jobs, and what they start, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        seen: list[bytes] = []
        while b"prompt of 1 tokens" not in (line := process.stderr.readline()):
            assert line, seen
            seen.append(line)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    # transformers imports torchao, which logs what it cannot load
    assert [line for line in seen if not line.startswith(b"tightkv: ")] == []


# --- JSON --------------------------------------------------------------------------------------
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "object": dict}


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf by its path; config counts as one, and an empty compare as itself."""
    if isinstance(value, dict) and path != "config":
        return [
            leaf for key, x in value.items() for leaf in flatten(x, f"{path}.{key}".lstrip("."))
        ]
    if isinstance(value, list):
        return [leaf for x in value for leaf in flatten(x, path + "[]")]
    return [(path, value)]


@pytest.mark.parametrize("kind", ["single", "compare", "needle"])
def test_json_is_as_documented(tiny: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| ([a-z ]+) \|", DOC.read_text(), re.MULTILINE)
    documented = {path: kinds.split(" or ") for path, kinds in rows}
    flags = {
        "single": ["--prompt", SENTENCE, "--prompt", "and another"],
        "compare": ["--compare", "--prompt", SENTENCE],
        "needle": ["--compare", "--needle", "--long-prompt", 300],
    }
    data = run_json(capsys, tiny, "--max-new-tokens", 4, *flags[kind])
    leaves = flatten(data)
    for path, value in leaves:
        kinds = documented[path]
        assert (value is None and "null" in kinds) or type(value) is TYPES[kinds[0]], (path, value)
    absent = {"single": ("compare.", "needle."), "compare": ("needle.",), "needle": ()}[kind]
    full = {"single": set(), "compare": {"compare"}, "needle": {"compare", "needle"}}[kind]
    wanted = {path for path in documented if not path.startswith(absent) and path not in full}
    assert {path for path, _ in leaves} == wanted
    assert data["schema"] == 1
    assert KVQuantConfig.from_dict(data["config"]) == KVQuantConfig()


# --- the bundled model -------------------------------------------------------------------------
@pytest.mark.slow
def test_the_bundled_model_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """What `make demo` shows, on a shorter context."""
    few = ("--max-new-tokens", 48)
    data = run_json(capsys, "--compare", "--needle", "--long-prompt", 320, *few)
    assert data["model"]["name"] == "bundled"
    plain, tight = data["runs"]
    assert data["compare"]["equal"]
    assert [answer["found"] for answer in data["needle"]["answers"]] == [True, True]
    assert 0 < data["compare"]["mean_kl"] < 0.05
    layout = PageLayout(KVQuantConfig(), 3, 64)
    assert tight["kv"]["long_ratio"] == pytest.approx(layout.ratio)
    assert plain["kv"]["bf16_bytes_per_token"] == 30 * 4 * 3 * 64


def test_the_tiny_model_is_a_real_one(tiny: Path) -> None:
    assert isinstance(load_model(str(tiny), device="cpu")[0], LlamaForCausalLM)
