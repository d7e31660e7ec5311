"""Which layers of a model are compressed, and why the others are not: decided here alone.

The planner, TightCache and the vLLM plugin each describe a layer as a LayerShape (read from a
config, a transformers cache or a vLLM layer) and ask `skip_reason`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tightkv.config import KVQuantConfig
from tightkv.latent import LatentLayout
from tightkv.layout import page_layout
from tightkv.model_shape.shape import ALIBI, IMAGES, SHARED, SINKS, LayerShape

SUPPORTED_EXTRAS = {"transformers": (ALIBI, IMAGES, SHARED, SINKS), "vllm": (SHARED, SINKS)}
"""`LayerShape.extras` that the attention of each integration can do."""
KIND_REASONS = {
    "sliding": "sliding window",
    "chunked": "chunked attention",
    "linear": "constant state",
    "mla": "latent attention (MLA)",
    "none": "keeps nothing",
    "other": "not the attention of a decoder",
}
"""Kinds of layers that are not compressed, and why; mla is in vLLM."""


def skip_reason(layer: LayerShape, integration: str = "transformers") -> str | None:
    """Why a layer is not compressed, or None where it is."""
    latent = layer.kind == "mla" and integration == "vllm" and layer.latent_dim > 0
    if layer.kind != "full" and not latent:
        return KIND_REASONS[layer.kind]
    for extra in layer.extras:
        if extra not in SUPPORTED_EXTRAS[integration]:
            return extra
    if latent:
        try:
            LatentLayout(KVQuantConfig(), layer.latent_dim - layer.rope_dim, layer.rope_dim)
        except ValueError as error:
            return str(error)
        return None
    if layer.head_dim != layer.value_head_dim:
        return f"keys have {layer.head_dim} dimensions and values {layer.value_head_dim}"
    if layer.head_dim:  # 0: not known
        try:
            page_layout(KVQuantConfig(), layer.num_kv_heads, layer.head_dim)
        except ValueError as error:
            return str(error)
    return None


def compressed_layers(layers: Iterable[LayerShape], integration: str = "transformers") -> list[int]:
    """The numbers of the layers that are compressed."""
    return [i for i, layer in enumerate(layers) if skip_reason(layer, integration) is None]
