"""Blocks that hold the pages of all compressed layers, or some states, in models with states.

vLLM can pack layers of different bytes into one block. A block then needs few tokens to be as large
as a state, so that prefixes end in short steps, and layers of different bits can share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm import envs
from vllm.v1.kv_cache_interface import MambaSpec

from tightkv.integrations.extras import installed_version
from tightkv.pages.layout import PageLayout

_SINCE = (0, 32)  # before, vLLM gives a block as many states as it has layers with states
_MOST_GROUPS = 24  # of states: each is looked after in each step
_PLANNING = "vllm.v1.core.kv_cache_planning"  # from 0.33 on


def packs(others: Sequence[Any], vllm_config: Any) -> bool:
    """Whether an engine's blocks are packed; `others` are its other layers, and their specs.

    Not where a user has chosen another layout, or a model groups its layers itself.
    """
    if not others or not all(isinstance(spec, MambaSpec) for _, spec in others):
        return False
    version = (installed_version("vllm") or "").split(".")
    if tuple(map(int, version[:2])) < _SINCE or envs.VLLM_KV_CACHE_LAYOUT is not None:
        return False
    if getattr(vllm_config.model_config, "supports_kv_cache_grouping", False):
        return False
    # Stages of a pipeline share the length of blocks, and one does not know the others' layers.
    return vllm_config.parallel_config.pipeline_parallel_size == 1


def state_bytes(others: Iterable[Any]) -> int:
    """Bytes of the largest state, without vLLM's padding to its own blocks of attention."""
    specs = (spec for _, spec in others if isinstance(spec, MambaSpec))
    return max(replace(spec, page_size_padded=None).page_size_bytes for spec in specs)


def packed_pages(
    layouts: Mapping[str, PageLayout], others: Sequence[Any], caches_prefixes: bool
) -> int:
    """Pages of each layer per block: those of all layers take as much as some states.

    As many states as leave a block no longer than vLLM's own, in which a layer has the bytes of one
    state. With fewer, blocks would be shorter, and vLLM would have more groups of layers. Without
    cached prefixes, as many as make the fewest groups.
    """
    state = state_bytes(others)
    pages = sum(layout.page_bytes for layout in layouts.values())
    exact = max(layout.page_size * layout.exact_bytes_per_token for layout in layouts.values())
    states = max(1, pages // exact, math.ceil(len(others) / _MOST_GROUPS))
    if not caches_prefixes:
        states = max(states, min(len(layouts), len(others)))
    return math.ceil(states * state / pages)


def planning() -> Any:
    """The module of vLLM that groups layers."""
    return import_module(_PLANNING if find_spec(_PLANNING) else "vllm.v1.core.kv_cache_utils")


@contextmanager
def plain_groups() -> Iterator[None]:
    """Give groups of layers with one spec that spec, while vLLM groups the layers of an engine.

    Where blocks are packed, a group has the specs of its layers by their names, in which vLLM's
    workers and connectors do not see a state.
    """
    module = planning()
    find = module.get_kv_cache_groups

    def get_kv_cache_groups(*args: Any, **kwargs: Any) -> Any:
        groups = find(*args, **kwargs)
        for group in groups:
            specs = list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values())
            if specs and all(spec == specs[0] for spec in specs):
                group.kv_cache_spec = specs[0]
        return groups

    module.get_kv_cache_groups = get_kv_cache_groups
    try:
        yield
    finally:
        module.get_kv_cache_groups = find
