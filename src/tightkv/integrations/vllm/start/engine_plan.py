"""Which attention layers of an engine get compressed pages, their bits, and what that is worth."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.platforms import current_platform

from tightkv.config import KVQuantConfig, Windows
from tightkv.fit import Fit, Layers
from tightkv.integrations.vllm.layer_numbers import draft_layers, layer_number, model_layers
from tightkv.integrations.vllm.layer_shapes import (
    UNREADABLE,
    is_latent,
    layer_shape,
    unreadable_layers,
)
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.integrations.vllm.prefix.blocks import other_specs, packs, pages_per_block
from tightkv.integrations.vllm.start.engine_checks import (
    WAITS_FOR_DEVICE,
    rings_obstacle,
    speculative_tokens,
)
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.batch_split import Limits
from tightkv.integrations.vllm.step.ring_table import SAVED_SINKS, ring_size
from tightkv.model_shape import skip_reason
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.model_shape.compressible import OTHER_PAGES, windows_of_other_pages
from tightkv.pages.layout import MAX_TOKENS, PageLayout, page_layout

logger = logging.getLogger("vllm.tightkv")
_ROWS_SHARE = 20  # the rings take at most a 20th of the device's memory


@dataclass(frozen=True)
class Chosen:
    """The layers of an engine (of one worker of it) that are compressed."""

    layers: Mapping[str, Any]
    """Those of a speculator's model too."""
    reasons: Mapping[str, str | None]
    """Why other layers are not."""
    numbers: Mapping[str, int]
    """Of the model's layers; each without a number has a negative one of its own."""
    place: tuple[int, int]
    """Compressed layers of earlier pipeline stages, and of all stages."""
    others: list[Any]
    """Layers with a cache that vLLM keeps, and their specs."""
    dtype: torch.dtype
    draft_config: KVQuantConfig
    """Of a speculator's layers, which never have bits of their own."""
    packed: bool
    """Whether a block of vLLM's holds the pages of all these layers."""

    @property
    def drafts(self) -> frozenset[str]:
        return frozenset(self.layers.keys() - self.numbers.keys())

    def layouts(self, configs: Mapping[int, KVQuantConfig]) -> dict[str, PageLayout]:
        """Pages of every layer; `configs` are by the numbers of the model's layers."""
        own = dict.fromkeys(self.layers, self.draft_config)
        own |= {name: configs[number] for name, number in self.numbers.items()}
        return {
            name: page_layout(own[name], layer.num_kv_heads, layer.head_size, self.dtype)
            for name, layer in self.layers.items()
        }

    def for_fit(self) -> Layers:
        """The model's layers, as `tightkv.fit` is told of them."""

        def fit_together(configs: Mapping[int, KVQuantConfig]) -> bool:
            """vLLM's blocks are of one size in models with layers of other kinds."""
            sizes = {layout.page_bytes for layout in self.layouts(configs).values()}
            return len(sizes) == 1 or self.packed or not (self.others or is_mixed(self.layers))

        shapes = {number: layer_shape(self.layers[name]) for name, number in self.numbers.items()}
        return Layers(shapes, self.refuse, fit_together, *self.place)

    def refuse(self, cfg: KVQuantConfig) -> None:
        """Raise where layer_bits names a layer of this process that is not compressed."""
        numbers, named = set(self.numbers.values()), cfg.bits_of_layers()
        for name, reason in self.reasons.items():
            number = layer_number(name)
            if name not in self.layers and number in named and number not in numbers:
                raise ValueError(
                    f"tightkv: layer_bits={cfg.layer_bits!r} names layer {number}, which stays "
                    f"with vLLM's own cache ({reason}); leave it out"
                )


def choose(
    layers: Mapping[str, Any], options: EngineOptions, vllm_config: Any, latent: str | None
) -> Chosen:
    """The layers that can be compressed; `latent` is why those with latent attention are not."""
    cfg, drafts = options.config, draft_layers(layers, vllm_config)
    chosen, reasons = compressed_layers(layers, cfg, latent, drafts, options.windows)
    known = model_layers(chosen, drafts)
    own = [name for name in chosen if name not in drafts]
    numbers = {n: known[n] if known[n] >= 0 else -1 - i for i, n in enumerate(own)}
    place, dtype = place_in_model(cfg, len(own)), vllm_config.model_config.dtype
    others = other_specs(chosen, layers, vllm_config)
    plain = cfg.replace(protected_first=0, protected_last=0, layer_bits="").for_layer(0, 1)
    packed = packs(others, vllm_config) and not is_mixed(chosen)
    return Chosen(chosen, reasons, numbers, place, others, dtype, plain, packed)


def is_mixed(layers: Mapping[str, Any]) -> bool:
    """Whether there are full attention and sliding windows, or windows of different lengths."""
    return len({layer.sliding_window for layer in layers.values()}) > 1


def compressed_layers(
    layers: Mapping[str, Any],
    cfg: KVQuantConfig,
    latent: str | None = None,
    drafts: Collection[str] = (),
    windows: Windows = False,
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """The layers that can be compressed, and why the others cannot; an error where all cannot.

    `latent` is why those with latent attention are not.
    """
    shapes = {name: layer_shape(layer) for name, layer in layers.items()}
    reasons = {name: skip_reason(shape, "vllm", windows, cfg) for name, shape in shapes.items()}
    reasons |= dict.fromkeys(unreadable_layers(layers), UNREADABLE)
    left = {name: shape for name, shape in shapes.items() if reasons[name] is None}
    reasons |= dict.fromkeys(windows_of_other_pages(left, cfg), OTHER_PAGES)
    if latent is not None:
        reasons |= {name: latent for name, layer in layers.items() if is_latent(layer)}
    chosen = {name: layers[name] for name, reason in reasons.items() if reason is None}
    told = Counter(filter(None, reasons.values()))
    if not chosen.keys() - set(drafts):  # a compressed draft alone is worth nothing
        listed = ", ".join(sorted(told))
        raise ValueError(f"tightkv: no layer of this model can be compressed ({listed or 'none'})")
    for reason, count in sorted(told.items()):
        logger.info("tightkv: %d layers stay with vLLM's own cache: %s", count, reason)
    return chosen, reasons


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


# --- what the chosen layers get ---
@dataclass(frozen=True)
class EnginePlan:
    """What the layers of one engine (one worker of it) get."""

    options: EngineOptions
    chosen: Chosen
    layouts: dict[str, PageLayout]
    limits: Limits
    pages_per_block: int
    """Pages per block of vLLM's: more than one where other layers' blocks are larger."""

    def line(self) -> str:
        """Preset, bytes per token, and what that is worth."""
        layers = (
            LayerBytes.of_layout(layout, window=self.chosen.layers[name].sliding_window)
            for name, layout in self.layouts.items()
        )
        size, parts, rows = CacheBytes(tuple(layers)), [], self.limits.rows
        packed, plain = size.bytes_per_token, size.bf16_bytes_per_token
        rings = _row_bytes(self.layouts, self.limits.decoding) * rows
        drafts = len(self.chosen.drafts)
        told = f" ({drafts} of them a draft model's)" if drafts else ""
        windows = [layer for layer in size.layers if not layer.shape.grows]
        if count := len(size.layers) - len(windows):
            parts.append(
                f"{packed:,.0f} bytes per token in {count} layers{told}, "
                f"{plain / packed:.2f} times the tokens of a 16-bit cache ({plain:,} bytes)"
            )
        if windows:
            most = sum(layer.total_bytes(MAX_TOKENS) for layer in windows)
            exact = sum(layer.shape.uncompressed_bytes(MAX_TOKENS) for layer in windows)
            parts.append(
                f"{len(windows)} sliding windows take at most {most / 1024:,.0f} KiB per sequence "
                f"with its exact ring, in 16 bits {exact / 1024:,.0f} KiB"
            )
        parts.append(f"exact rings for {rows} sequences take {rings / 2**20:,.1f} MiB")
        return f"tightkv {self.options.config.name}: {'; '.join(parts)}"


def make_plan(options: EngineOptions, vllm_config: Any, chosen: Chosen, found: Fit) -> EnginePlan:
    """Layouts of the layers that are compressed, with the bits of their fit."""
    layouts = chosen.layouts({number: own.cfg for number, own in found.layers.items()})
    most, decoding = vllm_config.scheduler_config.max_num_seqs, 1 + speculative_tokens(vllm_config)
    if rings_obstacle(vllm_config) is not None:
        rows = 0
    elif options.exact_rows is not None:
        rows = min(options.exact_rows, most)
    else:
        memory = current_platform.get_device_total_memory() // _ROWS_SHARE
        rows = max(0, min(most, memory // _row_bytes(layouts, decoding)))
    mixed = is_mixed(chosen.layers)
    pages = pages_per_block(layouts, chosen.others, vllm_config, mixed, chosen.packed)
    limits = Limits(most, rows, decoding)
    return EnginePlan(replace(options, config=found.cfg), chosen, layouts, limits, pages)


def _row_bytes(layouts: Mapping[str, PageLayout], decoding: int) -> int:
    """Bytes of a ring, its sinks and the saved sinks that go with it, in all layers."""
    return sum(
        layout.sequence_bytes(ring_size(layout.cfg, decoding - 1))
        + SAVED_SINKS * layout.cfg.sinks * layout.exact_bytes_per_token
        for layout in layouts.values()
    )


def report(
    plan: EnginePlan,
    found: Fit,
    impls: Mapping[str, TightAttention],
    slow: Mapping[str, list[str]],
    vllm_config: Any,
) -> None:
    """Log the plan and the fit, and what is slow; the first of all workers does."""
    if vllm_config.parallel_config.rank != 0:
        return
    for line in (found.calibration_line, found.keys_line):
        if line is not None:
            logger.warning(line)
    logger.info(plan.line())
    if (why := rings_obstacle(vllm_config)) is not None:
        logger.warning("tightkv: the newest tokens are read from their codes, for %s", why)
    for note in found.notes:
        logger.info(note)
    for reason, names in slow.items():
        logger.warning("tightkv, %s: %s", _some(names, len(impls)), reason)
    blocked = cuda_graph_obstacle(impls)
    if blocked is not None and not vllm_config.model_config.enforce_eager:
        logger.warning(blocked)


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


def _some(names: Sequence[str], of: int) -> str:
    """All layers, or so many of them with the first few by name."""
    if len(names) == of:
        return f"all {of} layers"
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} of {of} layers ({listed})"
