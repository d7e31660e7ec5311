"""Block sizes of models with other layers too: all of vLLM's blocks have the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from tightkv.integrations.vllm.layer_shapes import shared_layer
from tightkv.integrations.vllm.prefix.packed_blocks import packed_pages
from tightkv.pages.layout import PageLayout


def other_specs(
    layouts: Mapping[str, PageLayout], layers: Mapping[str, Any], vllm_config: Any
) -> list[Any]:
    """(layer, spec) of layers that are not compressed and have a cache of their own."""
    own = [
        layer
        for name, layer in layers.items()
        if name not in layouts and shared_layer(layer) is None
    ]
    specs = [(layer, layer.get_kv_cache_spec(vllm_config)) for layer in own]
    return [(layer, spec) for layer, spec in specs if spec is not None]


def pages_per_block(
    layouts: Mapping[str, PageLayout],
    others: Sequence[Any],
    vllm_config: Any,
    mixed: bool,
    packed: bool = False,
) -> int:
    """Pages per block: enough for the smallest block of any layer that is not compressed.

    vLLM's blocks are of one size. The smallest block of a sliding-window layer is the shortest that
    its attention can have, that of linear attention its states; the rest is padding. `mixed`:
    layers of `layouts` have full attention and sliding windows. `packed`: a block holds the pages
    of all layers (`packed_blocks`).
    """
    if packed:
        count = packed_pages(layouts, others, vllm_config.cache_config.enable_prefix_caching)
        page_size = next(iter(layouts.values())).page_size
        unit = checkpoint_alignment(layer for layer, _ in others)
        return align_state_blocks(count, page_size, set(), vllm_config, unit)
    needed, kinds = 0, set()
    for layer, spec in others:
        kinds.add(type(spec))
        size = spec.page_size_bytes
        if isinstance(spec, SlidingWindowSpec):
            sizes = layer.attn_backend.get_supported_kernel_block_sizes()
            shortest = min(getattr(block, "base", block) for block in sizes)
            size = size // spec.block_size * shortest
        elif isinstance(spec, MambaSpec):  # padded to vLLM's own blocks of attention
            size = replace(spec, page_size_padded=None).page_size_bytes
        needed = max(needed, size)
    pages = {layout.page_bytes for layout in layouts.values()}
    count = max(1, -(-needed // max(pages)))
    if (count > 1 or mixed) and len(pages) > 1:
        raise ValueError(
            "tightkv: protected layers or layer_bits in a model with other layers, whose blocks "
            "must be as large; set protected_first and protected_last to 0 and leave layer_bits out"
            + (", or leave sliding_windows out" if mixed else "")
        )
    states = {kind for kind in kinds if issubclass(kind, MambaSpec)}
    if states:
        page_size = next(iter(layouts.values())).page_size
        unit = checkpoint_alignment(layer for layer, _ in others)
        count = align_state_blocks(count, page_size, kinds - states, vllm_config, unit)
    if any(issubclass(kind, SlidingWindowSpec) for kind in kinds):
        vllm_config.cache_config.skip_page_size_padded = count * max(pages)
    return count


def checkpoint_alignment(layers: Iterable[Any]) -> int:
    """The number of tokens whose multiples blocks of states have (from vLLM 0.33 on)."""
    asked = (getattr(layer, "get_prefill_checkpoint_alignment", None) for layer in layers)
    return math.lcm(*(ask() or 1 for ask in asked if ask is not None))


def align_state_blocks(
    pages: int, page_size: int, others: set[type], vllm_config: Any, alignment: int = 1
) -> int:
    """Pages per block, with blocks of states as long as ours: prefixes end where both do.

    With other boundaries vLLM's hits could end inside a page, where no sequence can go on, or
    states would not be kept where vLLM looks for them (`alignment`).
    """
    cache = vllm_config.cache_config
    cache.mamba_page_size_padded = None  # to our blocks, by vLLM itself
    if not cache.enable_prefix_caching:
        return pages
    if cache.mamba_cache_mode == "align" and others:
        listed = ", ".join(sorted(kind.__name__ for kind in others))
        raise ValueError(
            f"tightkv with prefix caching in a model with states and other layers of its own "
            f"({listed}): prefixes could end inside a page; add --no-enable-prefix-caching"
        )
    if cache.mamba_cache_mode == "all":  # a state every block, at the end of a kernel's chunk
        alignment = vllm_config.model_config.get_mamba_chunk_size() or 1
    unit = math.lcm(alignment, page_size) // page_size
    pages = -(-pages // unit) * unit
    cache.mamba_block_size = pages * page_size
    return pages
