"""tightkv: a compressed KV cache for LLM inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightkv.config import KVQuantConfig
from tightkv.moved import follow_moves
from tightkv.version import __version__

if TYPE_CHECKING:
    from tightkv.integrations.transformers import TightCache

follow_moves()

__all__ = ["KVQuantConfig", "TightCache", "__version__"]


def __getattr__(name: str) -> Any:
    """TightCache is imported when first used: the base install has no transformers."""
    if name == "TightCache":
        from tightkv.integrations.transformers import TightCache

        return TightCache
    raise AttributeError(f"module 'tightkv' has no attribute {name!r}")
