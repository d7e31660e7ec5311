"""Error feedback of an engine's layers, in the metric that the checkpoint's weights say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.attention import TightAttention
from tightkv.integrations.vllm.protection import checkpoint_folder, model_layers
from tightkv.model_shape.folder_metric import QueryMetrics, query_metrics


def set_feedback(
    cfg: KVQuantConfig, impls: Mapping[str, TightAttention], vllm_config: Any
) -> str | None:
    """Give layers whose keys take it their `feedback`, and tell how many have it.

    `impls` are all compressed layers by name. What is not known is left out, never an error.
    """
    numbers = model_layers(impls)
    mine = {numbers[name]: impl for name, impl in impls.items() if impl.layout.cfg.takes_feedback}
    mine.pop(-1, None)
    if cfg.feedback == "off" or not mine:
        return None
    folder = checkpoint_folder(vllm_config)
    found = QueryMetrics(reason=folder) if isinstance(folder, str) else _metrics(folder, mine)
    reason = found.reason
    for number, metric in found.by_layer.items():
        impl = mine[number]
        if metric.shape[:2] != (impl.num_kv_heads, impl.head_size):
            reason = f"layer {number}: its heads are not those of the checkpoint"
            continue
        impl.feedback = impl.step.codec.feedback_factors(metric)
    return feedback_line(cfg, mine, reason)


def _metrics(folder: Path, layers: Mapping[int, TightAttention]) -> QueryMetrics:
    device = next(iter(layers.values())).device
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    try:
        return query_metrics(folder, layers, rank=rank, ranks=ranks, device=device)
    except RuntimeError as error:  # the device's own
        return QueryMetrics(reason=str(error))


def feedback_line(
    cfg: KVQuantConfig, layers: Mapping[int, TightAttention], reason: str | None
) -> str:
    count = sum(impl.feedback is not None for impl in layers.values())
    why = "" if reason is None else f" ({reason})"
    return (
        f"tightkv {cfg.name}: {count} of {len(layers)} layers code keys with error feedback, in "
        f"the metric of the checkpoint's query weights{why}; feedback=off turns it off"
    )
