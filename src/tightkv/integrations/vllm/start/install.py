"""How an engine's layers get compressed pages: choose, fit, plan, attach, report.

Layers with latent attention (MLA) have none of these choices: all are alike, or none is compressed.
"""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tightkv.config import KVQuantConfig
from tightkv.fit import Checkpoint, Fit, fit
from tightkv.integrations.vllm.compat import page_spec
from tightkv.integrations.vllm.layer_shapes import is_latent, readers
from tightkv.integrations.vllm.options import (
    EngineOptions,
    checkpoint_folder,
    engine_options,
    with_options,
)
from tightkv.integrations.vllm.start.engine_checks import WAITS_FOR_DEVICE, check_engine_options
from tightkv.integrations.vllm.start.engine_plan import EnginePlan, choose, make_plan, report
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.backend import PackedBackend, TightBackend
from tightkv.kernels import registry
from tightkv.kernels.backend import LatentBackend
from tightkv.model_shape.shape import BESIDE_OTHERS, INDEXED, LATENT_WINDOW
from tightkv.pages.latent import LatentLayout, latent_layout

logger = logging.getLogger("vllm.tightkv")
LAYOUT = "_tightkv_layout"
"""An attribute of layers: the layout of their pages, or None, and the pages of a block."""


def compressed_spec(layer: Any, spec: Any) -> Any:
    """What a layer tells vLLM about its cache: our pages, or `spec` as vLLM has it."""
    layout, pages = getattr(layer, LAYOUT, (None, 1))
    return spec if layout is None else page_spec(spec, layout, pages)


def install(vllm_config: Any) -> None:
    """Decide for every layer of the engine with a cache, and give the chosen ones our attention."""
    options = engine_options(vllm_config.additional_config)
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if options is None or all(hasattr(layer, LAYOUT) for layer in layers.values()):
        return
    check_engine_options(options, vllm_config)
    has_latents = any(is_latent(layer) for layer in layers.values())
    obstacle = latent_obstacle(layers) if has_latents else None
    latent = has_latents and obstacle is None
    pages = install_latent(options, layers, vllm_config) if latent else None
    for layer in layers.values():  # whoever asks for a layer's spec from now on has an answer
        setattr(layer, LAYOUT, (pages, 1))
    if not latent:
        options = _install_attention(options, layers, vllm_config, obstacle)
    # vLLM keeps compiled models by its config; one with other attention is another model.
    vllm_config.additional_config = with_options(vllm_config.additional_config, options)


def _install_attention(
    options: EngineOptions, layers: Mapping[str, Any], vllm_config: Any, latent: str | None
) -> EngineOptions:
    """The options with the bits that layers got; `latent` is why latents are not compressed."""
    chosen = choose(layers, options, vllm_config, latent)
    source = Checkpoint(
        checkpoint_folder(vllm_config),
        vllm_config.model_config.model,
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
        next(iter(chosen.layers.values()))._k_scale.device,
    )
    found = fit(source, options.config, chosen.for_fit())
    plan = make_plan(options, vllm_config, chosen, found)
    impls, slow = _attach(plan, found, layers, vllm_config)
    report(plan, found, impls, slow, vllm_config)
    return plan.options


def _attach(
    plan: EnginePlan, found: Fit, layers: Mapping[str, Any], vllm_config: Any
) -> tuple[dict[str, TightAttention], dict[str, list[str]]]:
    """The attention of every layer of the plan, and which of them are slow, by the reason."""
    chosen, pages = plan.chosen, plan.pages_per_block
    if not chosen.others:  # vLLM tells its own process; connectors of other workers ask too
        vllm_config.cache_config.block_size = pages * plan.options.config.page_size
    limits = plan.limits
    impls, slow = dict[str, TightAttention](), dict[str, list[str]]()
    for name, layout in plan.layouts.items():
        layer = layers[name]
        device = layer._k_scale.device
        choice = registry.choose("auto", device, layout)
        is_draft = name in chosen.drafts
        impl = TightAttention(layer, layout, choice.module, limits, device, is_draft=is_draft)
        if not is_draft:
            impl.use_fit(found.layers[chosen.numbers[name]])
        impl.packed_pages = pages if chosen.packed else 0
        layer.attn_backend = PackedBackend if chosen.packed else TightBackend
        layer.impl = impls[name] = impl
        setattr(layer, LAYOUT, (layout, pages))
        for reason in (choice.slow, slow_prompts(layer.sliding_window, device)):
            if reason is not None:
                slow.setdefault(reason, []).append(name)
    shared = readers(layers, impls)
    if shared and vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ValueError(
            "tightkv with --kv-sharing-fast-prefill: prompts of layers that share a compressed "
            "cache are not cut short; leave the option out"
        )
    for name, target in shared.items():  # layers that read the cache of a compressed one
        layer, own = layers[name], impls[target]
        layer.impl = TightAttention(
            layer, own.layout, own.kernels, limits, own.device, own, own.is_draft
        )
        layer.attn_backend = layers[target].attn_backend
    return impls, slow


def slow_prompts(window: int | None, device: torch.device) -> str | None:
    """Why prompts of a layer take longer than they could; None where they do not."""
    if window is None or device.type != "cuda":
        return None
    return (
        f"prompts in a compressed sliding window of {window} tokens run in our Triton kernel and "
        "not in FlashAttention; leave sliding_windows out if they take too long"
    )


# --- latent attention (MLA) ---
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
