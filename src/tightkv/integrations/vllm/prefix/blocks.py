"""Block sizes of models with other layers too: all of vLLM's blocks have the same bytes.

From 0.32 on, vLLM can pack layers of different bytes into one block. In models with states, a block
then holds the pages of all compressed layers, or some states. So it needs few tokens to be as large
as a state, prefixes end in short steps, and layers of different bits can share it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from tightkv.integrations.extras import installed_version, release
from tightkv.integrations.vllm.layer_shapes import shared_layer
from tightkv.pages.layout import PageLayout

_SINCE = (0, 32)  # before, vLLM gives a block as many states as it has layers with states
_MOST_GROUPS = 24  # of states: each is looked after in each step


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


def packs(others: Sequence[Any], vllm_config: Any) -> bool:
    """Whether an engine's blocks are packed; `others` are its other layers, and their specs.

    Not where a user has chosen another layout, or a model groups its layers itself.
    """
    if not others or not all(isinstance(spec, MambaSpec) for _, spec in others):
        return False
    version = release(installed_version("vllm") or "")
    if version is None or version < _SINCE or envs.VLLM_KV_CACHE_LAYOUT is not None:
        return False
    if getattr(vllm_config.model_config, "supports_kv_cache_grouping", False):
        return False
    # Stages of a pipeline share the length of blocks, and one does not know the others' layers.
    return vllm_config.parallel_config.pipeline_parallel_size == 1


def packed_pages(
    layouts: Mapping[str, PageLayout], others: Sequence[Any], caches_prefixes: bool
) -> int:
    """Pages of each layer per block: those of all layers take as much as some states.

    As many states as leave a block no longer than vLLM's own, in which a layer has the bytes of one
    state. With fewer, blocks would be shorter, and vLLM would have more groups of layers. Without
    cached prefixes, as many as make the fewest groups.
    """
    state = max(_smallest_block(*each) for each in others)
    pages = sum(layout.page_bytes for layout in layouts.values())
    exact = max(layout.page_size * layout.exact_bytes_per_token for layout in layouts.values())
    states = max(1, pages // exact, math.ceil(len(others) / _MOST_GROUPS))
    if not caches_prefixes:
        states = max(states, min(len(layouts), len(others)))
    return math.ceil(states * state / pages)


def name_states(groups: Iterable[Any]) -> None:
    """Give groups of layers with one spec that spec.

    Where blocks are packed, vLLM gives a group the specs of its layers by their names, in which its
    workers and connectors do not see a state.
    """
    for group in groups:
        specs = list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values())
        if specs and all(spec == specs[0] for spec in specs):
            group.kv_cache_spec = specs[0]


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
    of all layers (`packs`).
    """
    cache, kinds = vllm_config.cache_config, {type(spec) for _, spec in others}
    states = {kind for kind in kinds if issubclass(kind, MambaSpec)}
    pages = {layout.page_bytes for layout in layouts.values()}
    if packed:
        count = packed_pages(layouts, others, cache.enable_prefix_caching)
    else:
        needed = max((_smallest_block(*each) for each in others), default=0)
        count = max(1, -(-needed // max(pages)))
        if (count > 1 or mixed) and len(pages) > 1:
            raise ValueError(
                "tightkv: protected layers or layer_bits in a model with other layers, whose "
                "blocks must be as large; set protected_first and protected_last to 0 and leave "
                "layer_bits out" + (", or leave sliding_windows out" if mixed else "")
            )
    if states:
        # from vLLM 0.33 on, blocks of states have multiples of so many tokens
        asked = (getattr(layer, "get_prefill_checkpoint_alignment", None) for layer, _ in others)
        unit = math.lcm(*(ask() or 1 for ask in asked if ask is not None))
        page_size = next(iter(layouts.values())).page_size
        count = align_state_blocks(count, page_size, kinds - states, vllm_config, unit)
    if any(issubclass(kind, SlidingWindowSpec) for kind in kinds):
        cache.skip_page_size_padded = count * max(pages)
    return count


def _smallest_block(layer: Any, spec: Any) -> int:
    """Bytes of the smallest block that a layer of another kind can have."""
    if isinstance(spec, SlidingWindowSpec):
        sizes = layer.attn_backend.get_supported_kernel_block_sizes()
        shortest = min(getattr(block, "base", block) for block in sizes)
        return int(spec.page_size_bytes // spec.block_size * shortest)
    if isinstance(spec, MambaSpec):  # vLLM pads it to its own blocks of attention
        spec = replace(spec, page_size_padded=None)
    return int(spec.page_size_bytes)


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
