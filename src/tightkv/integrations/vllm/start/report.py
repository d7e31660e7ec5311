"""What an engine says at its start about the layers that are compressed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tightkv.fit import Fit
from tightkv.integrations.vllm.start.engine_checks import WAITS_FOR_DEVICE, rings_obstacle
from tightkv.integrations.vllm.start.engine_plan import EnginePlan
from tightkv.integrations.vllm.step.attention import TightAttention

logger = logging.getLogger("vllm.tightkv")


def report(
    plan: EnginePlan,
    found: Fit,
    impls: Mapping[str, TightAttention],
    slow: Mapping[str, list[str]],
    vllm_config: Any,
) -> None:
    """Log the plan and the fit, and what is slow; the first of all workers does."""
    if vllm_config.parallel_config.rank != 0:
        return
    for line in (found.calibration_line, found.keys_line):
        if line is not None:
            logger.warning(line)
    logger.info(plan.line())
    if (why := rings_obstacle(vllm_config)) is not None:
        logger.warning("tightkv: the newest tokens are read from their codes, for %s", why)
    for note in found.notes:
        logger.info(note)
    for reason, names in slow.items():
        logger.warning("tightkv, %s: %s", _some(names, len(impls)), reason)
    blocked = cuda_graph_obstacle(impls)
    if blocked is not None and not vllm_config.model_config.enforce_eager:
        logger.warning(blocked)


def cuda_graph_obstacle(impls: Mapping[str, TightAttention]) -> str | None:
    """Why vLLM cannot capture CUDA graphs of decoding with these layers; None if it can."""
    if all(impl.capturable or impl.device.type != "cuda" for impl in impls.values()):
        return None
    plain = [name for name, impl in impls.items() if not impl.kernels.TAKES.graphs]
    if not plain:
        return WAITS_FOR_DEVICE
    return (
        f"tightkv: no CUDA graphs, {_some(plain, len(impls))} run in plain torch; choose bits and "
        "a method that have kernels (of protected layers: protected_bits=8) to have them"
    )


def _some(names: Sequence[str], of: int) -> str:
    """All layers, or so many of them with the first few by name."""
    if len(names) == of:
        return f"all {of} layers"
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} of {of} layers ({listed})"
