"""register(): what vLLM calls in each of its processes before it builds an engine."""

from __future__ import annotations

from functools import wraps
from typing import Any

_MARK = "_tightkv_wraps"


def register() -> None:
    """Let attention layers ask for compressed pages where an engine's options say so.

    vLLM asks every layer once, after loading and before memory is measured, what cache it needs.
    That answer is wrapped; without our options it is vLLM's own. Layers that keep vLLM's cache are
    wrapped too: one of them may be asked first, and the size of their blocks follows from ours.
    """
    for kind in _asked():
        original = kind.get_kv_cache_spec
        if not hasattr(original, _MARK):
            kind.get_kv_cache_spec = _wrapped(original)


def unregister() -> None:
    """Take `register` back."""
    for kind in _asked():
        kind.get_kv_cache_spec = getattr(kind.get_kv_cache_spec, _MARK, kind.get_kv_cache_spec)


def _asked() -> tuple[Any, ...]:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return Attention, MLAAttention, MambaBase


def _wrapped(original: Any) -> Any:
    @wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        from tightkv.integrations.vllm.layers import change_over, compressed_spec

        change_over(vllm_config)
        return compressed_spec(self, original(self, vllm_config))

    setattr(get_kv_cache_spec, _MARK, original)
    return get_kv_cache_spec
