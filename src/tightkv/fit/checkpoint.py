"""Checkpoint: a folder of weights, as the source of a fit."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.fit.attention_weights import NOT_READABLE, AttentionWeights
from tightkv.fit.calibration import Calibration, find_calibration
from tightkv.fit.decide import Layer, Metrics, Scales
from tightkv.fit.fingerprint import folder_fingerprint
from tightkv.fit.key_check import KeyCheck
from tightkv.fit.query_metric import KNOWN, LEAST_BITS, MetricReader
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import balanced_scale
from tightkv.model_shape import ModelShape, read_model_shape

ByLayer = tuple[dict[int, Tensor], str | None]
"""Float32 tensors by a layer's number in the model, and why there are no others, if so."""


@dataclass(frozen=True)
class Checkpoint:
    """The folder with the weights of a model, or why there is none that can be read.

    Of `ranks` tensor-parallel ranks, `rank` gets its own KV heads. Metrics are on `device`.
    """

    folder: Path | str
    name: str
    rank: int = 0
    ranks: int = 1
    device: torch.device | str = "cpu"

    @cached_property
    def key_check(self) -> KeyCheck:
        reason = self.folder if isinstance(self.folder, str) else None
        return KeyCheck(self.folder, reason=reason)

    @property
    def _path(self) -> Path:
        if isinstance(self.folder, str):
            raise ValueError(self.folder)
        return self.folder

    def find_calibration(self, cfg: KVQuantConfig) -> Calibration | None:
        """The calibration that `cfg` names, with the KV heads of this rank."""

        def identify() -> tuple[str, ModelShape]:
            try:
                return folder_fingerprint(self._path), read_model_shape(self._path)
            except NOT_READABLE as error:
                name = "the model" if isinstance(self.folder, str) else self.name
                raise ValueError(
                    f"tightkv: calibration={cfg.calibration!r} cannot be compared with {name}: "
                    f"{error}. Leave calibration out"
                ) from None

        found = find_calibration(cfg, self.name, identify)
        return None if found is None else found.shard(self.rank, self.ranks)

    def key_scales(self, cfg: KVQuantConfig, layers: Mapping[int, Layer]) -> Scales:
        """Scales of layers whose key channels are uneven by the weights of their keys.

        A layer whose weights cannot be read has none, and is never an error.
        """
        mine = _readable(layers)
        known, _ = self.key_energies(mine, cfg.page_size)
        own = {n: energy for n, energy in known.items() if _has_heads(energy, mine[n])}
        scales = {n: scale for n, x in own.items() if (scale := balanced_scale(x)) is not None}
        line = f"tightkv {cfg.name}: key channels of {len(scales)} layers are scaled"
        return scales, line if scales else None

    def query_metrics(self, cfg: KVQuantConfig, layers: Mapping[int, Layer]) -> Metrics:
        """Metrics of layers that gain by them, from the weights of their queries.

        A layer whose weights cannot be read has none, and is never an error.
        """
        mine = _readable(layers)
        mine = {n: layer for n, layer in mine.items() if layer.cfg.key_bits >= LEAST_BITS}
        if not mine:
            return {}, None
        found, reason = self.metrics(mine)
        own = {n: QueryMetric(x) for n, x in found.items() if _has_heads(x, mine[n])}
        if other := sorted(found.keys() - own.keys()):
            reason = f"layer {other[-1]}: its heads are not those of the checkpoint"
        why = "" if reason is None else f" ({reason})"
        return own, (
            f"tightkv {cfg.name}: {len(own)} of {len(mine)} layers code keys with error feedback, "
            f"in the metric of the checkpoint's query weights{why}; feedback=off turns it off"
        )

    def metrics(self, layers: Collection[int]) -> ByLayer:
        """Of queries: [KV heads, dim, dim]."""
        return self._each(layers, MetricReader.metric)

    def key_energies(self, layers: Collection[int], page_size: int) -> ByLayer:
        """[KV heads, dim]: what page means leave of each channel."""
        return self._each(layers, lambda reader, n: reader.key_energy(n, page_size))

    def _each(
        self, layers: Collection[int], read: Callable[[MetricReader, int], Tensor]
    ) -> ByLayer:
        found: dict[int, Tensor] = {}
        reason = None
        try:
            shape = read_model_shape(self._path)
            if shape.model_type not in KNOWN:
                raise ValueError(f"queries of model_type {shape.model_type!r} are not known")
            weights = AttentionWeights(shape, sorted(layers), None)
            reader = MetricReader(weights, self.rank, self.ranks, self.device)
            for layer in weights.layers:
                try:
                    found[layer] = read(reader, layer)
                except (*NOT_READABLE, IndexError) as error:
                    reason = reason or f"layer {layer}: {error}"
        except (*NOT_READABLE, RuntimeError) as error:  # the latter is the device's own
            return {}, str(error)
        return found, reason


def _readable(layers: Mapping[int, Layer]) -> dict[int, Layer]:
    """Layers of this model that take feedback; windows may have a RoPE of their own."""
    return {
        n: layer
        for n, layer in layers.items()
        if n >= 0 and layer.cfg.takes_feedback and layer.shape.kind == "full"
    }


def _has_heads(found: Tensor, layer: Layer) -> bool:
    return found.shape[:2] == (layer.shape.num_kv_heads, layer.shape.head_dim)
