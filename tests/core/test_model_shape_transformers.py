"""The reader against transformers itself: real caches of tiny models, and real class defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv.model_shape import estimate_parameters, read_model_shape
from tightkv.model_shape.families import DEFAULTS, NESTED_DEFAULTS
from tightkv.tools.cli import main
from tightkv.tools.cli.plan import hub

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
MLA |= {
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,
}
MLA |= {"num_experts_per_tok": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 8, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

CACHES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"sliding_window": 8, "head_dim": 32},
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 7},
    "gpt_oss": {"sliding_window": 8, "head_dim": 16, **EXPERTS},
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2, "mamba_d_state": 8},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, **MAMBA2, **EXPERTS},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "head_dim": 16},
    "falcon": {"num_key_value_heads": None},
    "gemma4_text": {
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
    },
}


def tiny_config(model_type: str, extra: dict[str, Any]) -> Any:
    values = {k: v for k, v in {**TINY, **extra}.items() if v is not None}
    return transformers.AutoConfig.for_model(model_type, **values, dtype="bfloat16")


def cache_bytes(layer: Any) -> int:
    """Bytes of the tensors that one layer of a transformers cache holds."""
    held = [value for name, value in vars(layer).items() if not name.startswith("_")]
    flat: list[Any] = []
    for value in held:
        flat += value.values() if isinstance(value, dict) else [value]
    return sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("model_type", CACHES)
def test_shapes_are_what_a_real_cache_holds(model_type: str) -> None:
    tokens, config = 20, tiny_config(model_type, CACHES[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(torch.randint(3, 60, (1, tokens)), use_cache=True).past_key_values
    shape = read_model_shape(config)
    assert len(cache.layers) == shape.num_layers
    for held, layer in zip(cache.layers, shape.layers, strict=True):
        # transformers drops the oldest token of a full window before the next one comes
        kept = tokens if layer.window is None else layer.window - 1
        assert cache_bytes(held) == layer.uncompressed_bytes(kept), layer


@pytest.mark.parametrize("model_type", sorted(set(DEFAULTS) - {"granitemoehybrid"}))
def test_layers_follow_without_layer_types(model_type: str) -> None:
    """Older config files have no layer_types, and leave out what the class knows."""
    config = transformers.CONFIG_MAPPING[model_type]()
    values = config.to_dict()
    for name in ("layer_types", "layers_block_type", "per_layer_config", *DEFAULTS[model_type]):
        values.pop(name, None)
    assert read_model_shape(values).layers == read_model_shape(config).layers


@pytest.mark.parametrize("model_type", NESTED_DEFAULTS)
def test_defaults_of_nested_configs_are_those_of_the_class(model_type: str) -> None:
    real = transformers.CONFIG_MAPPING[model_type]().to_dict()
    ours = DEFAULTS.get(model_type, {}) | NESTED_DEFAULTS[model_type]
    shared = ours.keys() & real.keys()
    assert len(shared) >= 6
    assert {name: ours[name] for name in shared} == {name: real[name] for name in shared}


ESTIMATES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 64},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "falcon": {"num_key_value_heads": None},
    "starcoder2": {},
    "olmo3": {},
}


@pytest.mark.parametrize("model_type", ESTIMATES)
def test_estimate_is_close_to_the_real_parameter_count(model_type: str) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    config = tiny_config(model_type, ESTIMATES[model_type] | sizes)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert estimate_parameters(read_model_shape(config)) == pytest.approx(real, rel=0.01)


# --- the command line's use of transformers ---
def test_hub_id_that_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no-such-org/no-such-model"]) == 2  # the tests run offline
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'no-such-org/no-such-model' is no local folder" in error
    assert "give a local folder" in error


def test_config_through_transformers_and_its_parameter_count(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    transformers.LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(tmp_path)
    config = hub.load_hub_config(str(tmp_path))
    matrices = 2 * 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48)
    assert read_model_shape(config).name == str(tmp_path)
    assert hub.count_parameters(config) == matrices + 5 * 32  # and five norms
    assert hub.count_parameters(tmp_path) == matrices + 5 * 32
    assert hub.count_parameters(tmp_path / "missing") is None


def test_plan_counts_the_weights_of_a_family_without_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config("bamba", CACHES["bamba"])
    config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpu", "T4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {"bytes": 2 * model.num_parameters(), "dtype": "bfloat16", "source": "counted"}
    assert data["weights"] == expected
    assert [group["kind"] for group in data["model"]["layers"]] == ["linear", "full"]
