"""The layers of a DynamicCache as LayerShapes, from which `model_shape.compressible` decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig, cache_utils

from tightkv.fit.attention_weights import NOT_READABLE
from tightkv.model_shape import LayerShape, read_model_shape

_KINDS = {
    cache_utils.DynamicLayer: "full",
    cache_utils.DynamicSlidingWindowLayer: "sliding",
    cache_utils.LinearAttentionLayer: "linear",
    cache_utils.LinearAttentionAndFullAttentionLayer: "full",
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: "sliding",
}


def layer_shapes(config: PreTrainedConfig, layers: Sequence[Any]) -> list[LayerShape]:
    """What each layer keeps.

    Its kind is that of the cache layer; head sizes are the config's, and 0 where `read_model_shape`
    does not understand it.
    """
    try:
        known = read_model_shape(config).layers
    except NOT_READABLE:
        known = ()
    latent = bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))
    shapes = []
    for i, layer in enumerate(layers):
        kind = "mla" if latent else _KINDS.get(type(layer), "other")
        same = i < len(known) and known[i].kind == kind
        shapes.append(known[i] if same else LayerShape(kind))
    return shapes
