"""How much of a cached prefix a sequence takes over, so that its newest tokens are exact."""

from __future__ import annotations

from typing import Any

from tightkv.integrations.vllm.cache_format import CacheFormat


def keep_windows_exact(coordinator: Any, found: CacheFormat) -> None:
    """Let cached prefixes end where the exact window of a sequence begins.

    `coordinator` is vLLM's KVCacheCoordinator. Cached blocks hold codes alone. The tokens of the
    window are computed again, into blocks and a ring of the sequence's own.
    """
    find = coordinator.find_longest_cache_hit

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
        most = reusable_tokens(max_cache_hit_length, found.page_size, found.exact_pages)
        return find(block_hashes, most)

    coordinator.find_longest_cache_hit = find_longest_cache_hit


def reusable_tokens(newest: int, page_size: int, exact_pages: int) -> int:
    """Tokens before the exact window of token `newest`."""
    return max(0, newest // page_size - exact_pages + 1) * page_size
