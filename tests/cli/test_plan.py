"""tightkv plan: its arithmetic against bytes worked by hand, its JSON against its document."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.model_shape import LayerShape, ModelShape, read_model_shape, skip_reason
from tightkv.model_shape.planner import (
    BASELINES,
    GPUS,
    INDEXED_LATENT_BYTES,
    NOT_FOR_LATENTS,
    baseline_plan,
    config_plan,
    plan_weights,
)
from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import PageLayout
from tightkv.tools.cli import main

DOC = Path(__file__).resolve().parents[2] / "docs" / "plan.md"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 100}
INDEX = {"index_head_dim": 128}
LINEAR = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, argv), "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def error_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert main(["plan", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tightkv: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# --- bytes -------------------------------------------------------------------------------------
def test_bytes_of_one_layer_by_hand() -> None:
    """k4v4, 2 heads of 64, pages of 64 tokens.

    A record: 2048 + 2048 bytes of codes, 128 + 128 of scales, 128 of mean = 4480. A page: two
    records, 8960 bytes, or 140 a token. A token of the ring: 96 bytes of key, 64 of value and 4 of
    scales for each head. 500 tokens: a ring of 3 pages and 32 tokens, 4 sinks at 512 bytes, 20
    bytes of counters, and 5 pages with a 4-byte table entry each, which have left the window of 3
    pages, the last one open. 100 tokens are all in the ring.
    """
    shape = read_model_shape(LLAMA)
    plan = config_plan("k4v4", shape, KVQuantConfig.preset("k4v4"))
    assert plan.bytes_per_token_per_layer == 140
    assert plan.bytes_per_token == 3 * 140
    layer = 5 * (8960 + 4) + (3 * 64 + 32) * 328 + 4 * 512 + 20
    assert plan.total_bytes(500) == 3 * layer
    assert plan.total_bytes(500, sequences=5) == 15 * layer
    assert plan.total_bytes(100) == 3 * (100 * 328 + 4 * 512 + 20)
    exact = KVQuantConfig.preset("k4v4", window_bits=16)
    layer = 5 * (8960 + 4) + (3 * 64 + 32 + 4) * 512 + 20
    assert config_plan("k4v4", shape, exact).total_bytes(500) == 3 * layer


def test_bits_of_a_layer_that_the_model_does_not_have() -> None:
    cfg = KVQuantConfig.preset("k4v4", layer_bits="3=k8v8")
    with pytest.raises(ValueError, match=r"names layer 3; the model has layers 0 to 2"):
        config_plan("mine", read_model_shape(LLAMA), cfg)


def test_baselines_by_hand() -> None:
    shape = read_model_shape(LLAMA)
    assert baseline_plan("bf16", shape).bytes_per_token == 3 * 2 * 2 * 64 * 2
    assert baseline_plan("fp8", shape).total_bytes(10) == 10 * 3 * 2 * 2 * 64
    nvfp4 = baseline_plan("nvfp4", shape)  # as vLLM's: 64 / 2 + 64 / 16 bytes a head
    assert nvfp4.total_bytes(10) == 10 * 3 * 2 * 2 * 36
    assert nvfp4.bytes_per_token == 3 * 2 * 2 * 36
    odd = LayerShape("full", 1, 9, 9)  # 18 numbers: 10.125 bytes
    assert odd.uncompressed_bytes(1, 0.5625) == 11


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_every_preset_is_sized_by_the_page_layout(preset: str, head_dim: int) -> None:
    shape = read_model_shape(LLAMA | {"head_dim": head_dim})
    cfg = KVQuantConfig.preset(preset)
    layout = PageLayout(cfg, 2, head_dim, torch.bfloat16)
    plan = config_plan(preset, shape, cfg)
    assert plan.bytes_per_token == 3 * layout.new_pages(1).numel() / cfg.page_size
    for tokens in (1, 64, 65, 1000, 1024):
        assert plan.total_bytes(tokens) == 3 * layout.total_bytes(tokens, encode_partial_page=False)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("options", [{}, {"exact_pages": 1, "sinks": 0}, {"protected_first": 1}])
def test_no_length_is_planned_larger_than_bf16(
    preset: str, head_dim: int, options: dict[str, int]
) -> None:
    """From 16 tokens on: sinks are kept beside the ring, and there are 20 bytes of counters.

    With a window of one page its tokens are still in the ring when it is sealed.
    """
    shape = read_model_shape(LLAMA | {"head_dim": head_dim})
    cfg = KVQuantConfig.preset(preset, **options)
    plan, bf16 = config_plan(preset, shape, cfg), baseline_plan("bf16", shape)
    for tokens in range(3 * cfg.page_size if cfg.exact_pages == 1 else 16, 2000):
        assert plan.total_bytes(tokens) < bf16.total_bytes(tokens)


def test_sliding_layers_stay_16_bit_and_stop_growing() -> None:
    shape = read_model_shape(GEMMA)  # layers 0 and 2 slide over 100 tokens
    plan, bf16 = config_plan("k4v4", shape, KVQuantConfig()), baseline_plan("bf16", shape)
    layout = PageLayout(KVQuantConfig(), 2, 64)
    assert plan.bytes_per_token == 2 * 140
    pages = layout.total_bytes(1000, encode_partial_page=False)
    assert plan.total_bytes(1000) == 2 * 100 * 512 + 2 * pages
    assert plan.total_bytes(40) == 2 * 40 * 512 + 2 * (40 * 328 + 4 * 512 + 20)
    assert bf16.total_bytes(1000) == 2 * 100 * 512 + 2 * 1000 * 512


@pytest.mark.parametrize(("preset", "size"), [("k4v2", 385), ("k3v3", 321), ("k2v2", 257)])
def test_latents_are_sized_by_their_layout(preset: str, size: int) -> None:
    """4 bits: 256 bytes of codes, 128 of RoPE, 1 of scale. vLLM allocates whole pages."""
    shape = read_model_shape(DEEPSEEK)
    cfg = KVQuantConfig.preset(preset)
    plan, layout = config_plan(preset, shape, cfg), LatentLayout(cfg, 512, 64)
    assert plan.bytes_per_token_per_layer == layout.bytes_per_token == size
    assert plan.bytes_per_token == 3 * size
    assert plan.total_bytes(cfg.page_size + 1, 2) == 2 * 3 * 2 * layout.page_bytes
    assert config_plan(preset, shape, cfg, ranks=8) == plan


def test_float16_and_float32_models_keep_rope_at_16_bits() -> None:
    for dtype in ("float16", "float32"):
        plan = config_plan("k4v4", read_model_shape(DEEPSEEK | {"dtype": dtype}), KVQuantConfig())
        assert plan.bytes_per_token == 3 * 385


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key_bits": 8}, "k8v4 for a layer with latent attention"),
        ({"protected_last": 1}, "protected layers in a model with latent attention"),
        ({"calibration": "some.json"}, "calibration='some.json'"),
    ],
)
def test_what_the_plugin_refuses_for_latents_is_uncompressed(
    options: dict[str, Any], reason: str
) -> None:
    shape = read_model_shape(DEEPSEEK)
    plan = config_plan("mine", shape, KVQuantConfig(**options))
    assert plan.refusal is not None and reason in plan.refusal
    assert plan.total_bytes(100) == baseline_plan("bf16", shape).total_bytes(100)


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        ({}, [1152, 576, 1152, 385]),  # no MLA backend of vLLM has nvfp4
        (INDEX, [1152 + 132, 656 + 132, 352 + 132, 1152 + 132]),  # fp8_ds_mla, nvfp4_ds_mla
        ({"kv_lora_rank": 480}, [1088, 544, 1088, 1088]),
        (LINEAR, [1152, 576, 1152, 1152]),
    ],
)
def test_latents_in_caches_of_vllm(change: dict[str, Any], sizes: list[int]) -> None:
    shape = read_model_shape(DEEPSEEK | change)
    plans = [baseline_plan(name, shape) for name in BASELINES]
    plans.append(config_plan("k4v4", shape, KVQuantConfig()))
    count = sum(layer.kind == "mla" for layer in shape.layers)
    assert [plan.bytes_per_token for plan in plans] == [count * size for size in sizes]
    for plan in plans[:3]:
        assert plan.total_bytes(10) == 10 * plan.bytes_per_token


@pytest.mark.vllm
def test_sizes_of_latents_are_those_of_vllm() -> None:
    """Read from its source: the numbers are literals inside of a method, backends need a GPU."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    layer = (folder / "model_executor/layers/attention/mla_attention.py").read_text()
    sizes = re.search(r"state_content_bytes=(\{.*?\})", layer, re.DOTALL)
    if sizes is None:
        pytest.skip("an older vLLM, which says it elsewhere")
    found = ast.literal_eval(sizes[1])
    assert found == {f"{name}_ds_mla": size for name, size in INDEXED_LATENT_BYTES.items()}
    backends = (folder / "v1/attention/backends/mla").glob("*mla.py")  # *_sparse.py are not dense
    text = "".join(path.read_text() for path in backends)
    listed = re.findall(r"supported_kv_cache_dtypes: .*? = (\[.*?\])", text, re.DOTALL)
    dense = {name for names in listed for name in ast.literal_eval(names)}
    assert "fp8" in dense and not dense & {"fp8_ds_mla", *NOT_FOR_LATENTS}


def test_state_of_hybrid_layers_is_added_once_a_sequence() -> None:
    layers = (LayerShape("full", 2, 64, 64, state_bytes=1000), LayerShape("linear", state_bytes=77))
    shape = ModelShape("m", "hybrid", layers, 4, 256, 1000, torch.bfloat16, 4096)
    plan = config_plan("k4v4", shape, KVQuantConfig())
    assert plan.total_bytes(640, 3) == 3 * (
        PageLayout(KVQuantConfig(), 2, 64).total_bytes(640, encode_partial_page=False) + 1077
    )


def test_protected_layers_have_their_own_bits() -> None:
    shape = read_model_shape(LLAMA)
    cfg = KVQuantConfig(key_bits=2, value_bits=2, protected_first=1, protected_bits=8)
    low, high = (PageLayout(KVQuantConfig(key_bits=b, value_bits=b), 2, 64) for b in (2, 8))
    plan = config_plan("mixed", shape, cfg)
    assert plan.bytes_per_token == high.bytes_per_token + 2 * low.bytes_per_token
    assert plan.bytes_per_token_per_layer == plan.bytes_per_token / 3
    whole = config_plan("16", shape, cfg.replace(protected_bits=16))
    assert whole.layers[0].layout is None
    assert whole.layers[0].bytes_per_token == 512


def test_why_layers_are_kept() -> None:
    assert skip_reason(LayerShape("full", 2, 64, 64)) is None
    assert skip_reason(LayerShape("full", 2, 72, 72)) == PAGE_ERROR
    assert skip_reason(LayerShape("full", 2, 192, 128)) == "keys have 192 dimensions and values 128"
    assert skip_reason(LayerShape("sliding", 2, 64, 64, 100)) == "sliding window"
    odd = read_model_shape(LLAMA | {"head_dim": 72})
    assert config_plan("k4v4", odd, KVQuantConfig()).bytes_per_token == 3 * 2 * 2 * 72 * 2


def test_windows_are_compressed_where_that_saves() -> None:
    def reason(window: int, windows: bool | int, preset: str = "k4v4", **of: Any) -> str | None:
        shape = LayerShape("sliding", 2, 64, 64, window, **of)
        return skip_reason(shape, "vllm", windows, KVQuantConfig.preset(preset))

    assert reason(4096, False) == "sliding window"
    assert skip_reason(LayerShape("sliding", 2, 64, 64, 4096), windows=True) == "sliding window"
    assert reason(512, True) is None
    short = "sliding window of {} tokens, smaller than with exact rings"
    assert reason(128, True) == short.format(128)
    assert (reason(256, True, "k8v8"), reason(512, True, "k8v8")) == (short.format(256), None)
    assert reason(128, 128) is None
    assert reason(127, 128) == "sliding window of less than 128 tokens"
    assert reason(4096, True, extras=("ALiBi",)) == "ALiBi"


def test_a_plan_with_windows_counts_their_pages_and_rings() -> None:
    shape = read_model_shape(GEMMA | {"sliding_window": 1024})
    (window,) = {layer for layer in shape.layers if layer.kind == "sliding"}
    cfg = KVQuantConfig()
    plan = config_plan("k4v4", shape, cfg, windows=True)
    layout = PageLayout(cfg, window.num_kv_heads, window.head_dim)
    ring = layout.sequence_bytes()
    found = [layer for layer in plan.layers if layer.shape == window]
    assert all(layer.bytes_per_token == 0 for layer in found)
    assert found[0].total_bytes(100_000) == 17 * (layout.page_bytes + 4) + ring
    assert found[0].total_bytes(400) == 7 * (layout.page_bytes + 4) + ring
    without = config_plan("k4v4", shape, cfg)
    saved = window.uncompressed_bytes(100_000) - found[0].total_bytes(100_000)
    assert without.total_bytes(100_000) - plan.total_bytes(100_000) == len(found) * saved > 0
    wider = replace(window, head_dim=128, value_head_dim=128)  # pages of another size
    layers = tuple(wider if layer == window else layer for layer in shape.layers)
    plan = config_plan("k4v4", replace(shape, layers=layers), cfg, windows=True)
    assert all(layer.layout is None for layer in plan.layers if layer.shape == wider)


@pytest.mark.parametrize("preset", ["k8v8", "k4v4", "k3v3", "k2v2"])
def test_the_documented_bytes_of_windows(preset: str) -> None:
    cfg = KVQuantConfig.preset(preset)
    layout = PageLayout(cfg, 8, 128)

    def saves(window: int) -> bool:
        return skip_reason(LayerShape("sliding", 8, 128, 128, window), "vllm", True, cfg) is None

    shortest = next(window for window in range(1, 1000) if saves(window))
    ratios = [layout.window_bytes(n) / (4 * 8 * 128 * n) for n in (512, 1024, 2048, 4096)]
    row = f"| {preset} | {shortest} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"
    assert row in (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def test_the_documented_bytes_of_gemma_3_27b() -> None:
    shape = read_model_shape(
        {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        }
    )
    cfg = KVQuantConfig.preset("k4v4")
    plans = (config_plan("k4v4", shape, cfg, windows=windows) for windows in (False, True))
    plain, compressed = (f"{plan.total_bytes(8192) / 2**20:.0f}" for plan in plans)
    page = " ".join((Path(__file__).parents[2] / "docs" / "vllm.md").read_text().split())
    assert f"Gemma 3 27B takes {plain} MiB for a sequence of 8,192 tokens" in page
    assert f"and {compressed} MiB with its sliding windows compressed" in page


def test_windows_of_a_plan_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for config, note in (
        (GEMMA, "k4v4, k8v8: none of 2 sliding windows compressed"),
        (GEMMA | {"sliding_window": 300}, "k4v4: 2 of 2 sliding windows compressed"),
        (LLAMA, "--sliding-windows: this model has none"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        told = plan_json(capsys, tmp_path, "--sliding-windows", "--presets", "k4v4,k8v8")
        assert any(line.startswith(note) for line in told["notes"]), told["notes"]


PAGE_ERROR = "head_dim=72; supported: multiples of 16 from 16 up"


# --- what fits -----------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [LLAMA, GEMMA, DEEPSEEK])
@pytest.mark.parametrize("memory", [0, 1, 300_000, 700_000, 10_000_000, 10**12])
@pytest.mark.parametrize("options", [{}, {"protected_first": 1}])
def test_max_tokens_is_the_longest_that_fits(
    config: dict[str, Any], memory: int, options: dict[str, int]
) -> None:
    plan = config_plan("k4v3", read_model_shape(config), KVQuantConfig.preset("k4v3", **options))
    tokens = plan.max_tokens(memory)
    assert tokens is not None
    assert tokens == 0 or plan.total_bytes(tokens) <= memory
    for longer in range(tokens + 1, tokens + 1000):
        assert plan.total_bytes(longer) > memory


def test_no_limit_where_every_layer_slides() -> None:
    shape = read_model_shape(LLAMA | {"model_type": "mistral", "sliding_window": 100})
    plan = baseline_plan("bf16", shape)
    assert plan.max_tokens(3 * 100 * 512) is None
    assert plan.max_tokens(3 * 100 * 512 - 1) == 99


def test_max_requests() -> None:
    plan = baseline_plan("bf16", read_model_shape(LLAMA))
    one = plan.total_bytes(100)
    assert [plan.max_requests(m, 100) for m in (-5, one - 1, one, 7 * one + 1)] == [0, 0, 1, 7]


# --- the command ---------------------------------------------------------------------------------
def test_report_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = plan_json(
        capsys, folder, "--budget", "64MiB", "--weights-bytes", "4MiB", "--context", "1000",
        "--batch", "3",
    )  # fmt: skip
    assert data["memory"] == {
        "budget_bytes": 64 << 20,
        "gpu": None,
        "utilization": 1.0,
        "cache_bytes": 60 << 20,
    }
    assert data["weights"] == {"bytes": 4 << 20, "dtype": None, "source": "given"}
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == ["bf16", "fp8", "nvfp4", *PRESETS]
    assert rows["bf16"]["total_bytes"] == 3 * 1000 * 3 * 512
    assert rows["bf16"]["max_tokens"] == (60 << 20) // (3 * 512)
    assert rows["bf16"]["max_requests"] == (60 << 20) // (1000 * 3 * 512)
    k4v4 = 3 * PageLayout(KVQuantConfig(), 2, 64).total_bytes(1000, encode_partial_page=False)
    assert rows["k4v4"]["total_bytes"] == 3 * k4v4
    assert rows["k4v4"]["total_ratio"] == pytest.approx(1000 * 3 * 512 / k4v4)
    assert rows["k4v4"]["ratio"] == pytest.approx(512 / 140)
    assert rows["k4v4"]["max_requests"] == (60 << 20) // k4v4
    assert (rows["k4v3"]["key_bits"], rows["k4v3"]["value_bits"]) == (4, 3)


def test_gpu_utilization_and_default_context(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = plan_json(capsys, folder, "--gpu", "nvidia h100", "--presets", "k4v4")
    assert data["memory"]["gpu"] == "H100"
    assert data["memory"]["budget_bytes"] == int(GPUS["H100"] * 2**20 * 0.9)
    assert data["context"] == 4096  # the model's limit
    parameters = 2 * 1000 * 256 + 3 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    assert data["weights"] == {"bytes": 2 * parameters, "dtype": "bfloat16", "source": "estimated"}
    assert [row["name"] for row in data["rows"]] == ["bf16", "fp8", "nvfp4", "k4v4"]
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 131072}))
    assert plan_json(capsys, folder)["context"] == 32768


@pytest.mark.parametrize(
    ("text", "name"),
    [("a100", "A100-80GB"), ("RTX 4090", "RTX4090"), ("4090", "RTX4090"), ("mi300x", "MI300X")],
)
def test_gpu_names(folder: Path, text: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_json(capsys, folder, "--gpu", text)["memory"]["gpu"] == name


def test_tensor_parallel_ranks_share_heads_and_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = plan_json(capsys, folder, "--gpu", "L4")
    two = plan_json(capsys, folder, "--gpu", "L4", "--tp", "2")
    eight = plan_json(capsys, folder, "--gpu", "L4", "--tp", "8")
    assert two["model"]["layers"][0]["num_kv_heads"] == 1
    assert eight["model"]["layers"][0]["num_kv_heads"] == 1
    assert two["rows"][4]["bytes_per_token"] * 2 == one["rows"][4]["bytes_per_token"]
    assert eight["rows"][4]["bytes_per_token"] == two["rows"][4]["bytes_per_token"]
    assert two["weights"]["bytes"] * 2 == one["weights"]["bytes"]
    assert "cannot be shared by 3 ranks" in error_of(capsys, folder, "--tp", "3")


def test_config_file_as_a_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "mine.json"
    cfg = KVQuantConfig(key_bits=4, value_bits=2, page_size=128)
    path.write_text(cfg.to_json())
    rows = plan_json(capsys, folder, "--config", path, "--presets", "")["rows"]
    assert [row["name"] for row in rows] == ["bf16", "fp8", "nvfp4", "mine (k4v2)"]
    expected = PageLayout(cfg, 2, 64).bytes_per_token
    assert rows[-1]["bytes_per_token_per_layer"] == expected


def test_configs_of_the_same_name_are_rows_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ({"sinks": 0}, {"page_size": 128}, {"key_bits": 8}, {"page_size": 256})
    words = [word for fields in given for word in ("--config", json.dumps(fields))]
    rows = plan_json(capsys, folder, "--presets", "k4v4", *words)["rows"]
    names = [row["name"] for row in rows[-4:]]
    assert names == ["config (k4v4)", "config (k4v4) 2", "config (k8v4)", "config (k4v4) 3"]


def test_measured_weights_and_another_dtype(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(100)
    (folder / "model.safetensors").write_bytes(weights)
    measured = plan_json(capsys, folder)["weights"]
    assert measured == {"bytes": 100, "dtype": "bfloat16", "source": "measured"}
    other = plan_json(capsys, folder, "--weights-dtype", "fp8")["weights"]
    assert other == {"bytes": 50, "dtype": "fp8", "source": "measured"}


def test_quantized_weights_are_estimated_by_their_own_bits() -> None:
    shape = read_model_shape(LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    plain = plan_weights(read_model_shape(LLAMA))
    weights = plan_weights(shape)
    assert weights is not None
    assert plain is not None
    assert (weights.bytes * 2, weights.dtype) == (plain.bytes, "fp8")
    odd = read_model_shape(LLAMA | {"quantization_config": {"quant_method": "odd"}})
    assert plan_weights(odd) is None
    assert plan_weights(odd, "int4") is not None


def test_text_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--gpu", "T4", "--context", "5000"]) == 0
    text = capsys.readouterr().out
    assert "3 x full, 2 KV heads of 64 (compressed)" in text
    assert "(estimated)" in text
    assert "left for the cache" in text
    assert "note: context 5000 is beyond the model's limit of 4096" in text
    assert re.search(r"^k4v4 +140 +420 +3\.66x", text, re.MULTILINE)


def test_text_report_of_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    assert main(["plan", str(tmp_path), "--presets", "k8v8,k4v4"]) == 0
    text = capsys.readouterr().out
    assert "3 x mla, 576 numbers per token (compressed in vLLM)" in text
    assert re.search(r"^k4v4 +385 +1155 +2\.99x", text, re.MULTILINE)
    assert "note: latents (MLA) are compressed in vLLM alone" in text
    assert "note: nvfp4: vLLM has none for latents (MLA)" in text
    assert "note: k8v8: counted at 16 bits, for the vLLM plugin refuses it: k8v8 for" in text
    assert "k4v4:" not in text and "no layer" not in text


def test_text_report_of_a_model_that_cannot_be_compressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | INDEX))
    assert main(["plan", str(tmp_path), "--presets", "k8v8,k4v4"]) == 0
    text = capsys.readouterr().out
    about = "3 x mla, 576 numbers per token, an index of 132 bytes per token"
    assert f"{about} (not compressed: sparse latent attention (an indexer chooses tokens))" in text
    notes = [line for line in text.splitlines() if line.startswith("note")]
    assert notes == [
        "note: no layer of this model can be compressed: every preset is the same as bf16"
    ]


def test_weights_beyond_the_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = plan_json(capsys, folder, "--budget", "1GB", "--weights-bytes", "2GB")
    assert data["memory"]["cache_bytes"] == 0
    assert {row["max_tokens"] for row in data["rows"]} == {0}
    assert {row["max_requests"] for row in data["rows"]} == {0}
    assert "exceed the budget" in " ".join(data["notes"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu", "h10"], "unknown GPU 'h10'; did you mean 'H100'?"),
        (["--budget", "80 potatoes"], "size '80 potatoes'"),
        (["--budget", "80G"], "size '80G'"),
        (["--context", "0"], "--context 0; it must be at least 1"),
        (["--batch", "-1"], "--batch -1"),
        (["--context", "9" * 400], "it must be at least 1 and at most"),
        (["--budget", "9" * 400], "give a number and one of"),
        (["--utilization", "1.5", "--gpu", "T4"], "--utilization 1.5"),
        (["--presets", "k5v5"], "unknown preset 'k5v5'"),
        (["--config", "missing.json"], "config file 'missing.json' does not exist"),
    ],
)
def test_bad_options_are_one_line(
    folder: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, folder, *argv)


# Models that say what their layers are in different ways, and values that no field of them takes.
WAYS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma3": LLAMA
    | {"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 512}
    | {"sliding_window_pattern": 6, "num_kv_shared_layers": 1},
    "gemma4": LLAMA
    | {"model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128, "sliding_window": 512}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "qwen3_next": LLAMA
    | {"model_type": "qwen3_next", "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4},
    "deepseek": DEEPSEEK
    | {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "mlp_only_layers": [2], "decoder_sparse_step": 1},
    "jamba": LLAMA
    | {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    "llama4": LLAMA | {"model_type": "llama4_text", "no_rope_layers": [1, 1, 0]},
    "qwen2_moe": LLAMA
    | {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 512}
    | {"max_window_layers": 2, "tie_word_embeddings": True},
    "composite": {"model_type": "qwen2_vl", "text_config": LLAMA},
}
MORE_FIELDS = (
    *("architectures", "attn_layer_indices", "cross_attention_layers", "dtype", "full_attn_idxs"),
    *("hybrid_override_pattern", "index_head_dim", "layers_block_type"),
    *("multi_query", "per_layer_config", "quantization_config", "rope_parameters", "alibi"),
)
ODD_VALUES: tuple[Any, ...] = (
    -1,
    10**30,
    10**400,
    1.5,
    "8",
    True,
    [],
    [1],
    [None],
    [{}],
    {},
    {"0": 1},
)
ODD_VALUES += ({"0": {"head_dim": "x"}}, {"0": {"num_key_value_heads": 10**9}})


@pytest.mark.parametrize("way", WAYS)
def test_an_odd_config_is_planned_or_its_field_is_named(way: str) -> None:
    errors = 0
    for field in (*WAYS[way], *MORE_FIELDS):
        for value in ODD_VALUES:
            try:
                shape = read_model_shape(WAYS[way] | {field: value})
                weights = plan_weights(shape)
                plan = config_plan("k4v4", shape, KVQuantConfig())
                assert math.isfinite(plan.total_bytes(10**6)) and repr(weights)
            except ValueError as error:
                errors += 1
                inner = ("text_config", "per_layer_config")  # then a field in it
                assert field in str(error) or field in inner, (field, value, error)
    assert errors > 30


def test_a_model_of_one_layer_may_name_its_architecture() -> None:
    config = LLAMA | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    assert read_model_shape(config).num_layers == 1


def test_unknown_weights_ask_for_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "newish"}))
    assert "set --weights-bytes" in error_of(capsys, tmp_path, "--gpu", "T4")
    assert plan_json(capsys, tmp_path)["weights"] is None  # without a budget nobody needs them


# --- schema --------------------------------------------------------------------------------------
NUMBER, OPTIONAL = (int, float), type(None)
LAYER = {
    "kind": str,
    "count": int,
    "num_kv_heads": int,
    "head_dim": int,
    "value_head_dim": int,
    "latent_dim": int,
    "index_bytes": int,
    "window": (int, OPTIONAL),
    "state_bytes": (int, OPTIONAL),
    "compressed": bool,
    "skip_reason": (str, OPTIONAL),
}
ROW = {
    "name": str,
    "key_bits": (int, OPTIONAL),
    "value_bits": (int, OPTIONAL),
    "bytes_per_token_per_layer": (*NUMBER, OPTIONAL),
    "bytes_per_token": NUMBER,
    "ratio": (float, OPTIONAL),
    "total_bytes": int,
    "total_ratio": (float, OPTIONAL),
    "max_tokens": (int, OPTIONAL),
    "max_requests": (int, OPTIONAL),
}
SCHEMA = {
    "schema": int,
    "tightkv": str,
    "model": {
        "name": str,
        "model_type": str,
        "num_layers": int,
        "num_heads": int,
        "hidden_size": int,
        "dtype": str,
        "max_positions": (int, OPTIONAL),
        "layers": [LAYER],
    },
    "context": int,
    "batch": int,
    "tp": int,
    "weights": {"bytes": int, "dtype": (str, OPTIONAL), "source": str},
    "memory": {
        "budget_bytes": int,
        "gpu": (str, OPTIONAL),
        "utilization": float,
        "cache_bytes": int,
    },
    "rows": [ROW],
    "notes": [str],
}


def check_schema(value: Any, schema: Any, where: str = "") -> None:
    if isinstance(schema, dict):
        assert set(value) == set(schema), where
        for key, inner in schema.items():
            check_schema(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for entry in value:
            check_schema(entry, schema[0], where)
    else:
        assert isinstance(value, schema), f"{where}: {value!r}"


def keys_of(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema).union(*map(keys_of, schema.values()))
    return keys_of(schema[0]) if isinstance(schema, list) else set()


@pytest.mark.parametrize("config", [LLAMA, GEMMA, DEEPSEEK | {"torch_dtype": "float32"}])
def test_json_schema(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = plan_json(capsys, tmp_path, "--gpu", "T4", "--weights-bytes", "1GB")
    check_schema(data, SCHEMA)
    bare = plan_json(capsys, tmp_path, "--weights-bytes", "1GB")
    check_schema(bare, SCHEMA | {"memory": OPTIONAL})
    assert {row["max_tokens"] for row in bare["rows"]} == {None}


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"^\| `([a-z_]+)` ", DOC.read_text(), re.MULTILINE))
    assert documented == keys_of(SCHEMA)


def test_rows_with_more_bits_for_keys_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = pytest.importorskip("transformers")
    from models import SHAPE
    from tiny_folder import plant_key_bias, write_model

    folder = write_model(tmp_path / "qwen2", hf.Qwen2Config(**SHAPE))
    plant_key_bias(folder, layer=2)
    mine = tmp_path / "mine.json"
    mine.write_text('{"preset": "k4v4", "protect_keys": false}')
    presets = "k8v4,k4v4,k2v2"
    data = plan_json(capsys, folder, "--presets", presets, "--config", mine)
    check_schema(data, SCHEMA | {"memory": OPTIONAL})
    rows = {row["name"]: row["bytes_per_token"] for row in data["rows"]}
    assert list(rows) == ["bf16", "fp8", "nvfp4", "k8v4", "k4v4+", "k2v2+", "mine (k4v4)"]
    assert rows["k4v4+"] == rows["mine (k4v4)"] + 2 * 16 * 4 / 8  # two heads, four bits more
    assert any("k4v4+, k2v2+: 8-bit keys in layer 2" in note for note in data["notes"])
    (folder / "model.safetensors").unlink()
    data = plan_json(capsys, folder, "--presets", presets)
    assert [row["name"] for row in data["rows"]][3:] == ["k8v4", "k4v4", "k2v2"]
    assert not any("bits" in note for note in data["notes"])
