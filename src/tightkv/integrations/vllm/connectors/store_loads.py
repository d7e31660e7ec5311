"""Blocks that a KV connector fills: as exact as vLLM's own cached prefixes, and nothing stale.

A connector writes blocks without a step of the model, so the tags of rings and sinks
(`ring_table`) do not see it. The scheduler knows which blocks those are, and tells the workers.
Sinks are not stored. The workers keep some of sequences that ended, by the hash of their first
block, and find them again when that block is loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention.attention import Attention

from tightkv.integrations.vllm.prefix.cache_format import CacheFormat
from tightkv.integrations.vllm.prefix.prefix_hits import LOCAL
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.ring_table import NAMED, RingTable

_STORE = "_tightkv_store_step"  # of a SchedulerOutput


@dataclass
class StoreStep:
    """What a scheduler tells the workers about a step, beside vLLM's own output."""

    loaded: list[int] = field(default_factory=list)  # blocks that the connector fills
    loaded_firsts: dict[int, int] = field(default_factory=dict)
    """The first block of each sequence among these -> name of its content."""
    begun_firsts: dict[int, dict[int, int]] = field(default_factory=dict)
    """By group of layers: the first block of each sequence that begins with this step -> name of
    its content. In the tables of other groups the block has what they wrote to it before."""
    forget: bool = False
    """vLLM's cache was reset, as after a change of weights: names mean other contents now."""


def follow_loads(scheduler: Any, found: CacheFormat) -> None:
    """Have a vLLM Scheduler with a KV connector tell the workers what is loaded."""
    connector = scheduler.connector
    allocated = connector.update_state_after_alloc
    schedule_step, reset = scheduler.schedule, scheduler.reset_prefix_cache
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    hash_size = getattr(scheduler, "hash_block_size", found.page_size)
    hashed = max(1, found.page_size // hash_size)  # hashes up to a page's end
    coming = StoreStep()

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        allocated(request, blocks, num_external_tokens)
        if not num_external_tokens:
            return
        local = getattr(request, LOCAL)
        for ids, size in zip(blocks.get_block_ids(), sizes, strict=True):
            coming.loaded += ids[local // size :]
            if not local and ids[0]:
                coming.loaded_firsts[ids[0]] = content_name(request.block_hashes[hashed - 1])

    def schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal coming
        output = schedule_step(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            request = scheduler.requests[new.req_id]
            if len(request.block_hashes) >= hashed:
                name = content_name(request.block_hashes[hashed - 1])
                for group, ids in enumerate(new.block_ids):
                    if ids and ids[0]:  # block 0 stands for blocks that have left a sliding window
                        coming.begun_firsts.setdefault(group, {})[ids[0]] = name
        setattr(output, _STORE, coming)
        coming = StoreStep()
        return output

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        coming.forget = True
        return reset(*args, **kwargs)

    connector.update_state_after_alloc = update_state_after_alloc
    scheduler.schedule, scheduler.reset_prefix_cache = schedule, reset_prefix_cache


def watch_loads(worker: Any) -> None:
    """Have a worker's tables of rings and sinks follow what its scheduler says of each step."""
    layers = get_layers_from_vllm_config(worker.vllm_config, Attention)
    execute = worker.execute_model

    def tables() -> Iterator[tuple[int, RingTable]]:
        """With the numbers of their groups of layers; they are made in the first step."""
        for number, group in enumerate(worker.model_runner.kv_cache_config.kv_cache_groups):
            impls = (layers[name].impl for name in group.layer_names if name in layers)
            rings = {impl.group_rings for impl in impls if isinstance(impl, TightAttention)}
            yield from ((number, each.table) for each in rings if each and each.table)

    begun: dict[int, dict[int, int]] = {}

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        told: StoreStep = getattr(scheduler_output, _STORE, StoreStep())
        if begun or told.forget or told.loaded:
            with torch.inference_mode():  # as the tables' tensors were made
                for group, table in tables():
                    if group in begun:  # written by now, by a draft too
                        table.name(begun[group])
                    if told.forget:
                        table.forget_names()
                    if told.loaded:
                        table.load(told.loaded, told.loaded_firsts)
        begun = told.begun_firsts
        return execute(scheduler_output, *args, **kwargs)

    worker.execute_model = execute_model


def content_name(block_hash: bytes) -> int:
    """A number for what a sequence's first page holds, from its hash."""
    return NAMED + (int.from_bytes(block_hash[:8], "big") >> 2)
