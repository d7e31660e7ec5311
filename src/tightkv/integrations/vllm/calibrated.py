"""The calibration that an engine's config names, checked against the checkpoint it has loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tightkv.calibration import Calibration, find_for_folder
from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.protection import checkpoint_folder


def find_for_engine(cfg: KVQuantConfig, vllm_config: Any) -> Calibration | None:
    """None where no calibration is named, or no ready one fits; another model's is refused."""
    if not cfg.calibration:
        return None
    name, folder = vllm_config.model_config.model, checkpoint_folder(vllm_config)
    if isinstance(folder, str):
        raise ValueError(
            f"tightkv: calibration={cfg.calibration!r} cannot be compared with the model: "
            f"{folder}. Leave calibration out"
        )
    return find_for_folder(cfg, folder, name)


def without_bits(cfg: KVQuantConfig) -> str:
    """What is said where layers cannot have bits of their own."""
    return (
        f"tightkv {cfg.name}: the calibration's bits of layers are left out, for vLLM's blocks are "
        "of one size in models with layers of other kinds; keys are coded in its metrics"
    )


def own_heads(metric: Tensor, heads: int, rank: int, ranks: int) -> Tensor:
    """The metrics of the KV heads that a rank of tensor parallelism has, `heads` of them.

    With more ranks than KV heads, neighbouring ranks have the same one.
    """
    first = rank * len(metric) // ranks
    return metric[first : first + heads]
