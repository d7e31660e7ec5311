"""Which attention layers of an engine get compressed pages, and how a layer is changed over."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from tightkv.calibration import not_used
from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.attention import TightAttention
from tightkv.integrations.vllm.backend import TightBackend
from tightkv.integrations.vllm.calibrated import (
    find_for_engine,
    set_calibrated_feedback,
    set_centers,
    without_bits,
)
from tightkv.integrations.vllm.compat import page_spec
from tightkv.integrations.vllm.cuts import Limits
from tightkv.integrations.vllm.feedback import set_feedback
from tightkv.integrations.vllm.options import EngineOptions, engine_options, with_options
from tightkv.integrations.vllm.protection import (
    check_keys,
    in_equal_blocks,
    layer_number,
    model_layers,
)
from tightkv.kernels import registry
from tightkv.layout import RING_SLACK, PageLayout, page_layout

logger = logging.getLogger("vllm.tightkv")  # vLLM's handlers show its children
_LAYOUT = "_tightkv_layout"
_ROWS_SHARE = 20  # the exact rings take at most a 20th of the device's memory


@dataclass(frozen=True)
class EnginePlan:
    """What the layers of one engine (one worker of it) get."""

    options: EngineOptions
    layouts: dict[str, PageLayout]
    rows: int
    block_pages: int = 1
    """Pages a block of vLLM's: more than one where other layers' blocks are larger."""

    @property
    def page_bytes(self) -> set[int]:
        return {layout.page_bytes for layout in self.layouts.values()}

    def line(self) -> str:
        """Preset, bytes a token, and what that is worth."""
        cfg, layouts = self.options.config, self.layouts.values()
        packed = sum(layout.bytes_per_token for layout in layouts)
        plain = sum(4 * layout.num_kv_heads * layout.head_dim for layout in layouts)
        rings = sum(layout.sequence_bytes() for layout in layouts) * self.rows
        return (
            f"tightkv {cfg.name}: {packed:,.0f} bytes a token in {len(layouts)} layers, "
            f"{plain / packed:.2f} times the tokens of a 16-bit cache ({plain:,} bytes); "
            f"exact rings for {self.rows} sequences take {rings / 2**20:,.1f} MiB"
        )


def compressed_spec(layer: Any, spec: Any) -> Any:
    """What a layer tells vLLM about its cache: our pages, or `spec` as vLLM has it."""
    layout, pages = getattr(layer, _LAYOUT, (None, 1))
    return spec if layout is None else page_spec(spec, layout, pages)


def change_over(vllm_config: Any) -> None:
    """Decide for every layer of the engine with a cache, and give the chosen ones our attention."""
    options = engine_options(vllm_config.additional_config)
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if options is None or all(hasattr(layer, _LAYOUT) for layer in layers.values()):
        return
    refuse_impossible(options, vllm_config)
    given, calibration = options, find_for_engine(options.config, vllm_config)
    line = not_used(options.config, calibration, vllm_config.model_config.model)
    if calibration is not None:
        options = replace(options, config=calibration.applied(options.config))
    chosen = compressed_layers(layers, options.config)
    checked = check_keys(options.config, vllm_config)
    plan = make_plan(replace(options, config=checked.config), vllm_config, chosen)
    for layer in layers.values():
        setattr(layer, _LAYOUT, (None, 1))
    others = _other_specs(plan, layers, vllm_config)
    if others and len(plan.page_bytes) > 1 and (checked.raised or options != given):
        if options != given:
            line, checked = without_bits(given.config), check_keys(given.config, vllm_config)
        if checked.raised:
            checked = in_equal_blocks(given.config, checked)
        plan = make_plan(given, vllm_config, chosen)
    plan = replace(plan, block_pages=_fit_other_layers(plan, others, vllm_config))
    most = vllm_config.scheduler_config.max_num_seqs
    limits = Limits(most, plan.rows, 1 + _speculative_tokens(vllm_config))
    slow: dict[str, list[str]] = {}
    for name, layout in plan.layouts.items():
        layer = layers[name]
        device = layer._k_scale.device
        choice = registry.choose("auto", device, layout)
        layer.impl = TightAttention(layer, layout, choice.module, limits, device)
        layer.attn_backend = TightBackend
        setattr(layer, _LAYOUT, (layout, plan.block_pages))
        if choice.slow is not None:
            slow.setdefault(choice.slow, []).append(name)
    impls = {name: layers[name].impl for name in plan.layouts}
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    feedback = None
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
        if feedback is not None:
            logger.info(feedback)
        for reason, names in slow.items():
            logger.warning("tightkv, %s: %s", _some(names, len(plan.layouts)), reason)
        blocked = no_graphs(impls)
        if blocked is not None and not vllm_config.model_config.enforce_eager:
            logger.warning(blocked)


def no_graphs(impls: Mapping[str, TightAttention]) -> str | None:
    """Why vLLM cannot capture CUDA graphs of decoding with these layers; None if it can."""
    if all(impl.capturable or impl.device.type != "cuda" for impl in impls.values()):
        return None
    plain = [name for name, impl in impls.items() if impl.step.kernel_name == "reference"]
    if not plain:
        return (
            "tightkv: no CUDA graphs, check_finite waits for the device; leave it out to have them"
        )
    return (
        f"tightkv: no CUDA graphs, {_some(plain, len(impls))} run in plain torch; choose bits and "
        "a method that have kernels (of protected layers: protected_bits=8) to have them"
    )


def _some(names: Sequence[str], of: int) -> str:
    """All layers, or so many of them with the first few by name."""
    if len(names) == of:
        return f"all {of} layers"
    told = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} of {of} layers ({told})"


def _other_specs(plan: EnginePlan, layers: dict[str, Any], vllm_config: Any) -> list[Any]:
    """(layer, spec) of layers that are not compressed and have a cache of their own."""
    own = [
        layer
        for name, layer in layers.items()
        if name not in plan.layouts and _shared_layer(layer) is None
    ]
    specs = [(layer, layer.get_kv_cache_spec(vllm_config)) for layer in own]
    return [(layer, spec) for layer, spec in specs if spec is not None]


def _fit_other_layers(plan: EnginePlan, others: Sequence[Any], vllm_config: Any) -> int:
    """Pages a block, so that it is no smaller than the block of a layer that is not compressed.

    vLLM's blocks are of one size. Sliding-window layers take the shortest that their attention
    can have, states of linear attention what they have; the rest of a block is padding.
    """
    needed, kinds = 0, set()
    for layer, spec in others:
        kinds.add(type(spec))
        size = spec.page_size_bytes
        if isinstance(spec, SlidingWindowSpec):
            sizes = layer.attn_backend.get_supported_kernel_block_sizes()
            shortest = min(getattr(block, "base", block) for block in sizes)
            size = size // spec.block_size * shortest
        elif isinstance(spec, MambaSpec):  # padded to vLLM's own blocks of attention
            size = replace(spec, page_size_padded=None).page_size_bytes
        needed = max(needed, size)
    pages = plan.page_bytes
    count = max(1, -(-needed // max(pages)))
    if count > 1 and len(pages) > 1:
        raise ValueError(
            "tightkv: protected layers or layer_bits in a model with other layers' larger blocks; "
            "set protected_first and protected_last to 0 and leave layer_bits out"
        )
    states = {kind for kind in kinds if issubclass(kind, MambaSpec)}
    if states:
        count = fit_states(count, plan.options.config.page_size, kinds - states, vllm_config)
    if any(issubclass(kind, SlidingWindowSpec) for kind in kinds):
        vllm_config.cache_config.skip_page_size_padded = count * max(pages)
    return count


def fit_states(pages: int, page_size: int, others: set[type], vllm_config: Any) -> int:
    """Pages a block, with blocks of states as long as ours: prefixes end where both do.

    With other boundaries vLLM's hits could end inside a page, which nobody could continue.
    """
    cache = vllm_config.cache_config
    cache.mamba_page_size_padded = None  # to our blocks, by vLLM itself
    if not cache.enable_prefix_caching:
        return pages
    if cache.mamba_cache_mode == "align" and others:
        told = ", ".join(sorted(kind.__name__ for kind in others))
        raise ValueError(
            f"tightkv with prefix caching in a model with states and other layers of its own "
            f"({told}): prefixes could end inside a page; add --no-enable-prefix-caching"
        )
    if cache.mamba_cache_mode == "all":  # a state every block, at the end of a kernel's chunk
        chunk = vllm_config.model_config.get_mamba_chunk_size() or 1
        unit = math.lcm(chunk, page_size) // page_size
        pages = -(-pages // unit) * unit
    cache.mamba_block_size = pages * page_size
    return pages


def compressed_layers(layers: Mapping[str, Any], cfg: KVQuantConfig) -> dict[str, Any]:
    """The layers that can be compressed; an error where none can, or not one with layer_bits."""
    shared = {_shared_layer(layer) for layer in layers.values()}
    reasons = {name: kept_reason(layer, name in shared) for name, layer in layers.items()}
    chosen = {name: layers[name] for name, reason in reasons.items() if reason is None}
    if not chosen:
        told = ", ".join(sorted({reason for reason in reasons.values() if reason}))
        raise ValueError(f"tightkv: no layer of this model can be compressed ({told or 'none'})")
    for reason in sorted({reason for reason in reasons.values() if reason}):
        count = list(reasons.values()).count(reason)
        logger.info("tightkv: %d layers stay with vLLM's own cache: %s", count, reason)
    numbers = set(model_layers(chosen).values())
    for name, kept in reasons.items():
        number = layer_number(name)
        if kept is not None and number in cfg.bits_of_layers() and number not in numbers:
            raise ValueError(
                f"tightkv: layer_bits={cfg.layer_bits!r} names layer {number}, which stays with "
                f"vLLM's own cache ({kept}); leave it out"
            )
    return chosen


def make_plan(options: EngineOptions, vllm_config: Any, chosen: Mapping[str, Any]) -> EnginePlan:
    """Layouts of the layers that are compressed."""
    dtype, numbers = vllm_config.model_config.dtype, model_layers(chosen)
    layouts = {
        name: page_layout(
            options.config.for_layer(index, len(chosen), numbers[name]),
            layer.num_kv_heads,
            layer.head_size,
            dtype,
        )
        for index, (name, layer) in enumerate(chosen.items())
    }
    return EnginePlan(options, layouts, exact_rows(options, vllm_config, layouts))


def exact_rows(options: EngineOptions, vllm_config: Any, layouts: dict[str, PageLayout]) -> int:
    """How many sequences can have an exact ring at a time."""
    if vllm_config.kv_transfer_config is not None:
        return 0  # blocks are filled from elsewhere, unseen by the tags of the rings
    cache = vllm_config.cache_config
    if cache.prefix_match_unit is not None:
        return 0  # blocks are copied for prefixes that end inside one, unseen as well
    most: int = vllm_config.scheduler_config.max_num_seqs
    if options.exact_rows is not None:
        return min(options.exact_rows, most)
    memory = current_platform.get_device_total_memory() // _ROWS_SHARE
    return max(0, min(most, memory // sum(la.sequence_bytes() for la in layouts.values())))


def kept_reason(layer: Any, shared: bool) -> str | None:
    """Why a layer stays with vLLM's own attention, or None where it is compressed."""
    if type(layer) is not Attention:
        return type(layer).__name__
    if layer.attn_type != AttentionType.DECODER:
        return f"{layer.attn_type} attention"
    if layer.sliding_window is not None:
        return "sliding window"
    if shared or _shared_layer(layer) is not None:
        return "shares its cache with another layer"
    if layer.has_sink or getattr(layer.impl, "alibi_slopes", None) is not None:
        return "sink logits" if layer.has_sink else "ALiBi"
    if getattr(layer, "use_mm_prefix", False):
        return "images attend in both directions"
    if layer.head_size_v != layer.head_size or layer.head_size % 16:
        return f"head size {layer.head_size} and {layer.head_size_v}"
    return None


def _shared_layer(layer: Any) -> str | None:
    """The layer whose cache this one reads instead of one of its own."""
    name: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return name


def refuse_impossible(options: EngineOptions, vllm_config: Any) -> None:
    """Raise at start what could only go wrong later."""
    cfg, cache, parallel = options.config, vllm_config.cache_config, vllm_config.parallel_config
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        raise ValueError(
            f"tightkv with --kv-cache-dtype {cache.cache_dtype}: both would compress the cache; "
            "leave --kv-cache-dtype at auto, or leave tightkv out"
        )
    if cache.user_specified_block_size and cache.block_size != cfg.page_size:
        raise ValueError(
            f"tightkv with --block-size {cache.block_size}: a block is a page of "
            f"{cfg.page_size} tokens; leave --block-size out or set page_size to it"
        )
    if cache.prefix_match_unit is not None and cache.prefix_match_unit % cfg.page_size:
        raise ValueError(
            f"tightkv with --prefix-match-unit {cache.prefix_match_unit}: prefixes end at pages of "
            f"{cfg.page_size} tokens; leave it out or set a multiple of {cfg.page_size}"
        )
    if getattr(vllm_config.model_config, "rswa_window", None) is not None:
        raise ValueError("tightkv with reference sliding windows (rswa_window): not supported")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"tightkv with {name}={getattr(parallel, name)}; supported: 1")
    if parallel.pipeline_parallel_size > 1 and (cfg.protected_first or cfg.protected_last):
        raise ValueError("tightkv: protected layers with pipeline parallelism; set both to 0")
    count = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    beyond = max(cfg.bits_of_layers(), default=0)
    if count is not None and beyond >= count and vllm_config.speculative_config is None:
        raise ValueError(
            f"tightkv: layer_bits={cfg.layer_bits!r} names layer {beyond}; the model has layers 0 "
            f"to {count - 1}"
        )
    tokens = _speculative_tokens(vllm_config)
    if tokens > RING_SLACK:
        raise ValueError(f"tightkv with {tokens} speculative tokens; supported: up to {RING_SLACK}")


def _speculative_tokens(vllm_config: Any) -> int:
    """Tokens a sequence may decode beyond the one that is certain."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens or 0
