"""How an engine's layers get compressed pages: choose, fit, plan, attach, report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tightkv.fit import Checkpoint, fit
from tightkv.integrations.vllm.compat import page_spec
from tightkv.integrations.vllm.layer_shapes import is_latent
from tightkv.integrations.vllm.options import EngineOptions, engine_options, with_options
from tightkv.integrations.vllm.start.attach import LAYOUT, attach
from tightkv.integrations.vllm.start.checkpoint import checkpoint_folder
from tightkv.integrations.vllm.start.choose import choose
from tightkv.integrations.vllm.start.engine_checks import check_engine_options
from tightkv.integrations.vllm.start.engine_plan import make_plan
from tightkv.integrations.vllm.start.install_mla import install_latent, latent_obstacle
from tightkv.integrations.vllm.start.report import report


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
    impls, slow = attach(plan, found, layers, vllm_config)
    report(plan, found, impls, slow, vllm_config)
    return plan.options
