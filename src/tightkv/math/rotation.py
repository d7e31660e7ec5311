"""Seeded orthogonal maps on the last dimension of a tensor.

`make_rotation` gives the randomized Hadamard transform (fast, for powers of two) or a Haar-random
matrix (any size); `split_rotation` rotates a set of outlier channels apart from the others.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from tightkv.math.per_device import Constant, PerDevice
from tightkv.math.random import random_normal, random_signs

# The two halves of a split rotation; far from the small stream numbers callers use.
_SPLIT_STREAMS = (2**32 + 1, 2**32 + 2)


@dataclass(frozen=True, eq=False)
class Rotation(Constant, ABC):
    """An orthogonal map on vectors of `dim` coordinates; `kind` names the map really applied."""

    kind: str
    dim: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the last dimension of `x`: any leading shape, any float dtype -> float32."""

    @abstractmethod
    def inverse(self, y: Tensor) -> Tensor:
        """Undo the rotation -> float32."""

    def matrix(self) -> Tensor:
        """[dim, dim] float32 on the CPU: `rotation(x) == x @ matrix.T` up to rounding."""
        images = self(torch.eye(self.dim, dtype=torch.float32, device="cpu"))  # row i is R e_i
        return images.T.contiguous()

    def table(self, device: torch.device) -> Tensor:
        """What fused kernels read, float32 on `device`: signs [dim], or the matrix transposed."""
        return self._table.on(device)

    @cached_property
    def _table(self) -> PerDevice:
        return PerDevice(self.matrix().T.contiguous())


class _Identity(Rotation):
    def __call__(self, x: Tensor) -> Tensor:
        return x.to(torch.float32, copy=True)

    def inverse(self, y: Tensor) -> Tensor:
        return y.to(torch.float32, copy=True)


@dataclass(frozen=True, eq=False)
class _Hadamard(Rotation):
    """y = H (signs * x) / sqrt(dim), with H in natural (Sylvester) order."""

    signs: PerDevice

    @property
    def _table(self) -> PerDevice:
        return self.signs

    def __call__(self, x: Tensor) -> Tensor:
        sums = _hadamard_sums(x.to(torch.float32) * self.signs.on(x.device))
        return torch.mul(sums, self.dim**-0.5)

    def inverse(self, y: Tensor) -> Tensor:
        sums = torch.mul(_hadamard_sums(y.to(torch.float32)), self.dim**-0.5)
        return sums * self.signs.on(y.device)


def _hadamard_sums(x: Tensor) -> Tensor:
    """x @ H for the unscaled H, combining neighbors at distance 1, 2, 4, ..., dim / 2 in turn."""
    for _ in range(x.shape[-1].bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        # Each step moves index bit 0 to the top; after log2(dim) steps all bits are back in place.
        x = torch.cat((even + odd, even - odd), dim=-1)
    return x


@dataclass(frozen=True, eq=False)
class _Dense(Rotation):
    """y = M x in float64, rounded once, so that the order of the sums hardly ever shows."""

    weight: PerDevice  # float64 [dim, dim], entries rounded to float32

    def __call__(self, x: Tensor) -> Tensor:
        return (x.to(torch.float64) @ self.weight.on(x.device).T).to(torch.float32)

    def inverse(self, y: Tensor) -> Tensor:
        return (y.to(torch.float64) @ self.weight.on(y.device)).to(torch.float32)


@dataclass(frozen=True, eq=False)
class _Split(Rotation):
    """y = concat(first x[channels], rest x[the others, in order])."""

    first: Rotation
    rest: Rotation
    order: PerDevice  # int64 [dim]: channels, then the others
    undo: PerDevice  # int64 [dim]: the inverse permutation

    def __call__(self, x: Tensor) -> Tensor:
        x = x.index_select(-1, self.order.on(x.device))
        k = self.first.dim
        return torch.cat((self.first(x[..., :k]), self.rest(x[..., k:])), dim=-1)

    def inverse(self, y: Tensor) -> Tensor:
        k = self.first.dim
        x = torch.cat((self.first.inverse(y[..., :k]), self.rest.inverse(y[..., k:])), dim=-1)
        return x.index_select(-1, self.undo.on(y.device))


def make_rotation(kind: str, dim: int, seed: int = 0, stream: int = 0) -> Rotation:
    """The rotation of this kind, size and seed; equal arguments give the same (cached) object.

    "hadamard" is the randomized Hadamard transform where `dim` is a power of two. No fast transform
    exists for the other sizes: there "hadamard" means "haar", and the result says so in its `kind`.
    """
    if kind == "hadamard" and dim & (dim - 1):
        kind = "haar"
    return _cached_rotation(kind, dim, seed, stream)


@lru_cache(maxsize=256)
def _cached_rotation(kind: str, dim: int, seed: int, stream: int) -> Rotation:
    if kind == "hadamard":
        return _Hadamard(kind, dim, PerDevice(random_signs(seed, stream, dim)))
    if kind == "haar":
        return _Dense(kind, dim, PerDevice(_haar_matrix(seed, stream, dim)))
    return _Identity(kind, dim)


def _haar_matrix(seed: int, stream: int, dim: int) -> Tensor:
    """A Haar-random orthogonal matrix: Q of a Gaussian matrix, made unique by diag(R) > 0."""
    q, r = torch.linalg.qr(random_normal(seed, stream, (dim, dim)))
    # Rounding hides last-bit differences between LAPACK builds and makes matrix() the exact map.
    rounded: Tensor = (q * r.diagonal().sign()).to(torch.float32)
    return rounded.to(torch.float64)


@lru_cache(maxsize=256)
def split_rotation(kind: str, dim: int, seed: int, channels: tuple[int, ...]) -> Rotation:
    """Rotate `channels` and the other channels apart: y = concat(R1 x[channels], R2 x[others]).

    The two rotations are of the given kind, with independent streams; the others keep their order.
    """
    chosen = set(channels)
    others = [channel for channel in range(dim) if channel not in chosen]
    order = torch.tensor([*channels, *others], dtype=torch.int64, device="cpu")
    first = make_rotation(kind, len(channels), seed, _SPLIT_STREAMS[0])
    rest = make_rotation(kind, len(others), seed, _SPLIT_STREAMS[1])
    return _Split("split", dim, first, rest, PerDevice(order), PerDevice(order.argsort()))
