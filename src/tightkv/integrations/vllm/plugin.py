"""register(): what vLLM calls in each of its processes before it builds an engine."""

from __future__ import annotations

from functools import wraps
from typing import Any

_MARK = "_tightkv_wraps"


def register() -> None:
    """Let attention layers ask for compressed pages where an engine's options say so.

    vLLM asks every attention layer once, after loading and before memory is measured, what
    cache it needs. That answer is wrapped; without our options it is vLLM's own.
    """
    from vllm.model_executor.layers.attention.attention import Attention

    original = Attention.get_kv_cache_spec
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        from tightkv.integrations.vllm.layers import change_over, compressed_spec

        change_over(vllm_config)
        return compressed_spec(self, original(self, vllm_config))

    setattr(get_kv_cache_spec, _MARK, original)
    Attention.get_kv_cache_spec = get_kv_cache_spec


def unregister() -> None:
    """Take `register` back."""
    from vllm.model_executor.layers.attention.attention import Attention

    original = getattr(Attention.get_kv_cache_spec, _MARK, None)
    if original is not None:
        Attention.get_kv_cache_spec = original
