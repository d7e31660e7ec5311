"""Keys of stored blocks that depend on the format of our pages.

KV connectors store blocks under vLLM's block hashes, or under names made from them. A hash covers
tokens, and neither the preset nor the calibration that the bytes of a block depend on. Every hash
is chained to the one before it and the first to `NONE_HASH`, so one number separates all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def separate_block_hashes(fingerprint: str) -> None:
    """Chain the hashes of the engine that is being built in this process to a format."""
    from vllm.v1.engine import core

    core.init_none_hash = _salted(core, core.init_none_hash, fingerprint)


def _salted(core: Any, original: Callable[[Any], None], fingerprint: str) -> Callable[[Any], None]:
    """`init_none_hash` of one engine: it takes its own place back."""
    from vllm.v1.core import kv_cache_utils

    def init_none_hash(hash_fn: Any) -> None:
        core.init_none_hash = original
        original(hash_fn)
        first = (kv_cache_utils.NONE_HASH, f"tightkv {fingerprint}")
        kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_fn(first))
        # Peers that exchange blocks compare this.
        if isinstance(seed := getattr(kv_cache_utils, "_NONE_HASH_SEED", None), str):
            kv_cache_utils._NONE_HASH_SEED = f"{seed} tightkv {fingerprint}"

    return init_none_hash
