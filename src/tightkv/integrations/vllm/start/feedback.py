"""Error feedback of an engine's layers, in the metric that the checkpoint's weights say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightkv.config import KVQuantConfig
from tightkv.fit.checkpoint_metric import (
    LEAST_BITS,
    QueryMetrics,
    key_energies,
    query_metrics,
)
from tightkv.integrations.vllm.layer_numbers import model_layers
from tightkv.integrations.vllm.start.checkpoint import checkpoint_folder
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import balanced_scale

if TYPE_CHECKING:
    from tightkv.integrations.vllm.step.attention import TightAttention


def set_key_scales(
    cfg: KVQuantConfig,
    impls: Mapping[str, TightAttention],
    vllm_config: Any,
    rank: int,
    ranks: int,
) -> str | None:
    """Scale the key channels of layers where the checkpoint's weights say that they are uneven.

    Arguments and answer are those of `set_feedback`, which comes after this. What cannot be read
    is left as it is.
    """
    mine = _by_number(impls, lambda cfg: cfg.takes_feedback)
    folder = checkpoint_folder(vllm_config)
    if cfg.feedback == "off" or not mine or isinstance(folder, str):
        return None
    device = next(iter(mine.values())).device
    try:
        found = key_energies(folder, mine, cfg.page_size, rank=rank, ranks=ranks, device=device)
    except RuntimeError:  # the device's own
        return None
    for number, energy in found.items():
        impl, scale = mine[number], balanced_scale(energy)
        if scale is not None and energy.shape == (impl.num_kv_heads, impl.head_size):
            impl.use_scale(scale)
    count = sum(impl.key_scale is not None for impl in mine.values())
    return f"tightkv {cfg.name}: key channels of {count} layers are scaled" if count else None


def set_feedback(
    cfg: KVQuantConfig,
    impls: Mapping[str, TightAttention],
    vllm_config: Any,
    rank: int,
    ranks: int,
) -> str | None:
    """Give layers whose keys gain by it their `feedback`; returns how many have it, as a line.

    `impls` are all compressed layers by name; `rank` is that among the tensor-parallel ones. A
    metric that is not known leaves a layer without feedback and is never an error.
    """
    mine = _by_number(impls, _gains)
    if cfg.feedback == "off" or not mine:
        return None
    folder = checkpoint_folder(vllm_config)
    if isinstance(folder, str):
        found = QueryMetrics(reason=folder)
    else:
        found = _metrics(folder, mine, rank, ranks)
    reason = found.reason
    for number, metric in found.by_layer.items():
        impl = mine[number]
        if metric.shape[:2] == (impl.num_kv_heads, impl.head_size):
            own = QueryMetric(metric).scaled(impl.key_scale)
            impl.feedback = impl.step.codec.feedback_factors(own, impl.device)
        else:
            reason = f"layer {number}: its heads are not those of the checkpoint"
    return _line(cfg, mine, reason)


def _by_number(
    impls: Mapping[str, TightAttention], wanted: Callable[[KVQuantConfig], bool]
) -> dict[int, TightAttention]:
    """Without windows, which may have a RoPE of their own, and drafts, which have own weights."""
    numbers = model_layers(impls, {name for name, impl in impls.items() if impl.is_draft})
    mine = {
        numbers[name]: impl
        for name, impl in impls.items()
        if wanted(impl.layout.cfg) and impl.window is None
    }
    mine.pop(-1, None)
    return mine


def _gains(cfg: KVQuantConfig) -> bool:
    return cfg.takes_feedback and cfg.key_bits >= LEAST_BITS


def _metrics(
    folder: Path, layers: Mapping[int, TightAttention], rank: int, ranks: int
) -> QueryMetrics:
    device = next(iter(layers.values())).device
    try:
        return query_metrics(folder, layers, rank=rank, ranks=ranks, device=device)
    except RuntimeError as error:  # the device's own
        return QueryMetrics(reason=str(error))


def _line(cfg: KVQuantConfig, layers: Mapping[int, TightAttention], reason: str | None) -> str:
    count = sum(impl.feedback is not None for impl in layers.values())
    why = "" if reason is None else f" ({reason})"
    return (
        f"tightkv {cfg.name}: {count} of {len(layers)} layers code keys with error feedback, in "
        f"the metric of the checkpoint's query weights{why}; feedback=off turns it off"
    )
