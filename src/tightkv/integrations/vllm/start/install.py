"""Which attention layers of an engine get compressed pages, and how they are installed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tightkv.config import KVQuantConfig, Windows
from tightkv.fit.calibration import not_used
from tightkv.integrations.vllm.compat import page_spec
from tightkv.integrations.vllm.layer_numbers import draft_layers, layer_number, model_layers
from tightkv.integrations.vllm.layer_shapes import (
    UNREADABLE,
    is_latent,
    layer_shape,
    readers,
    unreadable_layers,
)
from tightkv.integrations.vllm.options import engine_options, with_options
from tightkv.integrations.vllm.prefix.blocks import other_specs, pages_per_block
from tightkv.integrations.vllm.start.calibration import (
    find_for_engine,
    set_calibrated_feedback,
    set_centers,
    without_bits,
)
from tightkv.integrations.vllm.start.engine_checks import (
    WAITS_FOR_DEVICE,
    check_engine_options,
    rings_obstacle,
    speculative_tokens,
)
from tightkv.integrations.vllm.start.engine_plan import make_plan
from tightkv.integrations.vllm.start.feedback import set_feedback, set_key_scales
from tightkv.integrations.vllm.start.install_mla import install_latent, latent_obstacle
from tightkv.integrations.vllm.start.protect_keys import check_keys, in_equal_blocks
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.backend import TightBackend
from tightkv.integrations.vllm.step.batch_split import Limits
from tightkv.kernels import registry
from tightkv.model_shape import skip_reason
from tightkv.model_shape.compressible import OTHER_PAGES, windows_of_other_pages

logger = logging.getLogger("vllm.tightkv")  # vLLM's handlers show its children
_LAYOUT = "_tightkv_layout"


def compressed_spec(layer: Any, spec: Any) -> Any:
    """What a layer tells vLLM about its cache: our pages, or `spec` as vLLM has it."""
    layout, pages = getattr(layer, _LAYOUT, (None, 1))
    return spec if layout is None else page_spec(spec, layout, pages)


def install(vllm_config: Any) -> None:
    """Decide for every layer of the engine with a cache, and give the chosen ones our attention."""
    options = engine_options(vllm_config.additional_config)
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if options is None or all(hasattr(layer, _LAYOUT) for layer in layers.values()):
        return
    check_engine_options(options, vllm_config)
    obstacle = None
    if any(is_latent(layer) for layer in layers.values()):
        obstacle = latent_obstacle(layers)
        if obstacle is None:
            pages = install_latent(options, layers, vllm_config)
            for layer in layers.values():
                setattr(layer, _LAYOUT, (pages, 1))
            vllm_config.additional_config = with_options(vllm_config.additional_config, options)
            return
    given, calibration = options, find_for_engine(options.config, vllm_config)
    line = not_used(options.config, calibration, vllm_config.model_config.model)
    if calibration is not None:
        options = replace(options, config=calibration.applied(options.config))
    drafts = draft_layers(layers, vllm_config)
    chosen = compressed_layers(layers, options.config, obstacle, drafts, windows=options.windows)
    checked = check_keys(options.config, vllm_config)
    place = place_in_model(options.config, len(chosen.keys() - drafts))
    plan = make_plan(replace(options, config=checked.config), vllm_config, chosen, place, drafts)
    for layer in layers.values():
        setattr(layer, _LAYOUT, (None, 1))
    others = other_specs(plan.layouts, layers, vllm_config)
    mixed = len({layer.sliding_window for layer in chosen.values()}) > 1
    if (others or mixed) and len(plan.page_bytes) > 1 and (checked.raised or options != given):
        if options != given:
            line, checked = without_bits(given.config), check_keys(given.config, vllm_config)
        if checked.raised:
            checked = in_equal_blocks(given.config, checked)
        plan = make_plan(given, vllm_config, chosen, place, drafts)
    plan = replace(plan, pages_per_block=pages_per_block(plan.layouts, others, vllm_config, mixed))
    if not others:  # vLLM tells its own process alone, and KV connectors of other workers ask
        vllm_config.cache_config.block_size = plan.pages_per_block * plan.options.config.page_size
    most = vllm_config.scheduler_config.max_num_seqs
    limits = Limits(most, plan.rows, 1 + speculative_tokens(vllm_config))
    slow: dict[str, list[str]] = {}
    for name, layout in plan.layouts.items():
        layer = layers[name]
        device = layer._k_scale.device
        choice = registry.choose("auto", device, layout)
        layer.impl = TightAttention(
            layer, layout, choice.module, limits, device, is_draft=name in drafts
        )
        layer.attn_backend = TightBackend
        setattr(layer, _LAYOUT, (layout, plan.pages_per_block))
        for reason in (choice.slow, slow_prompts(layer.sliding_window, device)):
            if reason is not None:
                slow.setdefault(reason, []).append(name)
    impls = {name: layers[name].impl for name in plan.layouts}
    install_readers(layers, impls, vllm_config)
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    feedback = None
    scales = set_key_scales(options.config, impls, vllm_config, rank, ranks)
    if calibration is None:
        feedback = set_feedback(options.config, impls, vllm_config, rank, ranks)
    else:
        set_centers(calibration, impls, rank, ranks)
        if options.config.feedback == "auto":
            set_calibrated_feedback(calibration, impls, rank, ranks)
    # vLLM keeps compiled models by its config; one with other attention is another model.
    vllm_config.additional_config = with_options(vllm_config.additional_config, plan.options)
    if vllm_config.parallel_config.rank == 0:
        for warning in (line, checked.line):
            if warning is not None:
                logger.warning(warning)
        logger.info(plan.line())
        if (why := rings_obstacle(vllm_config)) is not None:
            logger.warning("tightkv: the newest tokens are read from their codes, for %s", why)
        for told in (scales, feedback):
            if told is not None:
                logger.info(told)
        for reason, names in slow.items():
            logger.warning("tightkv, %s: %s", _some(names, len(plan.layouts)), reason)
        blocked = cuda_graph_obstacle(impls)
        if blocked is not None and not vllm_config.model_config.enforce_eager:
            logger.warning(blocked)


def install_readers(
    layers: Mapping[str, Any], impls: Mapping[str, TightAttention], vllm_config: Any
) -> None:
    """Give layers that read the cache of a compressed one our attention, too."""
    shared = readers(layers, impls)
    if shared and vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ValueError(
            "tightkv with --kv-sharing-fast-prefill: prompts of layers that share a compressed "
            "cache are not cut short; leave the option out"
        )
    for name, target in shared.items():
        layer, own = layers[name], impls[target]
        layer.impl = TightAttention(
            layer, own.layout, own.kernels, own.limits, own.device, own, own.is_draft
        )
        layer.attn_backend = TightBackend


def cuda_graph_obstacle(impls: Mapping[str, TightAttention]) -> str | None:
    """Why vLLM cannot capture CUDA graphs of decoding with these layers; None if it can."""
    if all(impl.capturable or impl.device.type != "cuda" for impl in impls.values()):
        return None
    plain = [name for name, impl in impls.items() if not impl.kernels.TAKES.graphs]
    if not plain:
        return WAITS_FOR_DEVICE
    return (
        f"tightkv: no CUDA graphs, {_some(plain, len(impls))} run in plain torch; choose bits and "
        "a method that have kernels (of protected layers: protected_bits=8) to have them"
    )


def slow_prompts(window: int | None, device: torch.device) -> str | None:
    """Why prompts of a layer take longer than they could; None where they do not."""
    if window is None or device.type != "cuda":
        return None
    return (
        f"prompts in a compressed sliding window of {window} tokens run in our Triton kernel and "
        "not in FlashAttention; leave sliding_windows out if they take too long"
    )


def _some(names: Sequence[str], of: int) -> str:
    """All layers, or so many of them with the first few by name."""
    if len(names) == of:
        return f"all {of} layers"
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} of {of} layers ({listed})"


def compressed_layers(
    layers: Mapping[str, Any],
    cfg: KVQuantConfig,
    latent: str | None = None,
    drafts: Collection[str] = (),
    windows: Windows = False,
) -> dict[str, Any]:
    """The layers that can be compressed; an error where none of the model can, or not one with
    layer_bits.

    `latent` is why those with latent attention are not. Layers of `drafts` have no numbers.
    """
    unreadable = unreadable_layers(layers)
    reasons = {
        name: UNREADABLE
        if name in unreadable
        else skip_reason(layer_shape(layer), "vllm", windows, cfg)
        for name, layer in layers.items()
    }
    shapes = {name: layer_shape(layers[name]) for name in reasons if reasons[name] is None}
    reasons |= dict.fromkeys(windows_of_other_pages(shapes, cfg), OTHER_PAGES)
    if latent is not None:
        reasons |= {name: latent for name, layer in layers.items() if is_latent(layer)}
    chosen = {name: layers[name] for name, reason in reasons.items() if reason is None}
    if not chosen.keys() - set(drafts):  # a compressed draft alone is worth nothing
        listed = ", ".join(sorted({reason for reason in reasons.values() if reason}))
        raise ValueError(f"tightkv: no layer of this model can be compressed ({listed or 'none'})")
    for reason in sorted({reason for reason in reasons.values() if reason}):
        count = list(reasons.values()).count(reason)
        logger.info("tightkv: %d layers stay with vLLM's own cache: %s", count, reason)
    numbers = set(model_layers(chosen, drafts).values())
    for name in reasons.keys() - chosen:
        number = layer_number(name)
        if number in cfg.bits_of_layers() and number not in numbers:
            raise ValueError(
                f"tightkv: layer_bits={cfg.layer_bits!r} names layer {number}, which stays with "
                f"vLLM's own cache ({reasons[name]}); leave it out"
            )
    return chosen


def place_in_model(cfg: KVQuantConfig, count: int) -> tuple[int, int]:
    """Compressed layers of the pipeline stages before this one, and of all stages.

    `count` is of this stage. Stages ask each other where the answer matters.
    """
    group = get_pp_group()
    if group.world_size == 1 or not (cfg.protected_first or cfg.protected_last):
        return 0, count
    counts = [0] * group.world_size
    torch.distributed.all_gather_object(counts, count, group=group.cpu_group)
    return sum(counts[: group.rank_in_group]), sum(counts)
