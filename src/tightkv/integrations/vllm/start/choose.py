"""Which attention layers of an engine get compressed pages, and which bits they can have."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_pp_group

from tightkv.config import KVQuantConfig, Windows
from tightkv.fit import Layers
from tightkv.integrations.vllm.layer_numbers import draft_layers, layer_number, model_layers
from tightkv.integrations.vllm.layer_shapes import (
    UNREADABLE,
    is_latent,
    layer_shape,
    unreadable_layers,
)
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.integrations.vllm.prefix.blocks import other_specs, packs
from tightkv.model_shape import skip_reason
from tightkv.model_shape.compressible import OTHER_PAGES, windows_of_other_pages
from tightkv.pages.layout import PageLayout, page_layout

logger = logging.getLogger("vllm.tightkv")


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
