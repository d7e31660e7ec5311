"""Calibration: what was measured of one model, and what a config makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric


@dataclass(frozen=True)
class Costs:
    """Estimated KL, in nats per token, of one layer's coded keys and values, by their bits."""

    key: Mapping[int, float]
    value: Mapping[int, float]


@dataclass(frozen=True)
class Measured:
    """On what a calibration was measured."""

    model: str  # the name of the model
    texts: tuple[tuple[str, str], ...]  # name and SHA-256 of each text
    tokens: int
    tightkv: str  # the version that measured


@dataclass(frozen=True)
class Calibration:
    """What a cache of one model can be told."""

    fingerprint: str  # of the model (`fit.fingerprint`)
    metrics: Mapping[int, QueryMetric] = field(repr=False)  # by a layer's number in the model
    layer_bits: Mapping[str, str]  # `KVQuantConfig.layer_bits` of each preset, by its name
    costs: Mapping[int, Costs] = field(repr=False)  # of every layer that has a metric
    measured: Measured
    centers: Mapping[int, Centers] = field(repr=False, default_factory=dict)
    """By a layer's number too, of layers that can have them."""
    source: str = "this calibration"  # the file it is from, for messages
    checksum: str = ""  # of that file

    def check_model(
        self, fingerprint: str, name: str, shapes: Mapping[int, tuple[int, int]]
    ) -> None:
        """Refuse another model than the one it was measured on.

        `shapes` has the KV heads and the head_dim of each layer that can be compressed.
        """
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{self.source} was measured on {self.measured.model}; {name} is another model, or "
                f"has other weights. Measure it: tightkv calibrate {name} -o FILE, or leave "
                "calibration out"
            )
        measured = [(n, metric.value.shape[:2]) for n, metric in self.metrics.items()]
        measured += [(n, center.key.shape) for n, center in self.centers.items()]
        for layer, (heads, dim) in measured:
            if shapes.get(layer) != (heads, dim):
                raise ValueError(
                    f"{self.source}: layer {layer} has {heads} KV heads of {dim} channels; in "
                    f"{name} it has {shapes.get(layer)}"
                )

    def applied(self, cfg: KVQuantConfig) -> KVQuantConfig:
        """`cfg` with the bits that were measured; what the user says of layers comes first."""
        if cfg.names_layers or cfg.name not in self.layer_bits:
            return cfg
        return cfg.replace(layer_bits=self.layer_bits[cfg.name])

    def shard(self, rank: int, ranks: int) -> Calibration:
        """Metrics and centers of the KV heads that a rank of tensor parallelism has."""
        metrics = {
            n: QueryMetric(own_heads(metric.value, rank, ranks))
            for n, metric in self.metrics.items()
        }
        centers = {
            n: Centers(*(own_heads(x, rank, ranks) for x in (both.key, both.value)))
            for n, both in self.centers.items()
        }
        return replace(self, metrics=metrics, centers=centers)


def own_heads(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of a rank, of a tensor of all KV heads.

    With more ranks than KV heads, neighboring ranks have the same one.
    """
    first = rank * len(whole) // ranks
    return whole[first : first + max(1, len(whole) // ranks)]
