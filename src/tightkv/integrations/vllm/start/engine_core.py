"""What an engine's scheduler does for the compressed cache: vLLM's hooks in the core's process."""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import core

from tightkv.integrations.vllm.connectors.store_loads import follow_loads, watch_loads
from tightkv.integrations.vllm.metrics.monitor import watch_scheduler
from tightkv.integrations.vllm.prefix.cache_format import (
    ENGINE_FORMAT,
    CacheFormat,
    joined,
    weights_mark,
    worker_format,
)
from tightkv.integrations.vllm.prefix.prefix_hits import (
    HitEnds,
    bound_loads,
    keep_states_before_windows,
    keep_windows_exact,
)

_make_hasher = core.get_request_block_hasher


def read_format(engine: Any, vllm_config: Any) -> None:
    """Ask the workers of an EngineCore, whose caches were just made, what they hold."""
    found = joined(engine.model_executor.collective_rpc(worker_format))
    object.__setattr__(vllm_config, ENGINE_FORMAT, found)
    if found is None or vllm_config.kv_transfer_config is None:
        return separate_block_hashes(None)
    weights = engine.model_executor.collective_rpc(weights_mark)
    separate_block_hashes(" ".join([found.fingerprint, *weights]))
    if found.rows:
        engine.model_executor.collective_rpc(watch_loads)


def follow_scheduler(scheduler: Any, vllm_config: Any) -> None:
    """Of a Scheduler that was just made."""
    found: CacheFormat | None = getattr(vllm_config, ENGINE_FORMAT, None)
    if found is None:
        return
    coordinator = scheduler.kv_cache_manager.coordinator
    ends = HitEnds(found, coordinator)
    if found.rows:
        keep_windows_exact(coordinator, ends)
        keep_states_before_windows(scheduler, ends)
    if scheduler.connector is not None and found.exact_pages:  # latents are coded one by one
        bound_loads(scheduler, ends)
        if found.rows:
            follow_loads(scheduler, found)
    watch_scheduler(scheduler, vllm_config, found)


def separate_block_hashes(fingerprint: str | None) -> None:
    """Give the engine that is being built in this process hashes of its own; None: vLLM's.

    KV connectors store blocks under vLLM's block hashes, which cover tokens. The bytes of a block
    depend on its format and on the weights, too, and another engine of the process may have others.
    """
    if fingerprint is None:
        core.get_request_block_hasher = _make_hasher
        return

    def get_request_block_hasher(
        hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], *more: Any, **named: Any
    ) -> Any:
        def own(x: Any) -> bytes:
            return caching_hash_fn((f"tightkv {fingerprint}", x))

        core.get_request_block_hasher = _make_hasher
        return _make_hasher(hash_block_size, own, *more, **named)

    core.get_request_block_hasher = get_request_block_hasher
