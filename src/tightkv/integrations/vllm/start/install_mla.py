"""Which layers with latent attention (MLA) get compressed pages, and how they are installed."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.layer_shapes import is_latent
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.integrations.vllm.start.engine_checks import WAITS_FOR_DEVICE
from tightkv.kernels.backend import LatentBackend
from tightkv.model_shape.shape import BESIDE_OTHERS, INDEXED, LATENT_WINDOW
from tightkv.pages.latent import LatentLayout, latent_layout

logger = logging.getLogger("vllm.tightkv")


def latent_obstacle(layers: Mapping[str, Any]) -> str | None:
    """Why the latents of a model with MLA layers are not compressed; None where they are."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    # before anything is asked that layers of those versions do not have
    if "tokens_per_state" not in {field.name for field in fields(MLAAttentionSpec)}:
        return "latent attention (MLA) before vLLM 0.29"
    latent = [layer for layer in layers.values() if is_latent(layer)]
    if any(layer.use_sparse or layer.indexer is not None for layer in latent):
        return INDEXED
    if len(latent) < len(layers):
        return BESIDE_OTHERS
    if any(getattr(layer, "is_amx_bmm_enabled", False) for layer in latent):
        return "latent attention (MLA) in AMX kernels; --attention-backend CPU_MLA has others"
    if any(layer.sliding_window is not None for layer in latent):
        return LATENT_WINDOW
    if any(layer.non_causal_multi_token_decode for layer in latent):
        return "latent attention (MLA) of drafts that see later tokens"
    return None


def install_latent(
    options: EngineOptions, layers: Mapping[str, Any], vllm_config: Any
) -> LatentLayout:
    """Give all layers our attention -> the layout of their pages."""
    from tightkv.integrations.vllm.latent.mla import TightLatentAttention, TightLatentBackend

    layout = layout_of_layers(options.config, layers, vllm_config.model_config.dtype)
    vllm_config.cache_config.block_size = layout.page_size
    device = next(iter(layers.values()))._k_scale.device
    kernels: LatentBackend
    if device.type == "cuda":
        from tightkv.kernels.triton import mla as kernels
    else:
        from tightkv.kernels import mla_reference as kernels
    for layer in layers.values():
        layer.impl = TightLatentAttention(layer, layout, kernels)
        layer.attn_backend = TightLatentBackend
    if vllm_config.parallel_config.rank == 0:
        plain, size = layout.exact_bytes_per_token, layout.bytes_per_token
        logger.info(
            "tightkv %s: latents at %d bits, %d bytes per token and layer in %d layers, %.2f times "
            "the tokens of vLLM's own cache (%d bytes); no exact window and sinks",
            options.config.name,
            layout.bits,
            size,
            len(layers),
            plain / size,
            plain,
        )
        if device.type == "cuda":
            logger.warning(
                "tightkv: decoding latents takes longer than with vLLM's own kernels for Hopper, "
                "1.6 times (16 heads) to 2.5 times (128 heads) as long on an H200; without tightkv "
                "the cache holds fewer tokens and is read faster"
            )
            if layout.cfg.check_finite and not vllm_config.model_config.enforce_eager:
                logger.warning(WAITS_FOR_DEVICE)
    return layout


def layout_of_layers(
    cfg: KVQuantConfig, layers: Mapping[str, Any], dtype: torch.dtype
) -> LatentLayout:
    """The layout of all layers, which must be alike."""
    sizes = {(layer.kv_lora_rank, layer.qk_rope_head_dim) for layer in layers.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"tightkv: layers with latents of different sizes (kv_lora_rank, qk_rope_head_dim): "
            f"{', '.join(map(str, sorted(sizes)))}; supported: one size"
        )
    return latent_layout(cfg, *sizes.pop(), dtype)
