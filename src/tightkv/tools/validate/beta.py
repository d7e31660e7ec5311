"""Claim 4: a rotated coordinate follows the Beta law, whatever the input."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tightkv.math.lloyd import beta_cdf
from tightkv.math.rotation import make_rotation
from tightkv.tools.validate.inputs import unit_vectors
from tightkv.tools.validate.report import Claim, Options
from tightkv.tools.validate.stats import LEVEL, ks_test

REJECTED = 1e-6  # p-value a control must stay below


def coordinates(options: Options, rotation: str, dim: int, kind: str, count: int) -> Tensor:
    """sqrt(dim) times one coordinate of each of `count` vectors, each rotated by its own draw.

    One coordinate a draw keeps the samples independent: those of one vector are not.
    """
    seed = options.stream(f"beta {rotation} {dim} {kind}")
    x = unit_vectors(kind, seed, count, dim)
    picked = []
    for i, row in enumerate(x):
        picked.append(make_rotation(rotation, dim, seed + i)(row)[i % dim])
    return torch.stack(picked) * dim**0.5


def check(options: Options) -> Iterator[Claim]:
    """Kolmogorov-Smirnov tests of both rotations at several sizes, and controls."""
    fast, slow = options.samples(4000, 600), options.samples(1000, 150)
    power_of_two = options.dim & (options.dim - 1) == 0
    for rotation, dim, kind, count in (
        ("hadamard", 64, "uneven", fast),
        ("hadamard", options.dim if power_of_two else 128, "uneven", fast),
        ("hadamard", 256, "uneven", fast),
        ("haar", 64, "one-hot", slow),
        ("haar", 80, "uneven", slow),
        ("haar", options.dim, "one-hot", slow),
        ("none", 80, "uneven", fast),
        ("none", options.dim, "uneven", fast),
    ):
        yield _row(options, rotation, dim, kind, count)


def _row(options: Options, rotation: str, dim: int, kind: str, count: int) -> Claim:
    samples = coordinates(options, rotation, dim, kind, count)
    distance, p_value = ks_test(samples, lambda t: beta_cdf(t, dim))
    control = rotation == "none"
    claim = "no rotation: the test must reject (p)" if control else "Beta law not rejected (p)"
    setting = f"{rotation}, {dim} dimensions, {kind} vectors, {count} draws"
    bounds = {"upper": REJECTED} if control else {"lower": LEVEL}
    detail = {"ks_distance": distance, "draws": count}
    return Claim("4 rotation", claim, setting, p_value, detail=detail, **bounds)
