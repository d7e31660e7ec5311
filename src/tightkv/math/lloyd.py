"""Lloyd-Max quantizers for N(0, 1) and for a coordinate of a random unit vector, in float64.

Both laws are symmetric with a log-concave density, so the optimum is unique and Newton's method
finds it. benchmarks/codebook_tables.py writes the checked-in tables with it.
"""

import math
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Law(Protocol):
    """A symmetric unit-variance law; its functions take t >= 0 and keep relative precision."""

    reach: float  # the density beyond is zero or negligible

    def density(self, t: Tensor) -> Tensor: ...

    def mass_above(self, t: Tensor) -> Tensor:
        """P(X > t)."""

    def moment_above(self, t: Tensor) -> Tensor:
        """E(X; X > t)."""


class BetaLaw:
    """sqrt(dim) times a coordinate of a uniformly random unit vector of R^dim, dim 4 or more.

    With t = sqrt(dim) sin(a) the angle a has density cos(a)**(dim - 2) / (2 W) on |a| < pi / 2,
    where W is the integral of cos**(dim - 2) from 0 to pi / 2.
    """

    def __init__(self, dim: int) -> None:
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


def cells(law: Law, magnitudes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner thresholds [n - 1], and the mass [n] and first moment [n] of each positive cell."""
    thresholds = (magnitudes[1:] + magnitudes[:-1]) / 2
    lower = torch.cat((torch.zeros_like(magnitudes[:1]), thresholds))  # lower end of each cell
    return thresholds, _differences(law.mass_above(lower)), _differences(law.moment_above(lower))


def _differences(above: Tensor) -> Tensor:
    """What lies in each cell, from what lies above its lower end."""
    return above - torch.cat((above[1:], torch.zeros_like(above[:1])))


def expected_distortion(law: Law, magnitudes: Tensor) -> float:
    """E (X - Q(X))^2 for Q the nearest of +-magnitudes (float64, ascending)."""
    _, mass, moment = cells(law, magnitudes)
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
    thresholds, mass, moment = cells(law, magnitudes)
    means = moment / mass
    density = law.density(thresholds) / 2  # each threshold moves by half of either neighbor
    by_lower = density * (means[1:] - thresholds) / mass[1:]  # d mean[i] / d magnitude[i - 1]
    by_upper = density * (thresholds - means[:-1]) / mass[:-1]  # d mean[i] / d magnitude[i + 1]
    none = torch.zeros_like(magnitudes[:1])
    own = 1 - torch.cat((none, by_lower)) - torch.cat((by_upper, none))
    jacobian = own.diag() - by_lower.diag(-1) - by_upper.diag(1)
    step: Tensor = torch.linalg.solve(jacobian, magnitudes - means)
    return step
