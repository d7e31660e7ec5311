"""EnginePlan: layouts of the layers that an engine compresses, and what that is worth."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.platforms import current_platform

from tightkv.integrations.vllm.layer_numbers import model_layers
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.integrations.vllm.start.engine_checks import rings_obstacle
from tightkv.integrations.vllm.step.ring_table import SAVED_SINKS
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.pages.layout import MAX_TOKENS, PageLayout, page_layout

_ROWS_SHARE = 20  # the exact rings take at most a 20th of the device's memory


@dataclass(frozen=True)
class EnginePlan:
    """What the layers of one engine (one worker of it) get."""

    options: EngineOptions
    layouts: dict[str, PageLayout]
    rows: int
    pages_per_block: int = 1
    """Pages per block of vLLM's: more than one where other layers' blocks are larger."""
    drafts: frozenset[str] = frozenset()
    """Layers of a speculator's model."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """Layers with a sliding window, and its tokens."""

    @property
    def size(self) -> CacheBytes:
        return _size(self.layouts, self.windows)

    @property
    def page_bytes(self) -> set[int]:
        return {layout.page_bytes for layout in self.layouts.values()}

    def line(self) -> str:
        """Preset, bytes per token, and what that is worth."""
        size, parts = self.size, []
        packed, plain = size.bytes_per_token, size.bf16_bytes_per_token
        rings = _row_bytes(self.layouts) * self.rows
        drafts = f" ({len(self.drafts)} of them a draft model's)" if self.drafts else ""
        windows = [layer for layer in size.layers if not layer.shape.grows]
        if count := len(size.layers) - len(windows):
            parts.append(
                f"{packed:,.0f} bytes per token in {count} layers{drafts}, "
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


def make_plan(
    options: EngineOptions,
    vllm_config: Any,
    chosen: Mapping[str, Any],
    place: tuple[int, int],
    drafts: Collection[str] = (),
) -> EnginePlan:
    """Layouts of the layers that are compressed; `place` is that of the first of them.

    Layers of `drafts` have bits of their own in no case.
    """
    dtype, numbers = vllm_config.model_config.dtype, model_layers(chosen, drafts)
    (first, count), cfg = place, options.config
    own = [name for name in chosen if name not in drafts]
    configs = {
        name: cfg.for_layer(first + index, count, numbers[name]) for index, name in enumerate(own)
    }
    plain = cfg.replace(protected_first=0, protected_last=0, layer_bits="").for_layer(0, 1)
    layouts = {
        name: page_layout(
            configs.get(name, plain),
            layer.num_kv_heads,
            layer.head_size,
            dtype,
        )
        for name, layer in chosen.items()
    }
    rows = exact_rows(options, vllm_config, layouts)
    windows = {
        name: layer.sliding_window
        for name, layer in chosen.items()
        if layer.sliding_window is not None
    }
    own_drafts = frozenset(chosen.keys() & set(drafts))
    return EnginePlan(options, layouts, rows, drafts=own_drafts, windows=windows)


def exact_rows(options: EngineOptions, vllm_config: Any, layouts: dict[str, PageLayout]) -> int:
    """How many sequences can have an exact ring at a time."""
    if rings_obstacle(vllm_config) is not None:
        return 0
    most: int = vllm_config.scheduler_config.max_num_seqs
    if options.exact_rows is not None:
        return min(options.exact_rows, most)
    memory = current_platform.get_device_total_memory() // _ROWS_SHARE
    return max(0, min(most, memory // _row_bytes(layouts)))


def _row_bytes(layouts: Mapping[str, PageLayout]) -> int:
    """Bytes of a ring, its sinks and the saved sinks that go with it, in all layers."""
    sinks = sum(layout.cfg.sinks * layout.exact_bytes_per_token for layout in layouts.values())
    return _size(layouts, {}).bytes_per_sequence + SAVED_SINKS * sinks


def _size(layouts: Mapping[str, PageLayout], windows: Mapping[str, int]) -> CacheBytes:
    return CacheBytes(
        tuple(LayerBytes.of_layout(x, window=windows.get(name)) for name, x in layouts.items())
    )
