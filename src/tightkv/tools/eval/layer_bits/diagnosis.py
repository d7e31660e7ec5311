"""Diagnosis: what `doctor` finds out about a model's layers and configs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Costs


@dataclass(frozen=True)
class LayerReport:
    """One compressible layer."""

    layer: int  # its number in the model
    key_kl: dict[int, float]  # estimated KL, by bits, with this layer's keys alone coded
    value_kl: dict[int, float]  # the same for its values
    mean_share: float | None
    """Share of its keys' energy that lies in page means, in its worst head; None if not measured,
    for a calibration does not say it."""
    outlier_head: float | None
    """Centered key energy of its largest head over the median head of the model; None likewise."""
    key_bias: float | None  # largest key bias of the projection; None where there is none
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
class Uniform:
    """The smallest preset that keeps the budget, or is expected to."""

    name: str
    bytes_per_token: float
    kl: float
    measured: bool
    """If not, `kl` is the sum of estimates, corrected by what measurements said of them."""


@dataclass
class Diagnosis:
    """What the doctor found."""

    budget: float
    layers: list[LayerReport] = field(default_factory=list)
    tried: list[Measured] = field(default_factory=list)
    bytes_bf16: float = 0.0  # of the same layers at 16 bits, per token
    uniform: Uniform | None = None
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
_BIASED = 0.8  # share of key energy in the page means

Energies = Mapping[int, tuple[Tensor, Tensor]]  # `key_energy` of each layer


def layer_reports(model: Any, costs: Mapping[int, Costs], energies: Energies) -> list[LayerReport]:
    """One for each layer, from what coded keys and values cost. Energies may be unknown."""
    at_four = {n: of.key[4] + of.value[4] for n, of in costs.items()}
    typical = max(median(at_four.values()), 1e-30)
    centered = [rest for _, rest in energies.values()]
    usual = torch.cat(centered).median().clamp_min(1e-30) if centered else None
    biases = _key_biases(model)
    reports = []
    for n, of in costs.items():
        times = at_four[n] / typical
        warnings, share, head = [], None, None
        if times > _SENSITIVE:
            warnings.append(f"{times:.0f} times as sensitive as the median layer")
        if usual is not None:
            whole, rest = energies[n]
            share = float((1 - rest / whole.clamp_min(1e-30)).max())
            head = float(rest.max() / usual)
            if share > _BIASED:
                warnings.append(f"{100 * share:.0f}% of a head's key energy is its page mean")
        kls = dict(of.key), dict(of.value)
        reports.append(LayerReport(n, *kls, share, head, biases.get(n), tuple(warnings)))
    return reports


def key_energy(keys: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Energy of each head's keys [Hkv], and of what page means leave of it."""
    pages = keys[:, :, : keys.shape[2] // page * page].float().unflatten(2, (-1, page))
    rest = pages - pages.mean(3, keepdim=True)
    whole, left = (x.square().sum(-1).mean((0, 2, 3)).cpu() for x in (pages, rest))
    return whole, left


def _key_biases(model: Any) -> dict[int, float]:
    """Largest key bias of each attention layer that has one."""
    out = {}
    for module in model.modules():
        bias = getattr(getattr(module, "k_proj", None), "bias", None)
        if bias is not None and hasattr(module, "layer_idx"):
            out[module.layer_idx] = float(bias.detach().float().abs().max())
    return out
