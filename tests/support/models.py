"""Tiny random-weight models of many families, with weights large enough that attention matters."""

from typing import Any

import torch
import transformers as hf

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MOE = {"num_experts_per_tok": 2}
MAMBA = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}


def sliding(**options: Any) -> dict[str, Any]:
    return {**SHAPE, "head_dim": 32, "sliding_window": 16, "layer_types": ALTERNATING, **options}


FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**SHAPE, head_dim=32),
    "qwen2": lambda: hf.Qwen2Config(**SHAPE),
    "qwen3": lambda: hf.Qwen3Config(**SHAPE, head_dim=32),
    "gemma2": lambda: hf.Gemma2Config(**SHAPE, head_dim=32, sliding_window=16),
    "gemma3": lambda: hf.Gemma3TextConfig(**sliding()),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **sliding(global_head_dim=32, vocab_size_per_layer_input=97, hidden_size_per_layer_input=16)
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**sliding(num_local_experts=4, **MOE)),
    "lfm2": lambda: hf.Lfm2Config(**SHAPE, **CONVOLUTIONS),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **SHAPE,
        **LINEAR,
        **MOE,
        head_dim=32,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**SHAPE, **LINEAR, head_dim=32),
    "falcon_h1": lambda: hf.FalconH1Config(**SHAPE, **MAMBA),
    "llama4": lambda: hf.Llama4TextConfig(
        **SHAPE, head_dim=32, num_local_experts=2, intermediate_size_mlp=96
    ),
}


def tiny(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """A random model whose logits depend on far tokens."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="tightkv")
    return model.to(dtype).eval()


def prompt(rows: int = 1, count: int = 40, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (rows, count), generator=generator)
