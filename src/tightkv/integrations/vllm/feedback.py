"""Error feedback of an engine's layers, in the metric that the checkpoint's weights say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.checkpoint import checkpoint_folder
from tightkv.integrations.vllm.layer_numbers import model_layers
from tightkv.math.feedback import QueryMetric
from tightkv.model_shape.checkpoint_metric import LEAST_BITS, QueryMetrics, query_metrics

if TYPE_CHECKING:
    from tightkv.integrations.vllm.attention import TightAttention


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
    numbers = model_layers(impls, {name for name, impl in impls.items() if impl.is_draft})
    mine = {
        numbers[name]: impl
        for name, impl in impls.items()
        if _gains(impl.layout.cfg) and impl.window is None  # windows may have a RoPE of their own
    }
    mine.pop(-1, None)  # of a draft, which has weights of its own
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
            impl.feedback = impl.step.codec.feedback_factors(QueryMetric(metric), impl.device)
        else:
            reason = f"layer {number}: its heads are not those of the checkpoint"
    return _line(cfg, mine, reason)


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
