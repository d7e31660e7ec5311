"""Symmetric scalar codebooks for a coordinate of unit variance.

gaussian  Lloyd-Max for N(0, 1), 1 to 8 bits
beta      Lloyd-Max for sqrt(dim) times a coordinate of a random unit vector, 1 to 8 bits
fp8       for N(0, 1) with e4m3 values times one scale (1 to 4 bits), or int8 (8 bits)
"""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightkv.math.lloyd import BetaLaw, solve
from tightkv.math.per_device import PerDevice

TABLE_FILE = Path(__file__).with_name("tables.json")
TABLE_BITS = tuple(range(1, 9))


@dataclass(frozen=True)
class Codebook:
    """Sign-magnitude codes: with h = 2**(bits - 1), c < h is +magnitudes[c], h + i -magnitudes[i].

    Zero of either sign gets code 0; a tie between two centroids goes to the smaller magnitude.
    """

    kind: str
    bits: int
    dim: int | None  # only beta books depend on it
    magnitudes: tuple[float, ...]  # ascending, 2**(bits - 1) of them
    distortion: float  # E (X - Q(X))^2 under the unit-variance law the book is for
    native: tuple[float, ...] | None = None  # magnitude = unit * native, exact in the native dtype
    unit: float = 1.0

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Midpoints of neighboring magnitudes: |y| takes magnitude i when it exceeds i of them."""
        return tuple((low + high) / 2 for low, high in pairwise(self.magnitudes))

    def encode(self, y: Tensor) -> Tensor:
        """The code of the nearest centroid of each unit-variance coordinate -> uint8."""
        y = y.to(torch.float32).contiguous()
        index = torch.bucketize(y.abs(), self._thresholds.on(y.device), out_int32=True)
        return torch.where(y < 0, index + len(self.magnitudes), index).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The centroid of each code -> float32."""
        return self.table(codes.device)[codes.long()]

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """float32 [2**bits]: the centroid of each code, in code order. Read-only."""
        return self._table.on(torch.device(device))

    @cached_property
    def _table(self) -> PerDevice:
        return _constant(self._centroids())

    @cached_property
    def _thresholds(self) -> PerDevice:
        return _constant(self.thresholds)

    def _centroids(self) -> tuple[float, ...]:
        return self.magnitudes + tuple(-magnitude for magnitude in self.magnitudes)


class IntegerCodebook(Codebook):
    """Uniform levels k * unit, |k| <= 127; the code is k as a two's complement byte.

    Magnitudes start at 0; a tie goes to the even k. Code 128 stands for -128 and is never made.
    """

    def encode(self, y: Tensor) -> Tensor:
        # A product, not a quotient: CPU and GPU divide by a scalar differently.
        levels = (y.to(torch.float32) * (1 / self.unit)).round().clamp(-127, 127)
        return levels.to(torch.int8).view(torch.uint8)

    def _centroids(self) -> tuple[float, ...]:
        # kernels multiply in float32
        unit = float(torch.tensor(self.unit, dtype=torch.float32, device="cpu"))
        return tuple(k * unit for k in (*range(128), *range(-128, 0)))


def _constant(values: tuple[float, ...]) -> PerDevice:
    return PerDevice(torch.tensor(values, dtype=torch.float32, device="cpu"))


def get_codebook(kind: str, bits: int, dim: int | None = None) -> Codebook:
    """The book of this kind and width; equal arguments give the same (cached) object.

    A config has checked kind and width. Only "beta" needs `dim`; sizes without a checked-in table
    are solved on first use.
    """
    return _cached_codebook(kind, bits, dim if kind == "beta" else None)


@lru_cache(maxsize=256)
def _cached_codebook(kind: str, bits: int, dim: int | None) -> Codebook:
    row = _tables().get((kind, bits, dim))
    if row is None:
        assert kind == "beta" and dim is not None, f"there is no {kind} book of {bits} bits"
        solved, distortion = solve(BetaLaw(dim), bits)
        return Codebook(kind, bits, dim, tuple(solved.tolist()), distortion)
    if "native" not in row:
        return Codebook(kind, bits, dim, tuple(row["magnitudes"]), row["distortion"])
    native, unit = tuple(row["native"]), float(row["unit"])
    magnitudes = tuple(unit * value for value in native)
    book = IntegerCodebook if bits == 8 else Codebook
    return book(kind, bits, dim, magnitudes, row["distortion"], native, unit)


@lru_cache(maxsize=1)
def _tables() -> dict[tuple[str, int, int | None], dict[str, Any]]:
    rows = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    return {(row["kind"], row["bits"], row["dim"]): row for row in rows}
