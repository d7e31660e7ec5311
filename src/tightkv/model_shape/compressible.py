"""The decision which layers of a model are compressed, and why the others are not.

The planner, TightCache and the vLLM plugin each describe a layer as a LayerShape (read from a
config, a transformers cache or a vLLM layer) and ask `skip_reason`.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from tightkv.config import KVQuantConfig, Windows
from tightkv.model_shape.shape import ALIBI, IMAGES, SHARED, SINKS, LayerShape
from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import page_layout

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
"""Kinds of layers that are not compressed, and why; mla is in vLLM, and sliding if asked for."""

OTHER_PAGES = "sliding window, whose pages would not be as large as those of full attention"

Key = TypeVar("Key", int, str)


def skip_reason(
    layer: LayerShape,
    integration: str = "transformers",
    windows: Windows = False,
    cfg: KVQuantConfig | None = None,
) -> str | None:
    """Why a layer is not compressed, or None where it is.

    `cfg` is what sliding windows would be compressed with, the default one unless given.
    """
    latent = layer.kind == "mla" and integration == "vllm" and layer.latent_dim > 0
    sliding = layer.kind == "sliding" and integration == "vllm" and windows is not False
    if layer.kind != "full" and not latent and not sliding:
        return KIND_REASONS[layer.kind]
    for extra in layer.extras:
        if extra not in SUPPORTED_EXTRAS[integration]:
            return extra
    if not latent and layer.head_dim != layer.value_head_dim:
        return f"keys have {layer.head_dim} dimensions and values {layer.value_head_dim}"
    try:
        if latent:
            LatentLayout(KVQuantConfig(), layer.latent_dim - layer.rope_dim, layer.rope_dim)
        elif layer.head_dim:  # 0: not known
            page_layout(KVQuantConfig(), layer.num_kv_heads, layer.head_dim)
    except ValueError as error:
        return str(error)
    return _too_short(layer, windows, cfg or KVQuantConfig()) if sliding else None


def _too_short(layer: LayerShape, windows: Windows, cfg: KVQuantConfig) -> str | None:
    window = layer.window or 0
    if windows is not True:
        return None if window >= windows else f"sliding window of less than {windows} tokens"
    layout = page_layout(cfg, layer.num_kv_heads, layer.head_dim)
    if layout.window_bytes(window) < layer.uncompressed_bytes(window):
        return None
    return f"sliding window of {window} tokens, smaller than with exact rings"


def windows_of_other_pages(layers: Mapping[Key, LayerShape], cfg: KVQuantConfig) -> set[Key]:
    """Layers with a sliding window whose pages are not as large as those of full attention.

    vLLM's blocks have one size in such models, so it would pad the smaller pages.
    """
    sizes = {
        key: page_layout(cfg, layer.num_kv_heads, layer.head_dim).page_bytes
        for key, layer in layers.items()
        if layer.kind in ("full", "sliding")
    }
    full = {size for key, size in sizes.items() if layers[key].kind == "full"}
    windows = (key for key in sizes if layers[key].kind == "sliding")
    return {key for key in windows if full and full != {sizes[key]}}


def compressed_layers(layers: Iterable[LayerShape], integration: str = "transformers") -> list[int]:
    """The numbers of the layers that are compressed."""
    return [i for i, layer in enumerate(layers) if skip_reason(layer, integration) is None]
