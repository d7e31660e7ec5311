"""The calibration that an engine's config names, checked against the checkpoint it has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Calibration, find_for_folder
from tightkv.integrations.vllm.layer_numbers import model_layers
from tightkv.integrations.vllm.start.checkpoint import checkpoint_folder
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric

if TYPE_CHECKING:
    from tightkv.integrations.vllm.step.attention import TightAttention


def find_for_engine(cfg: KVQuantConfig, vllm_config: Any) -> Calibration | None:
    """None where no calibration is named, or no bundled one fits; another model's is refused."""
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
        f"tightkv {cfg.name}: the calibration's bits of layers are ignored, because all of vLLM's "
        "blocks have one size in models with layers of other kinds; its metrics are used"
    )


def set_calibrated_feedback(
    found: Calibration, impls: Mapping[str, TightAttention], rank: int, ranks: int
) -> None:
    """Code keys of all compressed layers, by name, in the metrics of the KV heads of this rank."""
    numbers = model_layers(impls, {name for name, impl in impls.items() if impl.is_draft})
    for name, impl in impls.items():
        if numbers[name] in found.metrics:
            whole = found.metrics[numbers[name]].value
            own = QueryMetric(own_heads(whole, impl.num_kv_heads, rank, ranks))
            own = own.scaled(impl.key_scale)
            impl.feedback = impl.step.codec.feedback_factors(own, impl.device)


def set_centers(
    found: Calibration, impls: Mapping[str, TightAttention], rank: int, ranks: int
) -> None:
    """Hold tokens of all compressed layers, by name, relative to the centers of their KV heads."""
    numbers = model_layers(impls, {name for name, impl in impls.items() if impl.is_draft})
    for name, impl in impls.items():
        if (whole := found.centers.get(numbers[name])) is not None:
            key, value = (
                own_heads(x, impl.num_kv_heads, rank, ranks) for x in (whole.key, whole.value)
            )
            impl.use_centers(Centers(key, value))


def own_heads(metric: Tensor, heads: int, rank: int, ranks: int) -> Tensor:
    """Metrics or centers of the KV heads that a rank of tensor parallelism has, `heads` of them.

    With more ranks than KV heads, neighbouring ranks have the same one.
    """
    first = rank * len(metric) // ranks
    return metric[first : first + heads]
