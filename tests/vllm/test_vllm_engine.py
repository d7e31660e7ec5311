"""The real vLLM engine with our pages in its cache: same text, fewer bytes, nothing stale.

Each engine runs once, when a test first asks for it, as a fork of one process (vllm_engine.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

import vllm_families
from drafts import write_eagle_head
from models import MAMBA, SHAPE
from tightkv import KVQuantConfig
from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import PageLayout
from tiny_folder import (
    lfm2_for_vllm,
    plant_key_bias,
    write_model,
    write_tiny_folder,
    write_uneven,
)
from vllm_outputs import (
    TIE,
    VOCABULARY,
    Engines,
    assert_same_text,
    batches,
    mean_kl,
    outputs,
    random_tokens,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
HEADS, HEAD_DIM, LAYERS = 2, 32, 2
BUDGET = 4 << 20
# A short exact window, so that most tokens are read from the blocks.
SHORT = {"page_size": 32, "exact_pages": 1}
RAW = {"key_bits": 16, "value_bits": 16, **SHORT}
K8V8 = {"preset": "k8v8", **SHORT}
K4V4 = {"preset": "k4v4", **SHORT}
WINDOW = 48  # tokens, of the model with sliding windows
STAGED = 4  # prompts of engines with two stages
EXACT = {**K4V4, "window_bits": 16}
PROTECTED = {**K4V4, "protected_first": 1}
LATENT = KVQuantConfig.from_dict(K4V4)
LAST = {**K4V4, "protected_last": 1}
NEW_ATTENTION = ("gpt_oss", "gemma3n")  # sink logits; layers that read another one's cache
# Families whose engines run by default: most run for other tests, too.
SHOWN = ("default", "noisy", "k4v4 windows", "k4v4 states", "prefixes", "latent", *NEW_ATTENTION)
SHOWN += ("gemma4", "qwen3_next", "bloom")  # Bloom is refused


def changing(choose: random.Random, count: int) -> list[int]:
    """A text that repeats itself with changes: n-grams propose drafts, and many are rejected."""
    phrase = random_tokens(choose, 12)
    text: list[int] = []
    while len(text) < count:
        text += phrase[: choose.randint(3, 9)] + random_tokens(choose, 3)
    return text[:count]


def prompts() -> dict[str, list[list[int]]]:
    choose = random.Random(0)

    def tokens(count: int) -> list[int]:
        return random_tokens(choose, count)

    shared = tokens(150)
    return {
        "mixed": [tokens(choose.randint(3, 250)) for _ in range(32)],
        "few": [tokens(count) for count in (1, 32, 33, 64, 130, 200, 300)],
        "long": [tokens(400) for _ in range(2)],
        "shared": [shared + tokens(20) for _ in range(4)],
        "longest": [random_tokens(random.Random(1), 601)],
        "changing": [changing(random.Random(5 + count), count) for count in (60, 90, 130)],
        "drafted": [random_tokens(random.Random(3 + count), count) for count in (20, 70, 130)],
    }


PROMPTS = prompts()


def job(
    options: dict[str, Any] | None, *batches: list[list[int]], sampling: Any = None, **engine: Any
) -> dict[str, Any]:
    shared = {"model": "tiny", "kv_cache_memory_bytes": BUDGET, "enable_prefix_caching": False}
    engine = {**shared, **engine}
    if options is not None:
        engine["additional_config"] = {"tightkv": options}
    sampling = {"max_tokens": 24, "ignore_eos": True, **(sampling or {})}
    return {"engine": engine, "batches": batches, "sampling": sampling}


def jobs() -> dict[str, dict[str, Any]]:
    few, mixed, shared = PROMPTS["few"], PROMPTS["mixed"][:10], PROMPTS["shared"]
    generated = {"logprobs": VOCABULARY}
    every = {**generated, "prompt_logprobs": VOCABULARY}
    some, longest = mixed[:4], PROMPTS["longest"]
    changing, drafted = PROMPTS["changing"], PROMPTS["drafted"]
    longer = {"sampling": {"max_tokens": 56}}
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    ngram |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    eagle = {"method": "eagle", "model": "head", "num_speculative_tokens": 3}
    latents = {"model": "latent", "attention_backend": "CPU_MLA"}  # AMX has a cache of its own
    return {
        "soak": {"soak": {"minutes": 0.02, "preset": "k8v8", "requests": 10}},
        "plain": job(None, few),
        "raw": job(RAW, few),
        "default": job({"preset": "k4v4"}),
        "k2v2": job({"preset": "k2v2"}, few),
        "protected": job(PROTECTED, few),
        "layer bits": job({**K4V4, "layer_bits": "1=k8v2"}, few),
        "layer 9": job({**K4V4, "layer_bits": "9=k8v4"}),
        "noisy": job(K4V4, few, model="noisy"),
        "noisy, off": job({**K4V4, "protect_keys": False}, model="noisy"),
        "noisy, given": job({**K4V4, "layer_bits": "1=k4v2"}, model="noisy"),
        "noisy, random": job(K4V4, model="noisy", load_format="dummy"),
        "noisy, two ranks": job(K4V4, few, model="noisy", tensor_parallel_size=2),
        "noisy, two stages": job(K4V4, few[:STAGED], model="noisy", pipeline_parallel_size=2),
        "protected, two stages": job(PROTECTED, few[:STAGED], pipeline_parallel_size=2),
        "noisy windows": job(K4V4, model="noisy windows"),
        "sliding layer": job({**K4V4, "layer_bits": "0=k8v4"}, model="windows"),
        "other blocks": job({**K4V4, "layer_bits": "1=k8v4"}, model="windows"),
        "no rings": job({**RAW, "exact_rows": 0}, few),
        "plain kl": job(None, PROMPTS["long"], sampling=every),
        "k8v8 kl": job(K8V8, PROMPTS["long"], sampling=every, max_num_batched_tokens=48),
        "k4v4 kl": job(EXACT, PROMPTS["long"], sampling=every, max_num_batched_tokens=48),
        "off kl": job(
            {**EXACT, "feedback": "off"},
            PROMPTS["long"],
            sampling=every,
            max_num_batched_tokens=48,
        ),
        "uneven kl": job(
            EXACT, PROMPTS["long"], sampling=every, max_num_batched_tokens=48, model="uneven"
        ),
        "raw alone": job(RAW, *([prompt] for prompt in mixed)),
        "raw crowd": job(RAW, mixed, kv_cache_memory_bytes=700 << 10, max_num_seqs=16),
        "raw shared": job(RAW, shared, shared, enable_prefix_caching=True),
        "k8v8 shared": job(K8V8, shared, shared, enable_prefix_caching=True),
        "raw chunks": job(RAW, some, max_num_batched_tokens=40),
        "drafted": job(LAST, drafted, **longer),
        "eagle": job(LAST, drafted, **longer, speculative_config=eagle),
        "fp8": job(K4V4, kv_cache_dtype="fp8"),
        "block size": job(K4V4, block_size=128),
        "unknown": job({"key_bit": 4}),
        "plain windows": job(None, few, shared, sampling=generated, model="windows"),
        "k4v4 windows": job(
            *({"preset": "k4v4", "sliding_windows": True}, few, longest, longest),
            **{"model": "windows", "max_model_len": 640, "enable_prefix_caching": True},
        ),
        "raw sliding": job(
            *({**RAW, "sliding_windows": WINDOW}, few, shared[:1], shared[1:]),
            **{"model": "windows", "enable_prefix_caching": True, "max_num_batched_tokens": 64},
            **{"kv_cache_memory_bytes": 400 << 10, "speculative_config": ngram},
            sampling=generated,
        ),
        "k4v4 sliding": job(
            {**K4V4, "sliding_windows": WINDOW}, few, sampling=generated, model="windows"
        ),
        "plain states": job(None, few, changing, model="mamba"),
        "states, ngram": {
            **job(RAW, changing, model="mamba", speculative_config=ngram),
            "drafts_convolve": True,
        },
        "k4v4 states": job({"preset": "k4v4"}, few, model="mamba"),
        "prefixes": job(
            {**K4V4, "exact_pages": 2, "layer_bits": "1=k8v8"},
            *(few, few),
            **{"model": "convolutions", "enable_prefix_caching": True},
        ),
        "raw states": {
            **job(
                {**RAW, "exact_pages": 2},
                *(few, few),
                **{"model": "mamba", "enable_prefix_caching": True, "max_num_seqs": 1},
            ),
            "no_checkpoints": True,
        },
        "plain latent": job(None, few, sampling=every, **latents),
        "latent": job(K4V4, few, sampling=every, **latents),
        **{
            name: job(K4V4, model=name, kv_cache_memory_bytes=16 << 20)
            for name in vllm_families.CONFIGS
        },
        **{f"plain {name}": job(None, few, model=name) for name in NEW_ATTENTION},
        **{name: job(RAW, few, model=name) for name in NEW_ATTENTION},
        "match unit": job(K4V4, enable_prefix_caching=True, prefix_match_unit=16),
        "one rank": job(K4V4, few, model="three heads"),
        "three ranks": job(K4V4, few, model="three heads", tensor_parallel_size=3),
    }


def write_models(folder: Path) -> dict[str, Path]:
    """A llama, one whose heads three ranks can share, and models with layers that are not ours."""
    size = {"max_position_embeddings": 1024}
    three = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    shape = {**SHAPE, **size, "head_dim": 32, "vocab_size": VOCABULARY}
    latent = {"kv_lora_rank": 512, "q_lora_rank": None, "v_head_dim": 32, "num_hidden_layers": 2}
    biased = {**shape, "attention_bias": True, "sliding_window": 16}
    noisy = {
        "noisy": hf.Qwen2Config(**{**shape, "hidden_size": 128, "num_hidden_layers": 2}),
        "noisy windows": hf.Gemma2Config(**biased),
    }
    for name, config in noisy.items():  # Gemma scales scores by less
        bias = 20.0 if name == "noisy windows" else 10.0
        plant_key_bias(write_model(folder / name, config), layer=1, size=bias)
    wide = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "first_k_dense_replace": 2}
    return {
        **vllm_families.write_families(folder),
        **{name: folder / name for name in noisy},
        "tiny": write_tiny_folder(folder / "tiny", **size),
        "head": write_eagle_head(folder / "tiny", folder / "head"),
        "uneven": write_uneven(folder / "uneven", folder / "tiny", HEAD_DIM),
        "three heads": write_tiny_folder(folder / "three", **size, **three, vocab_size=384),
        "windows": write_model(folder / "windows", hf.Gemma2Config(**shape, sliding_window=WINDOW)),
        "mamba": write_model(folder / "mamba", hf.FalconH1Config(**shape, **MAMBA)),
        "convolutions": write_model(
            folder / "convolutions", lfm2_for_vllm(**{**shape, "hidden_size": 64})
        ),
        "latent": write_model(
            folder / "latent", hf.DeepseekV2Config(**{**shape, **latent}, **wide)
        ),
    }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Engines:
    """With --all-shapes, ranks import vLLM themselves as a user's do."""
    folder, listed = tmp_path_factory.mktemp("vllm_engine"), jobs()
    for each in listed.values():
        each["fork_ranks"] = not pytestconfig.getoption("--all-shapes")
    return Engines(listed, write_models(folder), folder)


def test_without_options_the_layers_are_vllms_own(engines: dict[str, Any]) -> None:
    assert set(engines["plain"]["layers"].values()) == {"CPUAttentionBackendImpl"}
    assert set(engines["raw"]["layers"].values()) == {"TightAttention"}


def test_sixteen_bits_give_the_text_of_vllms_own_attention(engines: dict[str, Any]) -> None:
    assert_same_text(engines["plain"], engines["raw"])


@pytest.mark.parametrize(
    "name", ["raw", "default", pytest.param("k2v2", marks=pytest.mark.thorough)]
)
def test_capacity_is_what_the_layout_says(engines: dict[str, Any], name: str) -> None:
    cfg = KVQuantConfig.from_dict(
        {"raw": RAW, "default": {"preset": "k4v4"}, "k2v2": {"preset": "k2v2"}}[name]
    )
    layout = PageLayout(cfg, HEADS, HEAD_DIM)
    told = engines[name]
    assert told["block_size"] == cfg.page_size
    assert told["blocks"] == BUDGET // (LAYERS * layout.page_bytes)


def test_protected_layers_share_a_block_table_with_the_others(engines: dict[str, Any]) -> None:
    cfg = KVQuantConfig.from_dict(PROTECTED)
    pages = [PageLayout(cfg.for_layer(i, 2), HEADS, HEAD_DIM).page_bytes for i in range(2)]
    assert pages[0] > pages[1]
    assert engines["protected"]["blocks"] == BUDGET // sum(pages)
    assert outputs(engines["protected"])[0]["tokens"] == outputs(engines["plain"])[0]["tokens"]


def page_sizes(*layer_configs: KVQuantConfig) -> int:
    return sum(PageLayout(cfg, HEADS, HEAD_DIM).page_bytes for cfg in layer_configs)


def test_layer_bits_are_by_the_number_in_the_model(engines: dict[str, Any]) -> None:
    told = engines["layer bits"]
    assert list(told["bits"].values()) == ["k4v4", "k8v2"]
    cfg = KVQuantConfig.from_dict(K4V4)
    assert told["blocks"] == BUDGET // page_sizes(cfg, cfg.replace(key_bits=8, value_bits=2))


def test_a_noisy_layer_gets_8_bit_keys(engines: dict[str, Any]) -> None:
    assert list(engines["noisy"]["bits"].values()) == ["k4v4", "k8v4"]
    cfg = KVQuantConfig.from_dict(K4V4)
    raised = cfg.replace(key_bits=8)
    assert engines["noisy"]["blocks"] == BUDGET // page_sizes(cfg, raised)
    log = engines["noisy"]["log"]
    line = "tightkv k4v4: 8-bit keys in layer 1: by its weights, codes of fewer bits"
    assert log.count(line) == 1
    assert "tightkv k4v4+: " in log  # what is gained


@pytest.mark.parametrize(("name", "bits"), [("noisy, off", "k4v4"), ("noisy, given", "k4v2")])
@pytest.mark.thorough
def test_what_a_user_says_of_a_noisy_layer_stays(
    engines: dict[str, Any], name: str, bits: str
) -> None:
    assert list(engines[name]["bits"].values()) == ["k4v4", bits]


@pytest.mark.thorough
def test_random_weights_are_not_checked(engines: dict[str, Any]) -> None:
    assert list(engines["noisy, random"]["bits"].values()) == ["k4v4", "k4v4"]
    line = "more bits: its weights are random (load_format dummy)"
    assert engines["noisy, random"]["log"].count(line) == 1


def first(told: dict[str, Any], prompts: int) -> dict[str, Any]:
    return {"outputs": [outputs(told)[:prompts]]}


def test_ranks_and_stages_agree_on_a_noisy_layer(engines: dict[str, Any]) -> None:
    assert_same_text(engines["noisy"], engines["noisy, two ranks"])
    cfg = KVQuantConfig.from_dict(K4V4)
    raised = cfg.replace(key_bits=8)
    rank = sum(PageLayout(layer, HEADS // 2, HEAD_DIM).page_bytes for layer in (cfg, raised))
    assert engines["noisy, two ranks"]["blocks"] == BUDGET // rank
    # The stage with layer 1 has room for fewer blocks.
    assert engines["noisy, two stages"]["blocks"] == BUDGET // page_sizes(raised)
    assert_same_text(first(engines["noisy"], STAGED), engines["noisy, two stages"])


@pytest.mark.thorough
def test_protected_layers_are_counted_over_all_stages(engines: dict[str, Any]) -> None:
    """The first layer of the second stage is not the model's first."""
    one, two = engines["protected"], engines["protected, two stages"]
    assert one["tightkv"]["compression_ratio"] == two["tightkv"]["compression_ratio"]
    assert_same_text(first(one, STAGED), two)


@pytest.mark.thorough
def test_a_noisy_layer_among_layers_of_other_kinds_keeps_its_bits(engines: dict[str, Any]) -> None:
    assert set(engines["noisy windows"]["bits"].values()) == {"k4v4"}
    line = "by its weights, this model needs 8-bit keys in layer 1, but vLLM's blocks are of one"
    assert engines["noisy windows"]["log"].count(line) == 1


def test_the_start_up_line_says_what_is_gained(engines: dict[str, Any]) -> None:
    layout = PageLayout(KVQuantConfig.preset("k4v4"), HEADS, HEAD_DIM)
    line = f"tightkv k4v4: {2 * layout.bytes_per_token:,.0f} bytes per token in 2 layers, "
    assert line + f"{layout.ratio:.2f} times the tokens" in engines["default"]["log"]


def test_layers_without_fast_kernels_are_told_at_start(engines: dict[str, Any]) -> None:
    log = engines["raw"]["log"]
    assert "tightkv, all 2 layers: the compressed cache runs on the reference kernels" in log
    assert "cpu: key_bits=16" in log and "CUDA graphs, " not in log


@pytest.mark.parametrize("part", ["prompt", "best"])
@pytest.mark.parametrize(
    ("name", "budget"), [pytest.param("k8v8", 1e-4, marks=pytest.mark.thorough), ("k4v4", 1e-2)]
)
def test_compression_stays_within_a_kl_budget(
    engines: dict[str, Any], name: str, budget: float, part: str
) -> None:
    kl = mean_kl(engines["plain kl"], engines[f"{name} kl"], part)
    assert budget / 1000 < kl < budget


@pytest.mark.thorough
def test_keys_are_coded_with_feedback_unless_it_is_off(engines: dict[str, Any]) -> None:
    """Queries of random weights have no directions that feedback could gain much by."""
    on, off = engines["k4v4 kl"], engines["off kl"]
    assert list(on["feedback"].values()) == [[HEADS, HEAD_DIM, HEAD_DIM]] * LAYERS
    assert list(off["feedback"].values()) == [None] * LAYERS
    assert "tightkv k4v4: 2 of 2 layers code keys with error feedback" in on["log"]
    fed, alone = (mean_kl(engines["plain kl"], result, "prompt") for result in (on, off))
    assert fed != alone and fed < 1.1 * alone


def test_large_channels_of_keys_are_scaled(engines: dict[str, Any]) -> None:
    """The model is the same one; without scales its KL is 10 times as large."""
    even, uneven = (
        mean_kl(engines["plain kl"], engines[x], "prompt") for x in ("k4v4 kl", "uneven kl")
    )
    assert uneven < 3 * even


def test_a_crowd_that_preempts_gives_the_text_of_each_alone(engines: dict[str, Any]) -> None:
    assert engines["raw crowd"]["metrics"]["vllm:num_preemptions"] > 0
    assert engines["raw alone"]["metrics"]["vllm:num_preemptions"] == 0
    assert_same_text(engines["raw alone"], engines["raw crowd"])


def test_a_soak_gives_the_answers_of_each_alone_and_leaves_nothing_behind(
    engines: dict[str, Any],
) -> None:
    """Compressed, with aborts, preemptions, cached prefixes and a killed worker."""
    row = engines["soak"]
    assert row["problems"] == [] and row["killed_workers"] == row["engines"] == 1
    assert row["preemptions"] > 0 and row["aborted"] > 0 and row["prefix_hits"] > 0
    assert row["equal"] + row["tied"] == row["finished"] + row["aborted"] >= 40


@pytest.mark.parametrize(
    ("name", "tie"), [("raw", TIE), pytest.param("k8v8", 0.05, marks=pytest.mark.thorough)]
)
def test_prefix_hits_give_the_same_text(engines: dict[str, Any], name: str, tie: float) -> None:
    told = engines[f"{name} shared"]
    assert told["metrics"]["vllm:prefix_cache_hits"] > 4 * 150
    assert_same_text(*batches(told), tie=tie, share=0.75)


@pytest.mark.thorough
def test_chunked_prefill_equals_unchunked(engines: dict[str, Any]) -> None:
    alone = {"outputs": engines["raw alone"]["outputs"][:4]}
    assert_same_text(alone, engines["raw chunks"])


def test_eagle_speculation_equals_none(engines: dict[str, Any]) -> None:
    """Drafts cross pages of 32 tokens and are rejected there; the draft's layer is compressed."""
    told = engines["eagle"]
    assert list(told["bits"].values()) == ["k4v4", "k8v8", "k4v4"]  # of the model the last
    assert told["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 15
    assert_same_text(engines["drafted"], told)
    assert "in 3 layers (1 of them a draft model's), " in told["log"]


@pytest.mark.thorough
def test_speculation_with_states_equals_none(engines: dict[str, Any]) -> None:
    told = engines["states, ngram"]
    drafts, accepted = (
        told["metrics"][f"vllm:spec_decode_num_{kind}"] for kind in ("drafts", "accepted_tokens")
    )
    assert 10 < accepted < 2.5 * drafts  # of 3 each: some were rejected
    assert_same_text(batches(engines["plain states"])[1], told)


def test_the_blocks_are_right_without_any_ring(engines: dict[str, Any]) -> None:
    assert_same_text(engines["plain"], engines["no rings"])
    told = (engines[name]["log"] for name in ("raw", "no rings"))
    assert ["exact rings for 0 sequences" in log for log in told] == [False, True]


def test_sliding_window_layers_stay_vllms_own(engines: dict[str, Any]) -> None:
    told = engines["k4v4 windows"]
    kinds = list(told["layers"].values())
    assert sorted(set(kinds)) == ["CPUAttentionBackendImpl", "TightAttention"]
    assert kinds.count("TightAttention") == 2
    assert told["blocks"] > engines["plain windows"]["blocks"]
    assert_same_text(*(batches(engines[f"{x} windows"])[0] for x in ("plain", "k4v4")), tie=0.05)
    line = "2 layers stay with vLLM's own cache: sliding window of 48 tokens, smaller than with"
    assert line in told["log"]  # the default ring has 224


def test_compressed_windows_give_the_text_of_vllms_own(engines: dict[str, Any]) -> None:
    """In chunks, with preemptions, with drafts that are rejected, and after prefix hits."""
    told, plain = engines["raw sliding"], batches(engines["plain windows"])
    assert set(told["layers"].values()) == {"TightAttention"}
    assert told["groups"] == [["FullAttentionSpec", 32], ["SlidingWindowSpec", 32]]
    count = told["metrics"]
    assert count["vllm:num_preemptions"] > 0
    drafts, accepted = (
        count[f"vllm:spec_decode_num_{kind}"] for kind in ("drafts", "accepted_tokens")
    )
    assert 10 < accepted < 2.5 * drafts  # of 3 each
    several, fresh, hits = told["outputs"]
    assert [text["cached"] for text in hits].count(128) >= 2  # few blocks are left for prefixes
    for expected, found in ((plain[0], [several]), (plain[1], [fresh, hits])):
        assert_same_text(expected, {"outputs": found})
        assert abs(mean_kl(expected, {"outputs": found}, "best")) < 1e-6


def test_compressed_windows_take_the_bytes_of_their_pages(engines: dict[str, Any]) -> None:
    told, layout = engines["k4v4 sliding"], PageLayout(KVQuantConfig.from_dict(K4V4), 2, 32)
    # A block has a page of two layers: of full attention, or with windows.
    assert told["blocks"] == BUDGET // (2 * layout.page_bytes)
    assert told["tightkv"]["kv_cache_bytes"] == told["blocks"] * 2 * layout.page_bytes
    line = f"{2 * layout.bytes_per_token:,.0f} bytes per token in 2 layers, {layout.ratio:.2f} "
    assert line in told["log"]
    assert "; 2 sliding windows take at most " in told["log"]


def test_compressed_windows_stay_within_a_kl_budget(engines: dict[str, Any]) -> None:
    plain = batches(engines["plain windows"])[0]
    assert 1e-5 < mean_kl(plain, engines["k4v4 sliding"], "best") < 1e-2


def test_prefixes_of_windows_end_before_the_exact_tokens(engines: dict[str, Any]) -> None:
    """vLLM keeps the end of a window where prompts end; it must where cached prefixes end."""
    told = engines["k4v4 windows"]
    block = dict(told["groups"])["FullAttentionSpec"]  # 256 tokens; in 0.27 128
    # exact are the tokens from 448 on; prompts of 601 tokens end in a later block
    assert [text["cached"] for text in outputs(batches(told)[2])] == [448 // block * block]


@pytest.mark.parametrize("name", NEW_ATTENTION)
def test_sink_logits_and_shared_caches_give_the_text_of_vllms_own(
    engines: dict[str, Any], name: str
) -> None:
    assert (
        engines[name]["compressed"]
        == {
            "gpt_oss": {"own": 2, "shared": 0},
            "gemma3n": {"own": 2, "shared": 1},
        }[name]
    )
    assert_same_text(engines[f"plain {name}"], engines[name])


def test_latents_take_the_bytes_of_their_layout(engines: dict[str, Any]) -> None:
    told, layout = engines["latent"], LatentLayout(LATENT, 512, 64, torch.float32)
    assert set(told["layers"].values()) == {"TightLatentAttention"}
    assert (told["block_size"], told["blocks"]) == (32, BUDGET // (2 * layout.page_bytes))
    assert told["tightkv"]["compression_ratio"] == 2 * 576 / layout.bytes_per_token
    line = f"tightkv k4v4: latents at 4 bits, {layout.bytes_per_token} bytes per token and layer"
    assert line in told["log"]


def test_latents_at_4_bits_stay_within_a_kl_budget(engines: dict[str, Any]) -> None:
    """Prompts attend exactly; what is generated reads the pages."""
    kl = mean_kl(engines["plain latent"], engines["latent"], "best")
    assert 1e-4 < kl < 1e-2


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            id=family.job,
            marks=[] if family.job in SHOWN else pytest.mark.thorough,
        )
        for family in vllm_families.ROWS
    ],
)
def test_the_documented_row_is_what_an_engine_says(
    engines: dict[str, Any], family: vllm_families.Family
) -> None:
    assert vllm_families.row(family, engines[family.job]) in DOCS.read_text().splitlines()


def test_the_documented_table_has_a_row_of_each_family() -> None:
    _, _, below = DOCS.read_text().partition(vllm_families.HEADER)
    rows = below.partition("\n\n")[0].splitlines()
    assert [x.split(" | ")[0] for x in rows] == [f"| {x.models}" for x in vllm_families.ROWS]


def tokens_that_fit(told: dict[str, Any]) -> int:
    tokens: int = told["blocks"] * dict(told["groups"])["FullAttentionSpec"]
    return tokens


def test_layers_with_a_state_stay_vllms_own(engines: dict[str, Any]) -> None:
    plain, told = engines["plain states"], engines["k4v4 states"]
    assert sorted(set(told["layers"].values())) == ["MambaMixer2", "TightAttention"]
    assert sum(kind == "TightAttention" for kind in told["layers"].values()) == 4
    assert tokens_that_fit(told) > 3 * tokens_that_fit(plain)
    assert_same_text(batches(plain)[0], told, tie=0.05, share=0.6)


def test_prefixes_of_states_end_before_exact_windows(engines: dict[str, Any]) -> None:
    told = engines["prefixes"]
    assert told["groups"] == [["FullAttentionSpec", 32], ["MambaSpec", 32], ["MambaSpec", 32]]
    again = batches(told)[1]
    # Whole pages of 1, 32, 33, 64, 130, 200 and 300 tokens, but for the window of one.
    assert [text["cached"] for text in outputs(again)] == [0, 0, 0, 0, 64, 128, 224]
    assert told["tightkv"]["prefix_hits_without_state_total"] == 0


def test_layers_among_states_have_bits_of_their_own(engines: dict[str, Any]) -> None:
    """A block holds a page of each compressed layer, and takes no more than those."""
    told = engines["prefixes"]
    assert sorted(told["bits"].values()) == ["k4v4", "k8v8"]
    configs = (KVQuantConfig.from_dict(options) for options in (K4V4, K8V8))
    pages = sum(PageLayout(cfg, HEADS // 2, HEAD_DIM).page_bytes for cfg in configs)
    assert told["blocks"] == BUDGET // pages


def test_sixteen_bits_among_states_give_the_text_of_vllms_own(engines: dict[str, Any]) -> None:
    """From cached prefixes too."""
    plain, told = engines["plain states"], engines["raw states"]
    first, again = batches(told)
    assert_same_text(batches(plain)[0], first)
    assert_same_text(batches(plain)[0], again)
    assert [text["cached"] for text in outputs(again)] == [0, 0, 0, 0, 96, 160, 256]


def test_states_among_layers_with_other_blocks_have_no_prefixes() -> None:
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from tightkv.integrations.vllm.prefix.blocks import align_state_blocks

    cache = CacheConfig(enable_prefix_caching=True, mamba_cache_mode="align")
    with pytest.raises(ValueError, match=r"SlidingWindowSpec.*--no-enable-prefix-caching"):
        align_state_blocks(3, 64, {SlidingWindowSpec}, SimpleNamespace(cache_config=cache))
    assert align_state_blocks(3, 64, set(), SimpleNamespace(cache_config=cache)) == 3
    assert cache.mamba_block_size == 192


def test_blocks_are_multiples_of_what_checkpoints_of_states_need() -> None:
    """vLLM 0.33 keeps states of gated delta nets at multiples of 64 tokens."""
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import MambaSpec

    from tightkv.integrations.vllm.prefix.blocks import pages_per_block

    cache = CacheConfig(enable_prefix_caching=True, mamba_cache_mode="align")
    layout = PageLayout(KVQuantConfig(page_size=32), 2, 32)
    layers = [SimpleNamespace(get_prefill_checkpoint_alignment=lambda x=x: x) for x in (64, None)]
    spec = MambaSpec(block_size=32, shapes=((3 * layout.page_bytes,),), dtypes=(torch.uint8,))
    for known, pages in ((layers, 4), ([object(), object()], 3)):
        others = [(layer, spec) for layer in known]
        config = SimpleNamespace(cache_config=cache)
        assert pages_per_block({"0": layout}, others, config, mixed=False) == pages
        assert cache.mamba_block_size == 32 * pages


@pytest.mark.thorough
def test_three_ranks_give_the_text_of_one(engines: dict[str, Any]) -> None:
    assert_same_text(engines["one rank"], engines["three ranks"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8", "leave --kv-cache-dtype at auto, set it to bfloat16 if the checkpoint asks"),
        ("layer 9", "layer_bits='9=k8v4' names layer 9; the model has layers 0 to 1"),
        pytest.param(
            "sliding layer",
            "names layer 0, which stays with vLLM's own cache (sliding window)",
            marks=pytest.mark.thorough,
        ),
        pytest.param("other blocks", "leave layer_bits out", marks=pytest.mark.thorough),
        ("block size", "a block is a page of 32 tokens"),
        pytest.param("unknown", "did you mean 'key_bits'", marks=pytest.mark.thorough),
        pytest.param(
            "match unit", "leave it out or set a multiple of 32", marks=pytest.mark.thorough
        ),
    ],
)
def test_impossible_combinations_are_refused_at_start(
    engines: dict[str, Any], name: str, message: str
) -> None:
    assert message in engines[name]["error"]


@pytest.mark.parametrize(
    ("name", "ranks", "encoder", "message"),
    [
        ("Llama", 2, False, "decode_context_parallel_size=2: each rank would hold"),
        ("Whisper", 1, True, "tightkv with WhisperForCausalLM: encoder-decoder models"),
        ("Step5", 1, False, "tightkv with Step5ForCausalLM: the model's own kernels write"),
        ("Flint", 1, False, "tightkv with FlintForCausalLM: .*leave tightkv out"),
    ],
)
def test_what_no_cpu_engine_can_be_built_for_is_refused_too(
    name: str, ranks: int, encoder: bool, message: str
) -> None:
    from tightkv.integrations.vllm.options import EngineOptions
    from tightkv.integrations.vllm.start.engine_checks import check_engine_options

    cache = {"cache_dtype": "auto", "user_specified_block_size": False, "prefix_match_unit": None}
    model = {"is_encoder_decoder": encoder, "architectures": [f"{name}ForCausalLM"]}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
    )
    with pytest.raises(ValueError, match=message):
        check_engine_options(EngineOptions(KVQuantConfig()), config)
