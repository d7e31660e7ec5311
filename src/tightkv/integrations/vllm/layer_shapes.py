"""A layer of vLLM as a LayerShape, from which `model_shape.compressible` decides."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import AttentionType

from tightkv.model_shape import LayerShape
from tightkv.model_shape.shape import ALIBI, IMAGES, SHARED, SINKS

# By the names of classes, which have moved between versions of vLLM.
_KINDS = {"MLAAttention": "mla", "ChunkedLocalAttention": "chunked", "MambaBase": "linear"}


def layer_shape(layer: Any, read_by_others: bool) -> LayerShape:
    """What a layer keeps; `read_by_others`: another layer has no cache but this one's."""
    if type(layer) is not Attention:
        return LayerShape(_kind_of_other(layer))
    if layer.attn_type != AttentionType.DECODER:
        return LayerShape("other")
    if shared_layer(layer) is not None:
        return LayerShape("none")
    heads = layer.num_kv_heads, layer.head_size, layer.head_size_v
    if layer.sliding_window is not None:
        return LayerShape("sliding", *heads, window=layer.sliding_window)
    needs = {
        SHARED: read_by_others,
        SINKS: layer.has_sink,
        ALIBI: getattr(layer.impl, "alibi_slopes", None) is not None,
        IMAGES: getattr(layer, "use_mm_prefix", False),
    }
    return LayerShape("full", *heads, extras=tuple(extra for extra in needs if needs[extra]))


def _kind_of_other(layer: Any) -> str:
    return next((_KINDS[c.__name__] for c in type(layer).__mro__ if c.__name__ in _KINDS), "other")


def shared_layer(layer: Any) -> str | None:
    """The layer whose cache this one reads instead of one of its own."""
    name: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return name
