"""Diagnosis: what `doctor` finds out about a model's layers and configs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Costs


@dataclass(frozen=True)
class LayerReport:
    """One compressible layer."""

    layer: int  # its number in the model
    key_kl: dict[int, float]  # estimated KL, by bits, with this layer's keys alone coded
    value_kl: dict[int, float]  # the same for its values
    warnings: tuple[str, ...]

    @property
    def kl(self) -> float:
        """At 4 bits, keys and values together: what layers are compared by."""
        return self.key_kl[4] + self.value_kl[4]


@dataclass
class Measured:
    """A config that was tried."""

    cfg: KVQuantConfig
    name: str
    predicted_kl: float | None
    """Sum of the layers' estimates; None where the config has options without estimates."""
    kl: float
    top1: float
    bytes_per_token: float
    within: bool


@dataclass
class Diagnosis:
    """What the doctor found."""

    budget: float
    layers: list[LayerReport] = field(default_factory=list)
    tried: list[Measured] = field(default_factory=list)
    bytes_bf16: float = 0.0  # of the same layers at 16 bits, per token
    uniform: Measured | None = None  # the smallest preset that keeps the budget
    interrupted: bool = False

    @property
    def chosen(self) -> Measured | None:
        """The smallest of those that keep the budget."""
        within = [m for m in self.tried if m.within]
        return min(within, key=lambda m: m.bytes_per_token) if within else None


def describe(cfg: KVQuantConfig) -> str:
    """k4v4, with the layers that have other bits."""
    parts = [cfg.name.rstrip("+")]
    if cfg.protected_first or cfg.protected_last:
        ends = f"{cfg.protected_first}+{cfg.protected_last}"
        parts.append(f"{ends} layers at {cfg.protected_bits} bits")
    if cfg.layer_bits:
        parts.append(f"{len(cfg.bits_of_layers())} layers with other bits")
    return ", ".join(parts)


_SENSITIVE = 4.0  # times the median layer


def layer_reports(costs: Mapping[int, Costs]) -> list[LayerReport]:
    """One for each layer, from what coded keys and values cost."""
    at_four = {n: of.key[4] + of.value[4] for n, of in costs.items()}
    typical = max(median(at_four.values()), 1e-30)
    reports = []
    for n, of in costs.items():
        times, warnings = at_four[n] / typical, list[str]()
        if times > _SENSITIVE:
            warnings.append(f"{times:.0f} times as sensitive as the median layer")
        reports.append(LayerReport(n, dict(of.key), dict(of.value), tuple(warnings)))
    return reports
