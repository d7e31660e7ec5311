"""EnginePlan: layouts of the layers that an engine compresses, and what it says of them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.platforms import current_platform

from tightkv.fit import Fit
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.integrations.vllm.prefix.blocks import pages_per_block
from tightkv.integrations.vllm.start.choose import Chosen, is_mixed
from tightkv.integrations.vllm.start.engine_checks import (
    WAITS_FOR_DEVICE,
    rings_obstacle,
    speculative_tokens,
)
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.batch_split import Limits
from tightkv.integrations.vllm.step.ring_table import SAVED_SINKS, ring_size
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.pages.layout import MAX_TOKENS, PageLayout

logger = logging.getLogger("vllm.tightkv")
_ROWS_SHARE = 20  # the exact rings take at most a 20th of the device's memory


@dataclass(frozen=True)
class EnginePlan:
    """What the layers of one engine (one worker of it) get."""

    options: EngineOptions
    chosen: Chosen
    layouts: dict[str, PageLayout]
    limits: Limits
    pages_per_block: int
    """Pages per block of vLLM's: more than one where other layers' blocks are larger."""

    def line(self) -> str:
        """Preset, bytes per token, and what that is worth."""
        layers = (
            LayerBytes.of_layout(layout, window=self.chosen.layers[name].sliding_window)
            for name, layout in self.layouts.items()
        )
        size, parts, rows = CacheBytes(tuple(layers)), [], self.limits.rows
        packed, plain = size.bytes_per_token, size.bf16_bytes_per_token
        rings = _row_bytes(self.layouts, self.limits.decoding) * rows
        drafts = len(self.chosen.drafts)
        told = f" ({drafts} of them a draft model's)" if drafts else ""
        windows = [layer for layer in size.layers if not layer.shape.grows]
        if count := len(size.layers) - len(windows):
            parts.append(
                f"{packed:,.0f} bytes per token in {count} layers{told}, "
                f"{plain / packed:.2f} times the tokens of a 16-bit cache ({plain:,} bytes)"
            )
        if windows:
            most = sum(layer.total_bytes(MAX_TOKENS) for layer in windows)
            exact = sum(layer.shape.uncompressed_bytes(MAX_TOKENS) for layer in windows)
            parts.append(
                f"{len(windows)} sliding windows take at most {most / 1024:,.0f} KiB per sequence "
                f"with its exact ring, in 16 bits {exact / 1024:,.0f} KiB"
            )
        parts.append(f"exact rings for {rows} sequences take {rings / 2**20:,.1f} MiB")
        return f"tightkv {self.options.config.name}: {'; '.join(parts)}"


def make_plan(options: EngineOptions, vllm_config: Any, chosen: Chosen, found: Fit) -> EnginePlan:
    """Layouts of the layers that are compressed, with the bits of their fit."""
    layouts = chosen.layouts({number: own.cfg for number, own in found.layers.items()})
    most, decoding = vllm_config.scheduler_config.max_num_seqs, 1 + speculative_tokens(vllm_config)
    if rings_obstacle(vllm_config) is not None:
        rows = 0
    elif options.exact_rows is not None:
        rows = min(options.exact_rows, most)
    else:
        memory = current_platform.get_device_total_memory() // _ROWS_SHARE
        rows = max(0, min(most, memory // _row_bytes(layouts, decoding)))
    mixed = is_mixed(chosen.layers)
    pages = pages_per_block(layouts, chosen.others, vllm_config, mixed, chosen.packed)
    limits = Limits(most, rows, decoding)
    return EnginePlan(replace(options, config=found.cfg), chosen, layouts, limits, pages)


def _row_bytes(layouts: Mapping[str, PageLayout], decoding: int) -> int:
    """Bytes of a ring, its sinks and the saved sinks that go with it, in all layers."""
    return sum(
        layout.sequence_bytes(ring_size(layout.cfg, decoding - 1))
        + SAVED_SINKS * layout.cfg.sinks * layout.exact_bytes_per_token
        for layout in layouts.values()
    )


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
