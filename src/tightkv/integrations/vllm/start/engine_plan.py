"""EnginePlan: layouts of the layers that an engine compresses, and what that is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.platforms import current_platform

from tightkv.fit import Fit
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.integrations.vllm.prefix.blocks import pages_per_block
from tightkv.integrations.vllm.start.choose import Chosen
from tightkv.integrations.vllm.start.engine_checks import rings_obstacle, speculative_tokens
from tightkv.integrations.vllm.step.ring_table import SAVED_SINKS, ring_size
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.pages.layout import MAX_TOKENS, PageLayout

_ROWS_SHARE = 20  # the exact rings take at most a 20th of the device's memory


@dataclass(frozen=True)
class EnginePlan:
    """What the layers of one engine (one worker of it) get."""

    options: EngineOptions
    chosen: Chosen
    layouts: dict[str, PageLayout]
    rows: int
    pages_per_block: int
    """Pages per block of vLLM's: more than one where other layers' blocks are larger."""
    taken_back: int
    """Tokens that a sequence may lose: those that a step drafts."""

    def line(self) -> str:
        """Preset, bytes per token, and what that is worth."""
        layers = (
            LayerBytes.of_layout(layout, window=self.chosen.layers[name].sliding_window)
            for name, layout in self.layouts.items()
        )
        size, parts = CacheBytes(tuple(layers)), []
        packed, plain = size.bytes_per_token, size.bf16_bytes_per_token
        rings = _row_bytes(self.layouts, self.taken_back) * self.rows
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
        parts.append(f"exact rings for {self.rows} sequences take {rings / 2**20:,.1f} MiB")
        return f"tightkv {self.options.config.name}: {'; '.join(parts)}"


def make_plan(options: EngineOptions, vllm_config: Any, chosen: Chosen, found: Fit) -> EnginePlan:
    """Layouts of the layers that are compressed, with the bits of their fit."""
    layouts = chosen.layouts({number: own.cfg for number, own in found.layers.items()})
    return EnginePlan(
        replace(options, config=found.cfg),
        chosen,
        layouts,
        exact_rows(options, vllm_config, layouts),
        pages_per_block(layouts, chosen.others, vllm_config, chosen.mixed, chosen.packed),
        speculative_tokens(vllm_config),
    )


def exact_rows(options: EngineOptions, vllm_config: Any, layouts: dict[str, PageLayout]) -> int:
    """How many sequences can have an exact ring at a time."""
    if rings_obstacle(vllm_config) is not None:
        return 0
    most: int = vllm_config.scheduler_config.max_num_seqs
    if options.exact_rows is not None:
        return min(options.exact_rows, most)
    memory = current_platform.get_device_total_memory() // _ROWS_SHARE
    return max(0, min(most, memory // _row_bytes(layouts, speculative_tokens(vllm_config))))


def _row_bytes(layouts: Mapping[str, PageLayout], taken_back: int) -> int:
    """Bytes of a ring, its sinks and the saved sinks that go with it, in all layers."""
    return sum(
        layout.sequence_bytes(ring_size(layout.cfg, taken_back))
        + SAVED_SINKS * layout.cfg.sinks * layout.exact_bytes_per_token
        for layout in layouts.values()
    )
