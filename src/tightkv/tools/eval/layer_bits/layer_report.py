"""What stands out in a layer: its sensitivity, the bias of its keys, one large head."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tightkv.tools.eval.layer_bits.diagnosis import LayerReport
from tightkv.tools.eval.layer_bits.sensitivity import Costs

_SENSITIVE = 4.0  # times the median layer
_BIASED = 0.8  # share of key energy in the page means

Energies = Mapping[int, tuple[Tensor, Tensor]]
"""`key_energy` of each layer."""


def layer_reports(
    model: Any, keys: Mapping[int, Costs], values: Mapping[int, Costs], energies: Energies
) -> list[LayerReport]:
    """One for each layer, from what coded keys and values cost. Energies may be unknown."""
    typical = median(keys[n][4] + values[n][4] for n in keys)
    centered = [rest for _, rest in energies.values()]
    usual = torch.cat(centered).median().clamp_min(1e-30) if centered else None
    biases = _key_biases(model)
    reports = []
    for n in keys:
        times = (keys[n][4] + values[n][4]) / max(typical, 1e-30)
        warnings, share, head = [], None, None
        if times > _SENSITIVE:
            warnings.append(f"{times:.0f} times as sensitive as the median layer")
        if usual is not None:
            whole, rest = energies[n]
            share = float((1 - rest / whole.clamp_min(1e-30)).max())
            head = float(rest.max() / usual)
            if share > _BIASED:
                warnings.append(f"{100 * share:.0f}% of a head's key energy is its page mean")
        reports.append(
            LayerReport(n, keys[n], values[n], share, head, biases.get(n), tuple(warnings))
        )
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
