"""Compressed layers of an engine get our attention, and hold tokens as their fit says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tightkv.fit import Fit
from tightkv.integrations.vllm.layer_shapes import readers
from tightkv.integrations.vllm.start.engine_checks import speculative_tokens
from tightkv.integrations.vllm.start.engine_plan import EnginePlan
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.backend import PackedBackend, TightBackend
from tightkv.integrations.vllm.step.batch_split import Limits
from tightkv.kernels import registry

LAYOUT = "_tightkv_layout"
"""An attribute of layers: the layout of their pages, or None, and the pages of a block."""


def attach(
    plan: EnginePlan, found: Fit, layers: Mapping[str, Any], vllm_config: Any
) -> tuple[dict[str, TightAttention], dict[str, list[str]]]:
    """The attention of every layer of the plan, and which of them are slow, by the reason."""
    if not plan.chosen.others:  # vLLM tells its own process; connectors of other workers ask too
        page_size = plan.options.config.page_size
        vllm_config.cache_config.block_size = plan.pages_per_block * page_size
    most = vllm_config.scheduler_config.max_num_seqs
    limits = Limits(most, plan.rows, 1 + speculative_tokens(vllm_config))
    impls, slow = dict[str, TightAttention](), dict[str, list[str]]()
    backend = PackedBackend if plan.chosen.packed else TightBackend
    for name, layout in plan.layouts.items():
        layer = layers[name]
        device = layer._k_scale.device
        choice = registry.choose("auto", device, layout)
        is_draft = name in plan.chosen.drafts
        impl = TightAttention(layer, layout, choice.module, limits, device, is_draft=is_draft)
        if not is_draft:
            impl.use_fit(found.layers[plan.chosen.numbers[name]])
        layer.impl, layer.attn_backend = impl, backend
        impl.packed_pages = plan.pages_per_block if plan.chosen.packed else 0
        setattr(layer, LAYOUT, (layout, plan.pages_per_block))
        impls[name] = impl
        for reason in (choice.slow, slow_prompts(layer.sliding_window, device)):
            if reason is not None:
                slow.setdefault(reason, []).append(name)
    attach_readers(layers, impls, vllm_config)
    return impls, slow


def attach_readers(
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
        layer.attn_backend = layers[target].attn_backend


def slow_prompts(window: int | None, device: torch.device) -> str | None:
    """Why prompts of a layer take longer than they could; None where they do not."""
    if window is None or device.type != "cuda":
        return None
    return (
        f"prompts in a compressed sliding window of {window} tokens run in our Triton kernel and "
        "not in FlashAttention; leave sliding_windows out if they take too long"
    )
