"""How much of a cached prefix a sequence takes over, so that its newest tokens are exact."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from typing import Any

from tightkv.integrations.vllm.cache_format import CacheFormat

logger = logging.getLogger("vllm.tightkv")


def keep_windows_exact(coordinator: Any, found: CacheFormat) -> None:
    """Let cached prefixes end where the exact window of a sequence begins.

    `coordinator` is vLLM's KVCacheCoordinator. Cached blocks hold codes alone. The tokens of the
    window are computed again, into blocks and a ring of the sequence's own.

    Layers with a state (Mamba, convolutions) can begin only where vLLM has kept one. If none is
    near the beginning of the window but one inside of it, the whole prefix is taken: to compute it
    again would cost more than the window is worth.
    """
    find = coordinator.find_longest_cache_hit
    warned = False

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
        nonlocal warned
        most = found.reusable_tokens(max_cache_hit_length)
        hit = find(block_hashes, most)
        if most == max_cache_hit_length or len(managers) == 1:
            return hit
        longer = find(block_hashes, max_cache_hit_length)
        if longer[1] - hit[1] <= max_cache_hit_length - most + step:
            return hit
        if not warned:
            warned = True
            logger.warning(
                "tightkv: the states of other layers are cached at %d tokens of a prefix of %d and "
                "not before its newest ones, which are read from their codes after such hits",
                longer[1],
                max_cache_hit_length,
            )
        return longer

    managers = coordinator.single_type_managers
    step = max(manager.block_size for manager in managers)
    for manager in managers:
        _keep_beginnings_of_windows(manager, found)
    coordinator.find_longest_cache_hit = find_longest_cache_hit
    if (find_each := getattr(coordinator, "find_longest_cache_hit_per_group", None)) is not None:
        # for KV connectors
        coordinator.find_longest_cache_hit_per_group = lambda block_hashes, most: find_each(
            block_hashes, found.reusable_tokens(most)
        )


def _keep_beginnings_of_windows(manager: Any, found: CacheFormat) -> None:
    """From 0.29 on, sliding windows are cached at the ends of prompts alone: at our ends too."""
    keep = manager.cache_blocks
    known = signature(keep).parameters
    if "replay_boundaries" not in known:
        if "retention_interval" in known:  # None: at all ends of blocks
            manager.cache_blocks = lambda request, num_tokens, **_: keep(request, num_tokens)
        return

    def cache_blocks(*args: Any, replay_boundaries: Sequence[int], **kwargs: Any) -> Any:
        ours = (found.reusable_tokens(x) for x in replay_boundaries)
        return keep(*args, replay_boundaries=(*replay_boundaries, *ours), **kwargs)

    manager.cache_blocks = cache_blocks
