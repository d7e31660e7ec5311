"""A model folder as save_pretrained writes it: random weights and a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig, PreTrainedTokenizerFast

from models import CONVOLUTIONS

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"


def write_tiny_folder(folder: Path, *, template: str | None = None, **changes: Any) -> Path:
    """One token per byte; weights so large that far tokens change the answer."""
    config = LlamaConfig(
        **{
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            **changes,
        }
    )
    byte_tokenizer(template).save_pretrained(folder)
    return write_model(folder, config)


def write_model(folder: Path, config: Any, change: Callable[[Any], None] | None = None) -> Path:
    """Random weights of any family, changed by `change`, without a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of `write_tiny_folder`'s queries, keys and values."""
    make, rank, tensors = torch.Generator().manual_seed(seed), 8, {}
    outputs = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    for layer in range(2):
        for name, size in outputs.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            for side, shape in (("A", (rank, 64)), ("B", (size, rank))):
                tensors[f"{path}_{side}.weight"] = 0.2 * torch.randn(shape, generator=make)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*outputs]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def plant_key_bias(folder: Path, layer: int, size: float = 10.0) -> None:
    """Give a layer a query and a key bias so large that 4-bit keys drown its scores."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for side in "qk":
        tensors[f"model.layers.{layer}.self_attn.{side}_proj.bias"].fill_(size)
    save_file(tensors, path, metadata={"format": "pt"})


def write_uneven_copy(model: Path, folder: Path) -> Path:
    """The same function, but a few channels of keys are 16 times as large, of queries as small."""
    copytree(model, folder)
    half = json.loads((folder / "config.json").read_text())["head_dim"] // 2
    large = [channel + side for channel in (3, 7) for side in (0, half)]  # pairs of RoPE
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        factor = {"k_proj": 16.0, "q_proj": 1 / 16}.get(name.split(".")[-2])
        if factor is not None:
            tensor.unflatten(0, (-1, 2 * half))[:, large] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lfm2_for_vllm(hidden_size: int, **shape: Any) -> Lfm2Config:
    """Two heads; vLLM reads the names of older files."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Lfm2Config(
        **{**shape, **CONVOLUTIONS, **heads, "hidden_size": hidden_size},
        conv_dim=hidden_size,
        block_dim=hidden_size,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def write_uneven(folder: Path, source: Path, head_dim: int, factor: float = 32.0) -> Path:
    """The same model, but that a few channels of its keys are large and those of queries small."""
    copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        for which, size in (("k_proj.weight", factor), ("q_proj.weight", 1 / factor)):
            if name.endswith(which):  # the pairs of RoPE
                tensor.unflatten(0, (-1, head_dim))[:, [1, 1 + head_dim // 2]] *= size
    save_file(tensors, path, {"format": "pt"})
    return folder
