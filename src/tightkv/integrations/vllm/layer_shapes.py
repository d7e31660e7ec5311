"""A layer of vLLM as a LayerShape, from which `model_shape.compressible` decides."""

from collections.abc import Container, Mapping
from typing import Any

from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import AttentionType

from tightkv.model_shape import LayerShape, skip_reason
from tightkv.model_shape.shape import ALIBI, IMAGES, SINKS

UNREADABLE = "its cache is also read by a layer that cannot read compressed pages"
# By the names of classes, which have moved between versions of vLLM.
_KINDS = {"MLAAttention": "mla", "ChunkedLocalAttention": "chunked", "MambaBase": "linear"}


def layer_shape(layer: Any) -> LayerShape:
    """What a layer keeps."""
    if type(layer) is not Attention:
        return LayerShape(_kind_of_other(layer))
    if layer.attn_type != AttentionType.DECODER:
        return LayerShape("other")
    if shared_layer(layer) is not None:
        return LayerShape("none")
    return _attention_shape(layer)


def _attention_shape(layer: Any) -> LayerShape:
    heads = layer.num_kv_heads, layer.head_size, layer.head_size_v
    needs = {
        SINKS: layer.has_sink,
        ALIBI: getattr(layer.impl, "alibi_slopes", None) is not None,
        IMAGES: getattr(layer, "use_mm_prefix", False),
    }
    extras = tuple(extra for extra in needs if needs[extra])
    if layer.sliding_window is not None:
        return LayerShape("sliding", *heads, window=layer.sliding_window, extras=extras)
    return LayerShape("full", *heads, extras=extras)


def unreadable_layers(layers: Mapping[str, Any]) -> set[str]:
    """Layers whose cache another one reads that could not read compressed pages."""
    return {
        target
        for layer in layers.values()
        if (target := shared_layer(layer)) is not None and not _reads_pages(layer, layers[target])
    }


def _reads_pages(layer: Any, target: Any) -> bool:
    same = ("num_heads", "num_kv_heads", "head_size", "sliding_window")
    alike = all(getattr(layer, name) == getattr(target, name) for name in same)
    return alike and skip_reason(_attention_shape(layer), "vllm", windows=1) is None


def readers(layers: Mapping[str, Any], compressed: Container[str]) -> dict[str, str]:
    """Layers without a cache of their own -> the compressed layers that they read."""
    targets = {name: shared_layer(layer) for name, layer in layers.items()}
    return {name: target for name, target in targets.items() if target in compressed and target}


def _kind_of_other(layer: Any) -> str:
    return next((_KINDS[c.__name__] for c in type(layer).__mro__ if c.__name__ in _KINDS), "other")


def is_latent(layer: Any) -> bool:
    """Whether a layer has latent attention (MLA)."""
    return _kind_of_other(layer) == "mla"


def shared_layer(layer: Any) -> str | None:
    """The layer whose cache this one reads instead of one of its own."""
    name: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return name
