"""Error feedback: codes of keys chosen so that scores, not keys, come out right.

A key's error e costs attention E(q.e)^2 = e^T H e, where H = E[q q^T] is the metric of the
queries of its KV head. With H = L D L^T, L unit lower triangular,

    e^T H e = sum_i D_i (e_i + sum_{j > i} L_ji e_j)^2,

so each coordinate, the last one first, is rounded together with what the later ones missed
(docs/math.md). The scale is unbiased in the same metric. Decoders know nothing of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tightkv.math.key_scale import KeyScale
from tightkv.math.per_device import Constant
from tightkv.math.rotation import Rotation

MOST_SCALE = 2.0  # a scale is at most this times the key's norm, and at least its inverse
# Coarse codes need a metric nearer to the identity, and levels that reach further out.
_SHRINKAGE = {2: 0.3, 3: 0.1, 4: 0.1}
_GAIN = {2: 0.9, 3: 0.95, 4: 0.95}
_KEPT = 4  # results a metric keeps: files may bring any number of configs and scales
_T = TypeVar("_T")
_lock = threading.RLock()


def gain(bits: int) -> float:
    """What a key of unit variance is multiplied with before it is rounded."""
    return _GAIN[bits]


def feedback_factors(metric: Tensor, rotation: Rotation, bits: int) -> Tensor:
    """Metrics [heads, dim, dim] of queries -> what encoders read, float32 of the same shape.

    In the frame of the rotation: L below the diagonal, D on it, zeros above. `metric` is
    symmetric, in the model's frame and of any scale; a head without queries (zeros) gets the
    identity, whose feedback is none.
    """
    if metric.dim() != 3 or metric.shape[1:] != (rotation.dim, rotation.dim):
        raise ValueError(
            f"metric has shape {list(metric.shape)}; expected [heads, {rotation.dim}, "
            f"{rotation.dim}]"
        )
    if not metric.isfinite().all():
        raise ValueError("metric has NaN or Inf; it must be the mean of q q^T over finite queries")
    turn = rotation.matrix().to(metric.device, torch.float64)
    turned = turn @ metric.double() @ turn.T
    turned = (turned + turned.mT) / 2
    size = turned.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    unit = torch.eye(rotation.dim, dtype=torch.float64, device=metric.device)
    share = _SHRINKAGE[bits]
    turned = torch.where(size > 0, turned / torch.where(size > 0, size, 1.0), unit)
    lower, info = torch.linalg.cholesky_ex((1 - share) * turned + share * unit)
    if info.any():
        raise ValueError("metric is not positive semidefinite; it must be a mean of q q^T")
    root = lower.diagonal(dim1=1, dim2=2)
    factors = lower / root[:, None, :]
    factors.diagonal(dim1=1, dim2=2).copy_(root.square())
    return factors.float().contiguous()


def packed_factors(factors: Tensor) -> Tensor:
    """`feedback_factors` without the zeros above the diagonal: [heads, dim * (dim + 1) / 2]."""
    dim = factors.shape[-1]
    row, column = torch.tril_indices(dim, dim, device=factors.device)
    return factors[:, row, column].contiguous()


@dataclass(frozen=True, eq=False)
class QueryMetric(Constant):
    """H = E[q q^T] of a layer's KV heads, [heads, dim, dim] in the model's frame, of any scale."""

    value: Tensor
    _made: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, init=False)
    _scaled: dict[Hashable, QueryMetric] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        with torch.inference_mode(False):  # made inside of it, it must serve outside too
            object.__setattr__(self, "value", self.value.detach().clone())

    def scaled(self, scale: KeyScale | None) -> QueryMetric:
        """The metric of queries that are multiplied by a key scale, made once."""
        if scale is None:
            return self
        s = scale.on(self.value.dtype, self.value.device)
        key = scale.value.numpy().tobytes()  # loaded caches have equal scales of their own
        return _kept(
            self._scaled, key, lambda: QueryMetric(s[:, :, None] * self.value * s[:, None])
        )

    def factors(self, rotation: Rotation, bits: int, device: torch.device) -> Tensor:
        """`feedback_factors` on a device, made once: all caches of a model share them."""

        def make() -> Tensor:
            with torch.inference_mode(False):
                return feedback_factors(self.value, rotation, bits).to(device)

        return _kept(self._made, (rotation, bits, str(device)), make)


def _kept(made: dict[Hashable, _T], key: Hashable, make: Callable[[], _T]) -> _T:
    """made[key], made if need be; the last _KEPT that were asked for are kept."""
    with _lock:
        found = made.pop(key) if key in made else make()
        made[key] = found
        if len(made) > _KEPT:
            del made[next(iter(made))]
    return found
