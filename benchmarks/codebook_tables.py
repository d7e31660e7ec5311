"""Solve every checked-in codebook again and write src/tightkv/math/tables.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightkv.math.codebook import TABLE_BITS, TABLE_FILE
from tightkv.math.lloyd import BetaLaw, Law, cells, expected_distortion, solve

TABLE_DIMS = (16, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256)

# The best 2**(bits - 1) positive e4m3 values up to one common scale that are whole numbers below
# 127, so int8 holds them too; at 8 bits, int8 magnitudes.
NATIVE_MAGNITUDES: dict[int, tuple[float, ...]] = {
    1: (1.0,),
    2: (12.0, 40.0),
    3: (6.0, 18.0, 32.0, 52.0),
    4: (4.0, 13.0, 22.0, 32.0, 44.0, 56.0, 72.0, 96.0),
    8: tuple(float(k) for k in range(128)),
}


class GaussianLaw:
    """N(0, 1)."""

    reach = 40.0  # beyond it the density underflows

    def density(self, t: Tensor) -> Tensor:
        return (-0.5 * t * t).exp() / math.sqrt(2 * math.pi)

    def mass_above(self, t: Tensor) -> Tensor:
        return torch.erfc(t / math.sqrt(2)) / 2

    def moment_above(self, t: Tensor) -> Tensor:
        return self.density(t)


def fit_unit(law: Law, native: Tensor) -> float:
    """The scale at which the book unit * native (float64, ascending) has the least distortion."""

    def slope(unit: float) -> float:  # of the distortion, up to a positive factor
        _, mass, moment = cells(law, unit * native)
        return float((native * (unit * native * mass - moment)).sum())

    guess = float(solve(law, native.numel().bit_length())[0][-1] / native[-1])
    low, high = guess / 2, guess * 2
    while high - low > 1e-14 * guess:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low


def build_tables() -> list[dict[str, Any]]:
    """Every checked-in book, numbers rounded to 12 digits."""
    laws: list[tuple[str, int | None, Law]] = [("gaussian", None, GaussianLaw())]
    laws += [("beta", dim, BetaLaw(dim)) for dim in TABLE_DIMS]
    rows = [_lloyd_row(kind, bits, dim, law) for kind, dim, law in laws for bits in TABLE_BITS]
    return rows + [_native_row(bits, native) for bits, native in NATIVE_MAGNITUDES.items()]


def _lloyd_row(kind: str, bits: int, dim: int | None, law: Law) -> dict[str, Any]:
    magnitudes, distortion = solve(law, bits)
    return {
        "kind": kind,
        "bits": bits,
        "dim": dim,
        "distortion": _rounded(distortion),
        "magnitudes": [_rounded(value) for value in magnitudes.tolist()],
    }


def _native_row(bits: int, native: Sequence[float]) -> dict[str, Any]:
    law, levels = GaussianLaw(), torch.tensor(native, dtype=torch.float64, device="cpu")
    unit = _rounded(fit_unit(law, levels))
    return {
        "kind": "fp8",
        "bits": bits,
        "dim": None,
        "distortion": _rounded(expected_distortion(law, unit * levels)),
        "unit": unit,
        "native": list(native),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def write_tables(path: Path = TABLE_FILE) -> None:
    """Solve every book again and write them as JSON, one book a line."""
    lines = ",\n".join(json.dumps(row) for row in build_tables())
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    write_tables()
