"""Which layers of a checkpoint need more bits for their keys, and the line that reports it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightkv.config import KVQuantConfig
from tightkv.fit.attention_weights import NOT_READABLE, WeightTensor
from tightkv.fit.key_noise import NOISE_LIMIT, LayerScores, protected_layer_bits, read_scores
from tightkv.math.codebook import get_codebook
from tightkv.model_shape import ModelShape, compressed_layers, read_model_shape
from tightkv.model_shape.planner import config_plan


@dataclass(frozen=True)
class CheckedConfig:
    """A config with the bits that its model's keys need, and what is said about it, if anything."""

    config: KVQuantConfig
    line: str | None = None
    raised: bool = False  # whether layers got more bits


class KeyCheck:
    """The layers of one model. Weights are read once, for all configs."""

    def __init__(
        self,
        source: str | os.PathLike[str] | Any,
        tensors: Mapping[str, WeightTensor] | None = None,
        reason: str | None = None,
    ) -> None:
        """`source`: a checkpoint's folder; or a model's config, and its weights by name.

        `reason`: why there is no such source, if so.
        """
        self.reason = reason
        self._scores: dict[int, LayerScores] = {}
        self._known: dict[KVQuantConfig, CheckedConfig] = {}
        if reason is not None:
            return
        try:
            self.shape: ModelShape = read_model_shape(source)
            compressed = compressed_layers(self.shape.layers)
            self._scores = read_scores(self.shape, compressed, tensors) if compressed else {}
        except NOT_READABLE as error:
            self.reason = str(error)

    def protect(self, cfg: KVQuantConfig) -> CheckedConfig:
        """`cfg` with the layer_bits of noisy layers, unless its protect_keys is off."""
        if cfg not in self._known:
            self._known[cfg] = self._protect(cfg)
        return self._known[cfg]

    def _protect(self, cfg: KVQuantConfig) -> CheckedConfig:
        if not wants_check(cfg):
            return CheckedConfig(cfg)
        try:
            if self.reason is not None:
                raise ValueError(self.reason)
            noise = {i: scores.worst_noise(cfg.page_size) for i, scores in self._scores.items()}
        except ValueError as error:
            return CheckedConfig(
                cfg,
                f"tightkv {cfg.name}: not checked whether keys of some layers need more bits: "
                f"{error} (layer_bits sets bits of layers, protect_keys=false skips the check)",
            )
        checked = cfg.replace(layer_bits=protected_layer_bits(cfg, noise))
        if checked == cfg:
            return CheckedConfig(cfg)
        return CheckedConfig(checked, protection_line(cfg, checked, noise, self.shape), True)


def wants_check(cfg: KVQuantConfig) -> bool:
    """Whether keys may get more bits than the config says."""
    return cfg.protect_keys and cfg.key_bits != 16


def protection_line(
    cfg: KVQuantConfig, checked: KVQuantConfig, noise: dict[int, float], shape: ModelShape
) -> str:
    """What `checked` changes in `cfg`, why, what it costs, and the way back."""
    order = {layer: number for number, layer in enumerate(sorted(noise))}
    new = set(checked.bits_of_layers()) - set(cfg.bits_of_layers())
    own = {layer: cfg.for_layer(order[layer], len(order), layer) for layer in new}
    worst = max(noise[layer] * get_codebook("fp8", own[layer].key_bits).distortion for layer in new)
    before, after = (config_plan("", shape, c).bytes_per_token for c in (cfg, checked))
    return (
        f"tightkv {cfg.name}: {raised_layers(cfg, checked)}: by its weights, codes of fewer bits "
        f"would put noise of variance {worst:,.0f} into attention scores (limit {NOISE_LIMIT:g}). "
        f"{after:,.0f} bytes per token instead of {before:,.0f}; protect_keys=false turns this off"
    )


def in_equal_blocks(cfg: KVQuantConfig, checked: CheckedConfig) -> CheckedConfig:
    """`cfg` as it is, where layers with more bits would have pages that vLLM cannot have.

    Its blocks are of one size in models with layers of other kinds.
    """
    return CheckedConfig(
        cfg,
        f"tightkv {cfg.name}: by its weights, this model needs "
        f"{raised_layers(cfg, checked.config)}, but vLLM's blocks are of one size in models with "
        f"layers of other kinds: nothing is changed, and attention scores may be noisy. "
        f"key_bits=8 gives all layers 8-bit keys; protect_keys=false skips this check",
    )


def raised_layers(cfg: KVQuantConfig, checked: KVQuantConfig) -> str:
    """'8-bit keys in layers 0, 3': what `checked` has beyond the layer_bits of `cfg`."""
    given, groups = cfg.bits_of_layers(), dict[int, list[str]]()
    for layer, (bits, _) in checked.bits_of_layers().items():
        if layer not in given:
            groups.setdefault(bits, []).append(str(layer))
    return ", ".join(
        f"{'no compression' if bits == 16 else f'{bits}-bit keys'} in "
        f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"
        for bits, layers in groups.items()
    )
