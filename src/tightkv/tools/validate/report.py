"""What a validation run produces: claims that pass or fail, and audit rows that inform."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from torch import Tensor

from tightkv.tools.validate.stats import Z

# Bumped whenever a field of the JSON output changes its name or meaning.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Options:
    """How much to measure, and on what."""

    seed: int = 0
    dim: int = 128
    quick: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}; it must be at least 0")
        if self.dim % 16 or not 64 <= self.dim <= 256:
            raise ValueError(f"dim={self.dim}; supported: multiples of 16 from 64 to 256")

    def samples(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def stream(self, name: str) -> int:
        """A seed of its own for each use, so that no two experiments share random numbers."""
        return self.seed * 2**32 + crc32(name.encode())


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {name: _finite(number) for name, number in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Claim:
    """One measured number and the range it must lie in."""

    section: str
    claim: str
    setting: str
    measured: float
    lower: float | None = None
    upper: float | None = None
    half_width: float | None = None  # of the confidence interval around `measured`
    detail: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, section: str, claim: str, setting: str, samples: Tensor, **others: Any) -> Claim:
        """Of the mean of independent samples, with its interval."""
        samples = samples.double()
        width = Z * float(samples.std()) / math.sqrt(samples.numel())
        return cls(section, claim, setting, float(samples.mean()), half_width=width, **others)

    @property
    def passed(self) -> bool:
        """Inside the bounds, both ends included; NaN never passes."""
        low = -math.inf if self.lower is None else self.lower
        high = math.inf if self.upper is None else self.upper
        return low <= self.measured <= high

    def to_dict(self) -> dict[str, Any]:
        fields = _finite(vars(self))
        width, measured = fields.pop("half_width"), fields["measured"]
        known = width is not None and measured is not None
        interval = [measured - width, measured + width] if known else None
        return {**fields, "interval": interval, "passed": self.passed}


@dataclass(frozen=True)
class AuditRow:
    """One number that shows a weakness, and how to read it. Never fails a run."""

    what: str
    setting: str
    measured: float
    unit: str
    reading: str
    detail: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Every row of a run."""

    options: Options
    claims: list[Claim]
    audit: list[AuditRow]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(claim.passed for claim in self.claims)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            **vars(self.options),
            "passed": self.passed,
            "failed_claims": sum(not claim.passed for claim in self.claims),
            "seconds": self.seconds,
            "claims": [claim.to_dict() for claim in self.claims],
            "audit": [_finite(vars(row)) for row in self.audit],
        }
