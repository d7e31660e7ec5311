"""Lloyd-Max quantizers for N(0, 1) and for a coordinate of a random unit vector, in float64.

Both laws are symmetric with a log-concave density, so the optimum is unique and Newton's method
finds it. `python -m tightkv.math.lloyd` rewrites the checked-in tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

TABLE_FILE = Path(__file__).with_name("tables.json")
TABLE_BITS = range(1, 9)
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


class Law(Protocol):
    """A symmetric unit-variance law; its functions take t >= 0 and keep relative precision."""

    reach: float  # the density beyond is zero or negligible

    def density(self, t: Tensor) -> Tensor: ...

    def mass_above(self, t: Tensor) -> Tensor:
        """P(X > t)."""

    def moment_above(self, t: Tensor) -> Tensor:
        """E(X; X > t)."""


class GaussianLaw:
    """N(0, 1)."""

    reach = 40.0  # beyond it the density underflows

    def density(self, t: Tensor) -> Tensor:
        return (-0.5 * t * t).exp() / math.sqrt(2 * math.pi)

    def mass_above(self, t: Tensor) -> Tensor:
        return torch.erfc(t / math.sqrt(2)) / 2

    def moment_above(self, t: Tensor) -> Tensor:
        return self.density(t)


class BetaLaw:
    """sqrt(dim) times a coordinate of a uniformly random unit vector of R^dim.

    With t = sqrt(dim) sin(a) the angle a has density cos(a)**(dim - 2) / (2 W) on |a| < pi / 2,
    where W is the integral of cos**(dim - 2) from 0 to pi / 2.
    """

    def __init__(self, dim: int) -> None:
        if dim < 4:
            raise ValueError(f"dim={dim} for the beta law; supported: 4 and up")
        self.reach = math.sqrt(dim)
        self._power = n = dim - 2
        first = 1.0 if n % 2 else math.pi / 2
        self._total = first * math.prod((k - 1) / k for k in range(n, 1, -2))  # W, by Wallis

    def density(self, t: Tensor) -> Tensor:
        return _cosine_power(t / self.reach, self._power - 1) / (2 * self._total * self.reach)

    def mass_above(self, t: Tensor) -> Tensor:
        """Gauss-Legendre over the angle; 12 standard deviations on, less than e**-72 is left."""
        angle = (t / self.reach).clamp(max=1).asin()
        width = (math.pi / 2 - angle).clamp(max=12 / math.sqrt(self._power))
        mass = torch.zeros_like(angle)
        for node, weight in _gauss_legendre():
            mass += weight * _cosine_power((angle + width * node).sin(), self._power)
        return mass * width / (2 * self._total)

    def moment_above(self, t: Tensor) -> Tensor:
        n = self._power
        return _cosine_power(t / self.reach, n + 1) * self.reach / (2 * self._total * (n + 1))


def _cosine_power(sine: Tensor, power: int) -> Tensor:
    """cos(a)**power from sin(a); unlike a plain power, it loses no digits as `power` grows."""
    return (0.5 * power * torch.log1p(-(sine * sine).clamp(max=1))).exp()


@lru_cache(maxsize=1)
def _gauss_legendre(count: int = 64) -> list[tuple[float, float]]:
    """Nodes and weights on [0, 1], from the eigenvectors of the Jacobi matrix."""
    k = torch.arange(1, count, dtype=torch.float64, device="cpu")
    off_diagonal = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(off_diagonal.diag(1) + off_diagonal.diag(-1))
    return list(zip(((nodes + 1) / 2).tolist(), vectors[0].square().tolist(), strict=True))


def beta_cdf(t: Tensor, dim: int) -> Tensor:
    """P(sqrt(dim) U_1 <= t) for U uniform on the unit sphere of R^dim -> float64."""
    t = t.to(torch.float64)
    above = BetaLaw(dim).mass_above(t.abs())
    return torch.where(t < 0, above, 1 - above)


def _cells(law: Law, magnitudes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner thresholds [n - 1], and the mass [n] and first moment [n] of each positive cell."""
    thresholds = (magnitudes[1:] + magnitudes[:-1]) / 2
    lower = torch.cat((torch.zeros_like(magnitudes[:1]), thresholds))  # lower end of each cell
    return thresholds, _differences(law.mass_above(lower)), _differences(law.moment_above(lower))


def _differences(above: Tensor) -> Tensor:
    """What lies in each cell, from what lies above its lower end."""
    return above - torch.cat((above[1:], torch.zeros_like(above[:1])))


def expected_distortion(law: Law, magnitudes: Tensor) -> float:
    """E (X - Q(X))^2 for Q the nearest of +-magnitudes (float64, ascending)."""
    _, mass, moment = _cells(law, magnitudes)
    return 1 + float(2 * (magnitudes * (magnitudes * mass - 2 * moment)).sum())


def solve(law: Law, bits: int) -> tuple[Tensor, float]:
    """The Lloyd-Max book of `law`: ascending magnitudes (float64 [2**(bits - 1)]), distortion."""
    magnitudes = _companded_start(law, 2 ** (bits - 1))
    for _ in range(100):
        step = _newton_step(law, magnitudes)
        magnitudes = magnitudes - step
        if step.abs().max() < 1e-8:  # convergence is quadratic: what is left is rounding
            return magnitudes, expected_distortion(law, magnitudes)
    raise RuntimeError(f"Lloyd-Max did not converge at bits={bits} for {law!r}")


def _companded_start(law: Law, count: int) -> Tensor:
    """Quantiles of density**(1/3): the optimum as `count` grows."""
    grid = torch.linspace(0, law.reach, 20001, dtype=torch.float64, device="cpu")
    weight = (law.density(grid) ** (1 / 3)).cumsum(0)
    middles = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    return grid[torch.searchsorted(weight, middles * weight[-1])]


def _newton_step(law: Law, magnitudes: Tensor) -> Tensor:
    """Newton's step for magnitude = mean of its cell; the Jacobian is tridiagonal."""
    thresholds, mass, moment = _cells(law, magnitudes)
    means = moment / mass
    density = law.density(thresholds) / 2  # each threshold moves by half of either neighbour
    by_lower = density * (means[1:] - thresholds) / mass[1:]  # d mean[i] / d magnitude[i - 1]
    by_upper = density * (thresholds - means[:-1]) / mass[:-1]  # d mean[i] / d magnitude[i + 1]
    none = torch.zeros_like(magnitudes[:1])
    own = 1 - torch.cat((none, by_lower)) - torch.cat((by_upper, none))
    jacobian = own.diag() - by_lower.diag(-1) - by_upper.diag(1)
    step: Tensor = torch.linalg.solve(jacobian, magnitudes - means)
    return step


def fit_unit(law: Law, native: Tensor) -> float:
    """The scale at which the book unit * native (float64, ascending) has the least distortion."""

    def slope(unit: float) -> float:  # of the distortion, up to a positive factor
        _, mass, moment = _cells(law, unit * native)
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
