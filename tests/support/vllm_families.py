"""Tiny random models of the families that vLLM serves, and the table of what is compressed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import transformers as hf

from models import LINEAR, MOE, SHAPE, sliding
from tiny_folder import write_model
from vllm_outputs import VOCABULARY

BASE = {**SHAPE, "vocab_size": VOCABULARY}
WINDOWS = {**sliding(), "vocab_size": VOCABULARY}
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
SHARING = {**WINDOWS, **PER_LAYER, **SIX, "num_kv_shared_layers": 2}


HEADER = "| models | compressed | vLLM's own cache | |\n|---|---|---|---|\n"


class Family(NamedTuple):
    """A row of the table."""

    models: str
    job: str
    """Name of the engine that shows it."""
    note: str = ""


# Of these the engine is built here; engines of the other rows run for other tests as well.
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: hf.Qwen3Config(**BASE, head_dim=32),
    "gemma3": lambda: hf.Gemma3TextConfig(**{**WINDOWS, "head_dim": 256}),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **{**SHARING, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6}
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **{**SHARING, "head_dim": 256, "global_head_dim": 512},
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**{**WINDOWS, **MOE, "num_local_experts": 4}),
    "llama4": lambda: hf.Llama4TextConfig(
        **BASE, head_dim=32, num_local_experts=2, intermediate_size_mlp=96
    ),
    "granite": lambda: hf.GraniteMoeHybridConfig(
        **BASE,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        shared_intermediate_size=64,
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **BASE,
        **LINEAR,
        **MOE,
        head_dim=32,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4),
    "windows_only": lambda: hf.MistralConfig(**BASE, head_dim=32, sliding_window=32),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
    ),
}
ROWS = (
    Family("Llama, Mistral, Phi-3", "default"),
    Family("Qwen2", "noisy"),
    Family("Qwen3", "qwen3"),
    Family("Gemma 2", "k4v4 windows"),
    Family("Gemma 3", "gemma3", "head_dim 256"),
    Family("Gemma 3n", "gemma3n"),
    Family("Gemma 4", "gemma4", "head_dim 512 in global layers"),
    Family("gpt-oss", "gpt_oss", "with sink logits"),
    Family("Llama 4", "llama4"),
    Family("Falcon-H1", "k4v4 states", "attention and Mamba-2 in each layer"),
    Family("Granite 4, Nemotron-H", "granite", "Mamba-2"),
    Family("LFM2", "prefixes", "convolutions"),
    Family("Qwen3-Next", "qwen3_next", "gated delta nets; built here, not run"),
    Family("Bloom", "bloom"),
    Family("Mistral 7B v0.1", "windows_only"),
    Family("DeepSeek V2 and V3, Kimi K2", "latent", "latents (MLA), without rings and sinks"),
    Family("Mamba", "mamba2"),
)


def write_families(folder: Path) -> dict[str, Path]:
    return {name: write_model(folder / name, make()) for name, make in CONFIGS.items()}


def row(family: Family, told: Mapping[str, Any]) -> str:
    """The row of docs/vllm.md, by what an engine said of its layers."""
    if "error" in told:
        (reason,) = re.findall(r"no layer of this model can be compressed \((.*)\)$", told["error"])
        return f"| {family.models} | refused | {reason} | {family.note} |"
    counts = told["compressed"]
    compressed = f"{counts['own']} of {sum(counts.values()) + sum(told['kept'].values())} layers"
    if counts["shared"]:
        compressed += f", read by {counts['shared']} more"
    names = {"keeps nothing": "reading another layer's", "constant state": "with a constant state"}
    kept = ", ".join(
        f"{count} {names.get(reason, reason)}" for reason, count in sorted(told["kept"].items())
    )
    return f"| {family.models} | {compressed} | {kept} | {family.note} |"
