"""Checkpoint: a folder of weights, as the source of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Calibration, find_for_folder, not_comparable
from tightkv.fit.checkpoint_metric import LEAST_BITS, ByLayer, key_energies, query_metrics
from tightkv.fit.decide import Layer
from tightkv.fit.key_check import KeyCheck
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import KeyScale, balanced_scale


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

    def find_calibration(self, cfg: KVQuantConfig) -> Calibration | None:
        """The calibration that `cfg` names, with the KV heads of this rank."""
        if not cfg.calibration:
            return None
        if isinstance(self.folder, str):
            raise not_comparable(cfg, f"the model: {self.folder}")
        found = find_for_folder(cfg, self.folder, self.name)
        return None if found is None else found.shard(self.rank, self.ranks)

    def key_scales(
        self, cfg: KVQuantConfig, layers: Mapping[int, Layer]
    ) -> tuple[dict[int, KeyScale], str | None]:
        """Scales of layers whose key channels are uneven by the weights of their keys.

        A layer whose weights cannot be read has none, and is never an error.
        """
        mine = _readable(layers)
        if isinstance(self.folder, str) or not mine:
            return {}, None
        try:
            known = key_energies(self.folder, mine, cfg.page_size, **self._place)
        except RuntimeError:  # the device's own
            return {}, None
        own = {n: energy for n, energy in known.items() if _has_heads(energy, mine[n])}
        scales = {n: scale for n, x in own.items() if (scale := balanced_scale(x)) is not None}
        line = f"tightkv {cfg.name}: key channels of {len(scales)} layers are scaled"
        return scales, line if scales else None

    def query_metrics(
        self, cfg: KVQuantConfig, layers: Mapping[int, Layer]
    ) -> tuple[dict[int, QueryMetric], str | None]:
        """Metrics of layers that gain by them, from the weights of their queries.

        A layer whose weights cannot be read has none, and is never an error.
        """
        mine = _readable(layers)
        mine = {n: layer for n, layer in mine.items() if layer.cfg.key_bits >= LEAST_BITS}
        if not mine:
            return {}, None
        found = self._metrics(mine)
        own = {n: QueryMetric(x) for n, x in found.by_layer.items() if _has_heads(x, mine[n])}
        reason = found.reason
        if other := sorted(found.by_layer.keys() - own.keys()):
            reason = f"layer {other[-1]}: its heads are not those of the checkpoint"
        why = "" if reason is None else f" ({reason})"
        return own, (
            f"tightkv {cfg.name}: {len(own)} of {len(mine)} layers code keys with error feedback, "
            f"in the metric of the checkpoint's query weights{why}; feedback=off turns it off"
        )

    def _metrics(self, layers: Mapping[int, Layer]) -> ByLayer:
        if isinstance(self.folder, str):
            return ByLayer(reason=self.folder)
        try:
            return query_metrics(self.folder, layers, **self._place)
        except RuntimeError as error:  # the device's own
            return ByLayer(reason=str(error))

    @property
    def _place(self) -> dict[str, Any]:
        return {"rank": self.rank, "ranks": self.ranks, "device": self.device}


def _readable(layers: Mapping[int, Layer]) -> dict[int, Layer]:
    """Layers of this model that take feedback; windows may have a RoPE of their own."""
    return {
        n: layer
        for n, layer in layers.items()
        if n >= 0 and layer.cfg.takes_feedback and layer.shape.kind == "full"
    }


def _has_heads(found: Tensor, layer: Layer) -> bool:
    return found.shape[:2] == (layer.shape.num_kv_heads, layer.shape.head_dim)
