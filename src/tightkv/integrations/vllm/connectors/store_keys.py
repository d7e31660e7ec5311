"""Keys of stored blocks that depend on the format of our pages.

KV connectors store blocks under vLLM's block hashes, or under names made from them. A hash covers
tokens, and neither the preset nor the calibration that the bytes of a block depend on. So the
engine's hash function takes in the format too.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import core

_make_hasher = core.get_request_block_hasher


def separate_block_hashes(fingerprint: str | None) -> None:
    """Give the engine that is being built in this process hashes of its format; None: vLLM's own.

    Another engine of the process may have another format, so the hashes are the engine's own.
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
