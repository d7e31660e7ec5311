"""More bits for keys whose layers need them, from the checkpoint that an engine has loaded."""

from __future__ import annotations

from typing import Any

from tightkv.config import KVQuantConfig
from tightkv.fit.key_check import CheckedConfig, KeyCheck, not_checked, raised_layers
from tightkv.integrations.vllm.start.checkpoint import checkpoint_folder


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
