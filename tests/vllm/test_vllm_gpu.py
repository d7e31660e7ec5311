"""The real vLLM engine on a GPU: CUDA graphs, our CUDA kernels, models with other layers too.

Every engine runs once, in a process of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from drafts import write_eagle_head
from models import MAMBA, SHAPE
from tiny_folder import lfm2_for_vllm, write_model, write_tiny_folder, write_uneven_copy
from vllm_outputs import (
    VOCABULARY,
    assert_same_text,
    batches,
    mean_kl,
    outputs,
    random_tokens,
    run_engines_apart,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

K4V4 = {"preset": "k4v4"}
SHORT = {"preset": "k8v8", "page_size": 32, "exact_pages": 1}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
CROWDED = {"kv_cache_memory_bytes": 3 << 19, "max_num_seqs": 16}
FLOAT32 = {"dtype": "float32"}  # the Triton kernels
TIE = 0.07  # nats: logits of 8 to 16 in bfloat16 are 0.06 apart
PRESETS = ("k8v8", "k4v4", "k3v3", "k2v2")
HYBRIDS = {  # what vLLM's own layers are there
    "convolutions": "ShortConv",
    "mamba": "MambaMixer2",
    "windows": "FlashAttentionImpl",
}


def prompts() -> dict[str, list[list[int]]]:
    choose = random.Random(0)
    return {
        "few": [random_tokens(choose, count) for count in (5, 70, 300, 700, 1500, 64)],
        "long": [random_tokens(choose, 800) for _ in range(4)],
        "many": [random_tokens(choose, choose.randint(3, 500)) for _ in range(32)],
        "repeating": [(random_tokens(choose, 12) * 80)[:count] for count in (100, 450, 900)],
        "drafts": [random_tokens(choose, choose.randint(3, 500)) for _ in range(96)],
    }


PROMPTS = prompts()


def job(
    options: dict[str, Any] | None, *prompts: list[list[int]], sampling: Any = None, **engine: Any
) -> dict[str, Any]:
    defaults = {
        "model": "tiny",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "compilation_config": GRAPHS,
        "additional_config": {"tightkv": options or False},
    }
    sampling = {"max_tokens": 60, "ignore_eos": True, **(sampling or {})}
    return {"engine": {**defaults, **engine}, "batches": prompts, "sampling": sampling}


def jobs() -> dict[str, dict[str, Any]]:
    few, many, long = PROMPTS["few"], PROMPTS["many"], PROMPTS["long"]
    every = {"logprobs": VOCABULARY, "prompt_logprobs": VOCABULARY, "max_tokens": 24}
    whole = {"logprobs": VOCABULARY}
    chunks = {"sampling": every, "max_num_batched_tokens": 192}  # most is read from pages
    eager = {"enforce_eager": True, "compilation_config": {}}
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    eagle = {"method": "eagle", "model": "head", "num_speculative_tokens": 3}
    listed = {
        "eager": job(K4V4, few, few, enable_prefix_caching=True, **eager),
        "graphs": job(K4V4, few, few, enable_prefix_caching=True),
        "plain": job(None, long, **chunks),
        **{name: job({"preset": name}, long, **chunks) for name in PRESETS},
        "layers": job({"preset": "k3v3", "layer_bits": "0=k8v4"}, long, **chunks),
        "alone": job(K4V4, *([prompt] for prompt in many), sampling=whole),
        "crowd": job(K4V4, many, sampling=whole, **CROWDED),
        "alone float32": job(K4V4, *([prompt] for prompt in many), sampling=whole, **FLOAT32),
        "crowd float32": job(K4V4, many, sampling=whole, **CROWDED, **FLOAT32),
        "repeating": job(K4V4, PROMPTS["repeating"]),
        "speculative": job(K4V4, PROMPTS["repeating"], speculative_config=ngram),
        "scaled": job(K4V4, long, model="uneven", **chunks),
        "unscaled": job({**K4V4, "feedback": "off"}, long, model="uneven", **chunks),
        "drafted": job(SHORT, few),
        "eagle": job(SHORT, few, PROMPTS["drafts"], speculative_config=eagle),
        "plain eagle": job(None, few, PROMPTS["drafts"], speculative_config=eagle),
    }
    generated = {"logprobs": VOCABULARY, "max_tokens": 24}
    for model in HYBRIDS:
        shared: dict[str, Any] = {"model": model, "sampling": generated}
        listed[f"plain {model}"] = job(None, long, **shared)
        for name in ("k8v8", "k4v4"):
            prefixes = {"enable_prefix_caching": True, **shared}
            listed[f"{name} {model}"] = job({"preset": name}, long, long, **prefixes)
    for name in ("k8v8", "k4v4"):
        options = {**SHORT, "preset": name, "sliding_windows": 1}
        shared = {"model": "windows", "sampling": generated, "enable_prefix_caching": True}
        listed[f"{name} sliding"] = job(options, long, long, **shared)
    return listed


def write_models(folder: Path) -> dict[str, Path]:
    """A llama, one with uneven keys, with convolutions, with Mamba, with sliding windows."""
    shape = {**SHAPE, "max_position_embeddings": 4096, "head_dim": 128, "vocab_size": VOCABULARY}
    windows = {"sliding_window": 160, "layer_types": ["sliding_attention", "full_attention"] * 2}
    configs = {
        "convolutions": lfm2_for_vllm(**{**shape, "hidden_size": 256}),
        "mamba": hf.FalconH1Config(**shape, **MAMBA),
        "windows": hf.Gemma3TextConfig(**shape, **windows),
    }
    size = {"max_position_embeddings": 4096, "head_dim": 128, "hidden_size": 128}
    tiny = write_tiny_folder(folder / "tiny", **size)
    return {
        "tiny": tiny,
        "uneven": write_uneven_copy(tiny, folder / "uneven"),
        "head": write_eagle_head(folder / "tiny", folder / "head"),
        **{name: write_model(folder / name, config) for name, config in configs.items()},
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of every job."""
    folder = tmp_path_factory.mktemp("vllm_gpu")
    return run_engines_apart(jobs(), write_models(folder), folder, at_once=12)


def test_graphs_give_the_text_of_eager_steps(engines: dict[str, Any]) -> None:
    assert set(engines["graphs"]["layers"].values()) == {"TightAttention"}
    assert_same_text(engines["eager"], engines["graphs"], TIE)


@pytest.mark.parametrize(
    ("name", "budget"), [("k8v8", 5e-4), ("k4v4", 0.02), ("k3v3", 0.08), ("k2v2", 0.3)]
)
def test_compression_stays_within_a_kl_budget(
    engines: dict[str, Any], name: str, budget: float, record_property: Callable[..., None]
) -> None:
    kl = mean_kl(engines["plain"], engines[name], "prompt")
    record_property("kl", kl)
    assert budget / 100 < kl < budget


def test_layers_of_more_bits_have_larger_pages(engines: dict[str, Any]) -> None:
    """One of the two layers: pages of two sizes in one engine, under CUDA graphs."""
    mixed, uniform = (mean_kl(engines["plain"], engines[x], "prompt") for x in ("layers", "k3v3"))
    assert mixed < 0.8 * uniform


def test_uneven_keys_are_scaled(
    engines: dict[str, Any], record_property: Callable[..., None]
) -> None:
    """The plain model is the same; without scales its few large channels spoil all others."""
    scaled, off = (mean_kl(engines["plain"], engines[x], "prompt") for x in ("scaled", "unscaled"))
    record_property("kl", (scaled, off))
    assert 2e-4 < scaled < min(0.02, 0.5 * off)


@pytest.mark.parametrize(("dtype", "share"), [("", 0.3), (" float32", 0.75)])
def test_a_crowd_that_preempts_gives_the_text_of_each_alone(
    engines: dict[str, Any], dtype: str, share: float, record_property: Callable[..., None]
) -> None:
    alone, crowd = engines[f"alone{dtype}"], engines[f"crowd{dtype}"]
    assert crowd["metrics"]["vllm:num_preemptions"] > 0
    # In a crowd prompts are cut elsewhere, and requests that resume are prefilled again: some
    # tokens read codes of what they read exactly when alone. And in bfloat16 products of other
    # shapes round otherwise, which decides ties and moves codes (docs/log.md).
    kl = mean_kl(alone, crowd, "best")
    record_property("kl", kl)
    assert kl < 5e-4  # 1.2e-4 on an H200
    assert_same_text(alone, crowd, tie=0.15, share=share)


def test_ngram_speculation_equals_none(engines: dict[str, Any]) -> None:
    told = engines["speculative"]
    assert told["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 10
    # several queries take other kernels: logits of 16 to 32 may differ by a step of bfloat16
    assert_same_text(engines["repeating"], told, tie=0.13)


def test_eagle_speculation_equals_none(engines: dict[str, Any]) -> None:
    """Rejected drafts cross pages."""
    told = engines["eagle"]
    assert list(told["layers"].values()) == ["TightAttention"] * 3
    assert_same_text(engines["drafted"], batches(told)[0], tie=0.13, share=0.5)


def test_eagle_drafts_are_as_good_as_with_16_bits(
    engines: dict[str, Any], record_property: Callable[..., None]
) -> None:
    """Texts differ, so rates do by chance: 5,000 drafts have a standard deviation of 6%."""
    counts = [f"vllm:spec_decode_num_{kind}" for kind in ("accepted_tokens", "drafts")]
    told = [engines[name]["metrics"] for name in ("eagle", "plain eagle")]
    record_property("metrics", told)
    ours, own = (metrics[counts[0]] / metrics[counts[1]] for metrics in told)
    assert min(metrics[counts[1]] for metrics in told) > 3000
    assert own > 0.1 and ours > 0.8 * own, told


@pytest.mark.parametrize("model", HYBRIDS)
def test_models_with_other_layers(engines: dict[str, Any], model: str) -> None:
    plain, k8v8, k4v4 = (engines[f"{name} {model}"] for name in ("plain", "k8v8", "k4v4"))
    assert set(k4v4["layers"].values()) == {"TightAttention", HYBRIDS[model]}
    first, again = batches(k8v8)
    assert all(text["cached"] >= 384 for text in outputs(again))
    # After a hit other blocks are exact; which of two tied tokens wins may change.
    assert_same_text(first, again, TIE, share=0.25)
    assert mean_kl(first, again, "best") < 1e-3
    assert mean_kl(plain, first, "best") < 1e-3
    assert mean_kl(plain, batches(k4v4)[0], "best") < 2e-3  # of attention to a neighbour: 1e-2


def test_compressed_windows(engines: dict[str, Any]) -> None:
    plain, k8v8, k4v4 = (engines[x] for x in ("plain windows", "k8v8 sliding", "k4v4 sliding"))
    assert set(k4v4["layers"].values()) == {"TightAttention"}
    first, again = batches(k8v8)
    assert all(text["cached"] >= 384 for text in outputs(again))
    assert mean_kl(first, again, "best") < 1e-3
    assert mean_kl(plain, first, "best") < 1e-3
    assert mean_kl(plain, batches(k4v4)[0], "best") < 5e-3


def test_finished_requests_leave_every_block_free(engines: dict[str, Any]) -> None:
    for name, told in engines.items():
        assert "error" not in told, name
        assert told["free_blocks"] == told["blocks"] - 1  # block 0 is nobody's
