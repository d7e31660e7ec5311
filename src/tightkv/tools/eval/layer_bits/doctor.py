"""The fewest bytes per token within a KL budget: bits of each layer's keys and values.

Estimates for every layer come from one pass and its gradients (sensitivity.py), a search picks
bits (search.py), and what it picks is measured through the real cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.fit import refit
from tightkv.fit.calibration import Costs
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.fitting import LoadedModel, warn_once
from tightkv.integrations.transformers.query_probe import Probed, probed
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.tools.eval.forward import Bars, no_bars
from tightkv.tools.eval.layer_bits import diagnosis, sensitivity
from tightkv.tools.eval.layer_bits.search import as_config, fewest_bytes, options_of
from tightkv.tools.eval.tasks.quality import Schedule, measure
from tightkv.tools.eval.windows import Windows

_AIM = 0.9  # of the budget: what a search leaves for the estimate's error
_NEAR = 0.75  # of the budget: close enough to stop
_WORTH = 0.99  # of the best size: what a further measurement must promise
_MEASUREMENTS = 4  # before the search settles for what it has
_REFERENCE_BYTES = 2 << 30  # log-probabilities of the uncompressed cache that are kept
_UNCOMPRESSED = KVQuantConfig(key_bits=16, value_bits=16)


@dataclass
class _Family:
    """Configs that differ in their bits alone, and what bits cost each layer."""

    base: KVQuantConfig
    costs: dict[int, Costs]

    def kl(self, bits: Mapping[int, tuple[int, int]]) -> float:
        """The sum of the estimates; 16 bits cost nothing."""
        return sum(
            self.costs[n].key.get(k, 0.0) + self.costs[n].value.get(v, 0.0)
            for n, (k, v) in bits.items()
        )


class Doctor:
    """Measures one model on one set of windows."""

    def __init__(
        self,
        model: Any,
        windows: Windows,
        budget: float,
        schedule: Schedule | None = None,
        bars: Bars = no_bars,
    ) -> None:
        if not budget > 0:
            raise ValueError(f"budget={budget}; it must be positive (nats per token)")
        self.model, self.windows, self.budget = model, windows, budget
        self.schedule = schedule or Schedule(chunk=64)
        self.schedule.check_window(windows.ids.shape[1])
        self.bars = bars
        self.found = diagnosis.Diagnosis(budget)
        self._shapes: dict[int, tuple[int, int]] = {}
        self._references: list[Tensor] = []

    # --- what a user asks for ---
    def diagnose(self, candidates: Sequence[KVQuantConfig]) -> diagnosis.Diagnosis:
        """Layers first, then a search over bits of every layer, each result measured.

        Presets with the same further options make one family that is searched together.
        """
        try:
            families = self.estimate([c.replace(protect_keys=False) for c in candidates])
            self._search(families)
            self._compare(families, candidates)
        except KeyboardInterrupt:  # what was found stays
            self.found.interrupted = True
        return self.found

    def check(self, cfg: KVQuantConfig) -> diagnosis.Diagnosis:
        """One config alone, just as a cache would use it."""
        try:
            family = self.estimate([cfg])[0]
            self.measure(cfg, self._predict(family, cfg))
        except KeyboardInterrupt:
            self.found.interrupted = True
        return self.found

    # --- estimates ---
    def estimate(self, cfgs: Sequence[KVQuantConfig]) -> list[_Family]:
        """A family for each set of options beside the bits; fills the report on layers.

        From the first window, as their ratios decide; measurements take all. Where the configs
        name a calibration, it has the estimates already.
        """
        families = [_Family(base, {}) for base in dict.fromkeys(map(_without_bits, cfgs))]
        source = LoadedModel(self.model)
        found = refit(source, cfgs[0], {})
        warn_once(source, found)
        if known := found.calibration:  # of keys coded in its metrics
            self._shapes = {n: (len(m.value), m.value.shape[1]) for n, m in known.metrics.items()}
            for family in families:
                family.costs = dict(known.costs)
        else:
            self._estimate(families)
        self.found.layers = diagnosis.layer_reports(families[0].costs)
        uncompressed = dict.fromkeys(self._shapes, _UNCOMPRESSED)
        self.found.bytes_bf16 = _bytes(uncompressed, self._shapes)
        return families

    def _estimate(self, families: Sequence[_Family]) -> None:
        numbers, first = sensitivity.compressible(self.model), self.schedule.prefill
        with self.bars("layers", 2 * len(numbers) + len(self.windows) - 1) as bar:
            layers, log_p = sensitivity.record(self.model, self.windows.ids[:1], numbers, first)
            self._keep(log_p)
            bar.advance(len(numbers))
            for n in numbers:
                layer = layers.pop(n)
                self._shapes[n] = layer.key.shape[1], layer.key.shape[3]
                for family in families:
                    known = probed(self.model) if family.base.feedback == "auto" else Probed()
                    how = sensitivity.Coding(known.metrics.get(n), scale=known.scales.get(n))
                    family.costs[n] = sensitivity.layer_costs(layer, family.base, first, how)
                bar.advance(1)
            for row in range(1, len(self.windows)):
                ids = self.windows.ids[row : row + 1]
                self._keep(sensitivity.exact_log_p(self.model, ids, first))
                bar.advance(1)

    def _keep(self, log_p: Tensor) -> None:
        """Hold on to the reference, unless all windows' would be too large."""
        if log_p.numel() * log_p.element_size() * len(self.windows) <= _REFERENCE_BYTES:
            self._references.append(log_p)

    # --- the search ---
    def _search(self, families: Sequence[_Family]) -> None:
        """Search, measure, correct the estimate by what was measured, and search again."""
        options = [
            {n: options_of(f.base, shape, f.costs[n]) for n, shape in self._shapes.items()}
            for f in families
        ]
        aim, missed, kept = _AIM * self.budget, float("inf"), 0.0
        for _ in range(_MEASUREMENTS):
            cfg, predicted = self._propose(families, options, aim)
            if any(m.cfg == cfg for m in self.found.tried):
                break
            best = self.found.chosen
            if best and self.bytes_per_token(cfg) > _WORTH * best.bytes_per_token:
                break
            result = self.measure(cfg, predicted)
            if result.within:
                kept = max(kept, predicted)
                if result.kl > _NEAR * self.budget:
                    break
            else:
                missed = min(missed, predicted)
            aim = _AIM * self.budget * predicted / max(result.kl, 1e-30)
            if not kept < aim < missed:  # measurements disagree: between the two
                aim = (kept * missed) ** 0.5 if kept and missed < float("inf") else aim
                aim = min(aim, 0.7 * missed)
        if self.found.chosen is None:
            cfg, predicted = self._eight_bits(families[0])
            if all(m.cfg != cfg for m in self.found.tried):
                self.measure(cfg, predicted)

    def _eight_bits(self, family: _Family) -> tuple[KVQuantConfig, float]:
        """The last resort: if this does not keep the budget, nothing does."""
        bits = dict.fromkeys(self._shapes, (8, 8))
        return as_config(family.base, bits), family.kl(bits)

    def _propose(
        self, families: Sequence[_Family], options: Sequence[Any], aim: float
    ) -> tuple[KVQuantConfig, float]:
        """The smallest config whose estimates sum up to at most `aim`."""
        proposals = []
        for family, layers in zip(families, options, strict=True):
            chosen = fewest_bytes(layers, aim)
            if chosen is not None:
                cfg = as_config(family.base, {n: option.bits for n, option in chosen.items()})
                size = sum(option.size for option in chosen.values())
                proposals.append((size, sum(option.kl for option in chosen.values()), cfg))
        if not proposals:
            return self._eight_bits(families[0])
        _, kl, cfg = min(proposals, key=lambda p: p[:2])
        return cfg, kl

    def _compare(self, families: Sequence[_Family], candidates: Sequence[KVQuantConfig]) -> None:
        """Measure presets from the smallest on, until one keeps the budget.

        Those that should not, by their estimates and the last measurement, are left out.
        """
        ratios = [m.kl / m.predicted_kl for m in self.found.tried if m.predicted_kl]
        ratio = ratios[-1] if ratios else 1.0
        by_base = {family.base: family for family in families}
        for cfg in sorted(candidates, key=self.bytes_per_token):
            cfg = cfg.replace(protect_keys=False)
            found = next((m for m in self.found.tried if m.cfg == cfg), None)
            if found is None:
                predicted = self._predict(by_base[_without_bits(cfg)], cfg)
                if predicted is None or predicted * ratio > self.budget:
                    continue
                found = self.measure(cfg, predicted)
            if found.within:
                self.found.uniform = found
                return

    def _predict(self, family: _Family, cfg: KVQuantConfig) -> float | None:
        own = self._layer_configs(cfg)
        if any(_without_bits(c) != family.base for c in own.values()):
            return None
        return family.kl({n: (c.key_bits, c.value_bits) for n, c in own.items()})

    # --- measuring ---
    def measure(self, cfg: KVQuantConfig, predicted: float | None = None) -> diagnosis.Measured:
        """Through the real cache, on every window."""
        make = partial(TightCache, cfg, model=self.model)
        whole = len(self._references) == len(self.windows)
        reference = torch.cat(self._references) if whole else None
        name, given = diagnosis.describe(cfg), (self.model, self.windows, make, self.schedule)
        with self.bars(f"measuring {name}", self.schedule.passes(*self.windows.ids.shape)) as bar:
            summary = measure(*given, bar.advance, reference).summary
        kl, top1, size = summary.kl, summary.top1, self.bytes_per_token(cfg)
        found = diagnosis.Measured(cfg, name, predicted, kl, top1, size, kl <= self.budget)
        self.found.tried.append(found)
        return found

    def bytes_per_token(self, cfg: KVQuantConfig) -> float:
        """Of all compressible layers."""
        return _bytes(self._layer_configs(cfg), self._shapes)

    def _layer_configs(self, cfg: KVQuantConfig) -> dict[int, KVQuantConfig]:
        """What a cache of this config would use for each compressible layer."""
        layers = TightCache(cfg, model=self.model).layers
        return {n: getattr(layers[n], "cfg", _UNCOMPRESSED) for n in self._shapes}


def _bytes(cfgs: Mapping[int, KVQuantConfig], shapes: Mapping[int, tuple[int, int]]) -> float:
    """Bytes per token of layers of these configs and shapes (KV heads, head_dim)."""
    layers = tuple(LayerBytes.of_config(cfg, *shapes[n]) for n, cfg in cfgs.items())
    return CacheBytes(layers).bytes_per_token


def default_candidates(calibration: str = "") -> list[KVQuantConfig]:
    return [KVQuantConfig.preset(name, calibration=calibration) for name in PRESETS]


def _without_bits(cfg: KVQuantConfig) -> KVQuantConfig:
    """What configs of one family share."""
    plain = cfg.replace(protected_first=0, protected_last=0, layer_bits="", protect_keys=False)
    return plain.replace(key_bits=4, value_bits=4)
