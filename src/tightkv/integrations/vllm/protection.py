"""More bits for keys whose layers need them, from the checkpoint that an engine has loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tightkv.config import KVQuantConfig
from tightkv.key_check import CheckedConfig, KeyCheck, not_checked, raised_layers


def check_keys(cfg: KVQuantConfig, vllm_config: Any) -> CheckedConfig:
    """The config with the bits of layers that need more.

    All ranks and stages read the same files, and so agree.
    """
    if not cfg.protect_keys or cfg.key_bits == 16:
        return CheckedConfig(cfg)
    folder = checkpoint_folder(vllm_config)
    if isinstance(folder, str):
        return CheckedConfig(cfg, not_checked(cfg, folder))
    return KeyCheck(folder).protect(cfg)


def checkpoint_folder(vllm_config: Any) -> Path | str:
    """Where the loaded weights lie, or why that is not known."""
    load, model = vllm_config.load_config, vllm_config.model_config
    if load.load_format == "dummy":
        return "its weights are random (load_format dummy)"
    path = Path(model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return f"{model.model!r} is a file; folders with safetensors files are read"
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (ImportError, OSError, ValueError):
        return f"{model.model!r} is neither a folder nor in the hub's local cache"
    return Path(found)


def in_equal_blocks(cfg: KVQuantConfig, checked: CheckedConfig) -> CheckedConfig:
    """`cfg` as it is, where layers with more bits would have pages that vLLM cannot have.

    Its blocks are of one size in models with layers of other kinds.
    """
    return CheckedConfig(
        cfg,
        f"tightkv {cfg.name}: by its weights, this model needs "
        f"{raised_layers(cfg, checked.config)}, but vLLM's blocks are of one size in models with "
        f"layers of other kinds: nothing is changed, and attention scores may be noisy. "
        f"key_bits=8 gives all layers 8-bit keys; protect_keys=false skips this check",
    )


def model_layers(names: Iterable[str]) -> dict[str, int]:
    """The number of each layer in the model; -1 where it has none.

    A number that came before is that of a layer of another model, a draft of the first.
    """
    numbers: dict[str, int] = {}
    for name in names:
        number = layer_number(name)
        numbers[name] = -1 if number in numbers.values() else number
    return numbers


def layer_number(name: str) -> int:
    """5 of vLLM's model.layers.5.self_attn.attn; -1 of a name without a number."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)
