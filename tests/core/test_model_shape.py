"""Per-layer cache shapes from configs of many families; the expected numbers are worked by hand."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv.model_shape import (
    LayerShape,
    estimate_parameters,
    families,
    is_local,
    read_model_shape,
    stored_weights,
    weights_dtype,
)
from tightkv.model_shape.shape import BESIDE_OTHERS, INDEXED, LATENT_WINDOW, SINKS, WINDOW


def decoder(model_type: str, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """A config.json with what every family has; hidden_size 4096 unless told."""
    return {
        "model_type": model_type,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        **more,
    }


def full(heads: int, dim: int, state: int = 0, extras: tuple[str, ...] = ()) -> LayerShape:
    return LayerShape("full", heads, dim, dim, state_bytes=state, extras=extras)


def sliding(heads: int, dim: int, window: int, kind: str = "sliding") -> LayerShape:
    return LayerShape(kind, heads, dim, dim, window)


def linear(state: int | None) -> LayerShape:
    return LayerShape("linear", state_bytes=state)


def latent(*extras: str, index_bytes: int = 0) -> LayerShape:
    return LayerShape("mla", latent_dim=576, rope_dim=64, index_bytes=index_bytes, extras=extras)


NOTHING = LayerShape("none")
MAMBA2 = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
MAMBA2 |= {"mamba_d_conv": 4, "mamba_expand": 2}
GATED_DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4}
GATED_DELTA |= {"linear_num_value_heads": 32, "linear_value_head_dim": 128}
# conv: (2*16*128 + 32*128 channels) * 4 columns * 2 bytes; recurrence: 32*128*128 floats.
GATED_DELTA_BYTES = 8192 * 4 * 2 + 32 * 128 * 128 * 4

FAMILIES: dict[str, tuple[dict[str, Any], list[LayerShape]]] = {
    "llama": (decoder("llama", 3, 32, 8), [full(8, 128)] * 3),
    "llama without num_key_value_heads": (
        decoder("llama", 2, 32, 8) | {"num_key_value_heads": None},
        [full(32, 128)] * 2,
    ),
    "qwen2 with its window off": (
        decoder("qwen2", 2, 28, 4, hidden_size=3584, use_sliding_window=False, sliding_window=4096)
        | {"max_window_layers": 0},
        [full(4, 128)] * 2,
    ),
    "qwen2 with its window on": (
        decoder("qwen2", 4, 32, 8, use_sliding_window=True, sliding_window=512)
        | {"max_window_layers": 3},
        [full(8, 128)] * 3 + [sliding(8, 128, 512)],
    ),
    "qwen3, head_dim not hidden_size / heads": (
        decoder("qwen3", 2, 16, 8, hidden_size=1024, head_dim=128),
        [full(8, 128)] * 2,
    ),
    "mistral 0.1": (
        decoder("mistral", 2, 32, 8, sliding_window=4096),
        [sliding(8, 128, 4096)] * 2,
    ),
    "mistral 0.3": (decoder("mistral", 2, 32, 8, sliding_window=None), [full(8, 128)] * 2),
    "gemma2": (
        decoder("gemma2", 4, 8, 4, head_dim=256, sliding_window=4096),
        [sliding(4, 256, 4096), full(4, 256)] * 2,
    ),
    "gemma3 text": (
        decoder("gemma3_text", 7, 4, 1, head_dim=256, sliding_window=512, sliding_window_pattern=6),
        [sliding(1, 256, 512)] * 5 + [full(1, 256), sliding(1, 256, 512)],
    ),
    "gemma3 with images: sizes of the text part left out": (
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "num_attention_heads": 16},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 6,
                "sliding_window": 1024,
            },
        },
        [sliding(4, 256, 1024)] * 5 + [full(4, 256)],
    ),
    "gpt_oss": (
        decoder("gpt_oss", 4, 64, 8, hidden_size=2880, head_dim=64, sliding_window=128)
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        [sliding(8, 64, 128), full(8, 64, extras=(SINKS,))] * 2,
    ),
    "qwen3_next": (
        decoder("qwen3_next", 4, 16, 2, hidden_size=2048, head_dim=256, **GATED_DELTA),
        [linear(GATED_DELTA_BYTES)] * 3 + [full(2, 256)],
    ),
    "qwen3_5 with images": (
        {
            "model_type": "qwen3_5",
            "text_config": decoder("qwen3_5_text", 4, 16, 4, head_dim=256, **GATED_DELTA)
            | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        },
        [linear(GATED_DELTA_BYTES)] * 3 + [full(4, 256)],
    ),
    "lfm2": (
        decoder("lfm2", 3, 32, 8, hidden_size=2048, conv_L_cache=3)
        | {"layer_types": ["conv", "full_attention", "conv"]},
        [linear(2048 * 3 * 2), full(8, 64), linear(2048 * 3 * 2)],
    ),
    "lfm2, older": (
        decoder("lfm2", 3, 32, 8, hidden_size=2048, conv_L_cache=3, full_attn_idxs=[2]),
        [linear(2048 * 3 * 2)] * 2 + [full(8, 64)],
    ),
    "jamba": (
        decoder("jamba", 8, 32, 8, attn_layer_period=8, attn_layer_offset=4)
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
        [linear(8192 * 4 * 2 + 8192 * 16 * 4)] * 4
        + [full(8, 128)]
        + [linear(8192 * 4 * 2 + 8192 * 16 * 4)] * 3,
    ),
    "bamba": (
        decoder("bamba", 3, 32, 8, attn_layer_indices=[1], **MAMBA2),
        [linear(67584 + 4194304), full(8, 128), linear(67584 + 4194304)],
    ),
    "granite hybrid": (
        decoder("granitemoehybrid", 2, 32, 8, layer_types=["mamba", "attention"], **MAMBA2),
        [linear(67584 + 4194304), full(8, 128)],
    ),
    "falcon_h1, attention beside mamba": (
        decoder("falcon_h1", 2, 32, 8, **MAMBA2),
        [full(8, 128, state=67584 + 4194304)] * 2,
    ),
    "nemotron_h": (
        decoder("nemotron_h", 5, 32, 8, hybrid_override_pattern="M-*EM", head_dim=128, n_groups=8)
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4},
        [linear(81920 + 4194304), NOTHING, full(8, 128), NOTHING, linear(81920 + 4194304)],
    ),
    "deepseek_v2": (
        decoder("deepseek_v2", 2, 16, 16, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128),
        [latent()] * 2,
    ),
    "deepseek_v3": (
        decoder("deepseek_v3", 2, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128),
        [latent()] * 2,
    ),
    "deepseek_v32 with its index": (
        decoder("deepseek_v32", 1, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64)
        | {"index_head_dim": 128, "layer_types": ["deepseek_sparse_attention"]},
        [latent(INDEXED, index_bytes=128 + 4)],
    ),
    "latents beside recurrent layers": (
        decoder("kimi_linear", 2, 16, 16, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128)
        | {"layer_types": ["linear_attention", "full_attention"]},
        [linear(None), latent(BESIDE_OTHERS)],
    ),
    "latents in a window": (
        decoder("new", 2, 16, 16, kv_lora_rank=512, qk_rope_head_dim=64, sliding_window=64)
        | {"layer_types": ["sliding_attention", "full_attention"]},
        [latent(LATENT_WINDOW)] * 2,
    ),
    "llama4": (
        {
            "model_type": "llama4",
            "text_config": decoder("llama4_text", 4, 40, 8, hidden_size=5120, head_dim=128)
            | {"attention_chunk_size": 8192, "no_rope_layers": []},
        },
        [sliding(8, 128, 8192, "chunked")] * 3 + [full(8, 128)],
    ),
    "llama4 with layer_types": (
        decoder("llama4_text", 2, 40, 8, hidden_size=5120, attention_chunk_size=8192)
        | {"layer_types": ["chunked_attention", "full_attention"]},
        [sliding(8, 128, 8192, "chunked"), full(8, 128)],
    ),
    "phi3, window shorter than the context": (
        decoder("phi3", 2, 32, 32, hidden_size=3072, sliding_window=2047)
        | {"max_position_embeddings": 4096},
        [sliding(32, 96, 2047)] * 2,
    ),
    "phi3, window that never slides": (
        decoder("phi3", 2, 32, 32, hidden_size=3072, sliding_window=262144),
        [full(32, 96, extras=(WINDOW,))] * 2,
    ),
    "falcon 7b, one shared KV head": (
        decoder("falcon", 2, 71, 71, hidden_size=4544, multi_query=True, num_kv_heads=71),
        [full(1, 64)] * 2,
    ),
    "falcon 40b": (
        decoder("falcon", 2, 128, 8, hidden_size=8192, new_decoder_architecture=True)
        | {"num_key_value_heads": None, "num_kv_heads": 8},
        [full(8, 64)] * 2,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 2, "n_positions": 1024}
        | {"vocab_size": 50257},
        [full(12, 64)] * 2,
    ),
    "gemma3n, last layers share": (
        decoder("gemma3n_text", 5, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=2),
        [sliding(2, 256, 512)] * 3 + [NOTHING] * 2,
    ),
    "gemma4, wider full layers": (
        decoder("gemma4_text", 6, 8, 4, head_dim=256, global_head_dim=512, sliding_window=512),
        [sliding(4, 256, 512)] * 5 + [full(4, 512)],
    ),
    "exaone4, letters": (
        decoder("exaone4", 4, 32, 8, sliding_window=4096, sliding_window_pattern="LLLG"),
        [sliding(8, 128, 4096)] * 3 + [full(8, 128)],
    ),
    "keys and values of different size": (
        decoder("mimo_v2_flash", 2, 64, 4, head_dim=192, v_head_dim=128, sliding_window=128)
        | {"layer_types": ["full_attention"] * 2},
        [LayerShape("full", 4, 192, 128)] * 2,
    ),
    "mllama, cross-attention to the image": (
        {
            "model_type": "mllama",
            "text_config": decoder("mllama_text_model", 3, 32, 8, cross_attention_layers=[1]),
        },
        [full(8, 128), NOTHING, full(8, 128)],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_family(family: str, tmp_path: Path) -> None:
    config, expected = FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    assert list(shape.layers) == expected
    assert shape.folder == tmp_path
    assert read_model_shape(tmp_path / "config.json").layers == shape.layers
    assert read_model_shape(config).layers == shape.layers


def test_sizes_around_the_layers() -> None:
    shape = read_model_shape(decoder("llama", 32, 32, 8, torch_dtype="float16"))
    assert (shape.num_layers, shape.num_heads, shape.hidden_size) == (32, 32, 4096)
    assert (shape.vocab_size, shape.max_positions) == (32000, 131072)
    assert shape.dtype == torch.float16
    assert shape.groups() == [(32, full(8, 128))]
    assert shape.notes == ()


def test_notes_say_what_was_assumed() -> None:
    config = decoder("phi3", 1, 32, 32, hidden_size=3072, sliding_window=262144)
    notes = " ".join(read_model_shape(config | {"torch_dtype": None}).notes)
    assert "sliding_window=262144 never slides" in notes
    assert "bfloat16 is assumed" in notes
    unknown_state = decoder("newish", 2, 32, 8, layer_types=["linear_attention", "full_attention"])
    shape = read_model_shape(unknown_state)
    assert shape.layers[0].state_bytes is None
    assert "size of the recurrent state" in " ".join(shape.notes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": (
        decoder("t5", 2, 8, 8, is_encoder_decoder=True),
        "encoder-decoder model",
    ),
    "encoder by type": (decoder("bert", 2, 16, 16), "it is an encoder"),
    "encoder by head": (
        decoder("newbert", 2, 16, 16, architectures=["NewBertForMaskedLM"]),
        "it is an encoder",
    ),
    "recurrent": (decoder("mamba2", 2, 16, 16), "no attention layers"),
    "vision": (decoder("vit", 2, 16, 16) | {"vocab_size": None}, "no vocab_size"),
    "unknown kind": (
        decoder("llama", 2, 32, 8, layer_types=["full_attention", "quantum_attention"]),
        "'quantum_attention'",
    ),
    "unknown letter": (
        decoder("nemotron_h", 2, 32, 8, hybrid_override_pattern="M?"),
        "'\\?'",
    ),
    "kinds in an unknown field": (
        decoder("newish", 2, 32, 8, mixer_kinds=["retention", "attention"]),
        "mixer_kinds .*attention, retention",
    ),
    "a known field that is not read": (
        decoder("recurrent_gemma", 3, 32, 8, block_types=["recurrent", "attention"]),
        "block_types",
    ),
    "a sparse index without a latent": (
        decoder("qwen4_exp", 1, 32, 8, layer_types=["indexed_attention"]),
        "'indexed_attention'",
    ),
    "an index beside full attention": (
        decoder("qwen4_exp", 1, 32, 8, layer_types=["full_attention"], indexer_n_heads=4),
        "indexer_n_heads=4",
    ),
    "recurrent layers that are not named": (
        decoder("newish", 2, 32, 8, **MAMBA2),
        "does not say which",
    ),
    "a window that nothing places": (
        decoder("newish", 2, 32, 8, sliding_window=512),
        "which layers slide",
    ),
    "wrong number of layer_types": (
        decoder("llama", 3, 32, 8, layer_types=["full_attention"] * 2),
        "names 2 layers, but there are 3",
    ),
    "no heads": (decoder("llama", 2, 32, 8) | {"num_attention_heads": None}, "num_attention_heads"),
    "bad head count": (decoder("llama", 2, 32, 5), "not a multiple of its 5 KV heads"),
    "bad number": (decoder("llama", 2, 32, 8, head_dim="128"), "head_dim='128'"),
    "bad dtype": (decoder("llama", 2, 32, 8, torch_dtype="float64"), "dtype='float64'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_with_the_reason(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read_model_shape(config)


def test_a_decoder_of_an_encoder_family_is_read() -> None:
    shape = read_model_shape(decoder("bert", 2, 16, 16, is_decoder=True))
    assert shape.layers == (full(16, 256),) * 2


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="a config is an object"):
        read_model_shape(tmp_path)


def test_local_paths_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local("org/model")
    assert not is_local("gpt2")
    for path in ("./model", "/models/x", "a/b/c", "~/model", "config.json", tmp_path):
        assert is_local(path)
    (tmp_path / "gpt2").mkdir()
    assert is_local("gpt2")


def test_what_a_layer_keeps() -> None:
    window = sliding(2, 64, 100)
    assert [window.uncompressed_bytes(n) for n in (99, 101)] == [99 * 512, 100 * 512]
    assert linear(500).uncompressed_bytes(1000) == 500
    assert full(2, 64, state=7).uncompressed_bytes(10) == 10 * 2 * 128 * 2 + 7
    assert LayerShape("mla", latent_dim=576).uncompressed_bytes(3, element_bytes=1) == 3 * 576
    assert [layer.grows for layer in (full(1, 16), window, linear(1), NOTHING)] == [
        True, False, False, False,
    ]  # fmt: skip


def test_shards_of_a_layer() -> None:
    assert full(8, 128, state=9).shard(4) == full(2, 128, state=3)
    assert full(2, 128).shard(8) == full(1, 128)  # repeated
    assert LayerShape("mla", latent_dim=576).shard(8).latent_dim == 576
    with pytest.raises(ValueError, match="8 KV heads cannot be shared by 3 ranks"):
        full(8, 128).shard(3)


# --- weights ---------------------------------------------------------------------------------
def write_safetensors(path: Path, shape: list[int], dtype: str = "BF16", width: int = 2) -> None:
    size = width
    for extent in shape:
        size *= extent
    header = json.dumps(
        {
            "__metadata__": {"a": "b"},
            "w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_weights_on_disk_are_counted_once(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None
    write_safetensors(tmp_path / "consolidated.safetensors", [99])
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", [10, 3])
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", [5])
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = stored_weights(tmp_path)
    assert found is not None
    assert found == (70, 35)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert stored_weights(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 5}', '{"a":' * 100000])
def test_a_broken_index_of_weights_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        stored_weights(tmp_path)


def entry(shape: list[int]) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})


@pytest.mark.parametrize(
    "header",
    [
        *("[]", '{"a": 1}', '{"a": {"shape": [1]}}', '{"a":' * 100000),
        *(entry([1] * 65), entry([2**62] * 60)),  # numbers that are slow to multiply or to print
    ],
)
def test_a_weight_file_with_another_header_is_named(tmp_path: Path, header: str) -> None:
    data = struct.pack("<Q", len(header)) + header.encode()
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        stored_weights(tmp_path)


def test_a_broken_weight_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        stored_weights(tmp_path)


def test_pytorch_weights_are_counted_by_file_size(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(123))
    found = stored_weights(tmp_path)
    assert found is not None
    assert found == (123, None)


def test_parameters_of_llama_by_hand() -> None:
    shape = read_model_shape(
        decoder("llama", 2, 32, 8, intermediate_size=14336, tie_word_embeddings=True)
    )
    attention = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096
    assert estimate_parameters(shape) == 32000 * 4096 + 2 * (attention + 3 * 4096 * 14336)
    for untold in ("newish", "llama"):  # an unknown family; no intermediate_size
        assert estimate_parameters(read_model_shape(decoder(untold, 2, 32, 8))) is None


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, "bfloat16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "mxfp4"}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "something"}, None),
    ],
)
def test_dtype_of_stored_weights(quantization: dict[str, Any] | None, expected: str | None) -> None:
    config = decoder("llama", 2, 32, 8, quantization_config=quantization)
    assert weights_dtype(read_model_shape(config)) == expected


def test_families_have_the_columns_that_are_read_and_no_others() -> None:
    """A column that nobody asks for, a misspelt one for example, would do nothing."""
    package = Path(families.__file__).parents[1]
    sources = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    rows = json.loads((package / "model_shape" / "families.json").read_text(encoding="utf-8"))
    there = {name for row in rows.values() for name in row}
    assert there == set(re.findall(r'\bcolumn\("(\w+)"\)', sources))
    assert list(rows) == sorted(rows)
