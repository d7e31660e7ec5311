"""Which layers of a model suffer from compression, and the smallest cache within a KL budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.eval.forward import CacheRun
from tightkv.eval.quality import Quality, Schedule, measure_quality
from tightkv.eval.windows import Windows
from tightkv.integrations.transformers import TightCache
from tightkv.layout import PageLayout

_SENSITIVE = 4.0  # times the median layer
_BIASED = 0.8  # share of key energy in the page means
_WORTH_PROTECTING = 4.0  # times the budget a config may miss it by and still be helped
_MARGIN = 0.9  # of the budget, for a prediction to be worth a measurement

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LayerReport:
    """One compressed layer."""

    layer: int
    """Its number in the model."""
    kl: float
    """KL with this layer alone compressed at the probe's bits."""
    mean_share: float
    """Share of its keys' energy that lies in page means, in its worst head."""
    outlier_head: float
    """Centered key energy of its largest head over the median head of the model."""
    key_bias: float | None
    """Largest key bias of the projection; None where there is none."""
    warnings: tuple[str, ...]


@dataclass
class Measured:
    """A config that was tried."""

    cfg: KVQuantConfig
    name: str
    kl: float
    top1: float
    bytes_per_token: float
    within: bool


@dataclass
class Diagnosis:
    """What the doctor found."""

    budget: float
    layers: list[LayerReport]
    tried: list[Measured] = field(default_factory=list)
    chosen: Measured | None = None


class Doctor:
    """Measures one model on one set of windows."""

    def __init__(
        self,
        model: Any,
        windows: Windows,
        budget: float,
        schedule: Schedule | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not budget > 0:
            raise ValueError(f"budget={budget}; it must be positive (nats a token)")
        self.model, self.windows, self.budget = model, windows, budget
        self.schedule = schedule or Schedule(chunk=32)
        self.progress = progress or (lambda line: None)

    def diagnose(self, probe: KVQuantConfig, candidates: Sequence[KVQuantConfig]) -> Diagnosis:
        """Layers first, then the candidates from the smallest up, then protected layers."""
        found = Diagnosis(self.budget, self.layers(probe))
        for cfg in sorted(candidates, key=self.bytes_per_token):
            result = self.measure(cfg)
            found.tried.append(result)
            if result.within:
                found.chosen = result
                break
        for missed in [m for m in found.tried if not m.within][::-1]:
            protected = self._protect(missed, found)
            if protected is not None:
                result = self.measure(protected)
                found.tried.append(result)
                if result.within:
                    found.chosen = result
        return found

    def check(self, cfg: KVQuantConfig, probe: KVQuantConfig) -> Diagnosis:
        """One config alone: chosen only if it keeps the budget."""
        found = Diagnosis(self.budget, self.layers(probe), [self.measure(cfg)])
        found.chosen = found.tried[0] if found.tried[0].within else None
        return found

    def measure(self, cfg: KVQuantConfig) -> Measured:
        self.progress(f"measuring {describe(cfg)}")
        caches = {"it": lambda: TightCache(cfg, model=self.model)}
        summary = measure_quality(self.model, self.windows, caches, self.schedule)["it"].summary
        size = self.bytes_per_token(cfg)
        within = summary.kl <= self.budget
        return Measured(cfg, describe(cfg), summary.kl, summary.top1, size, within)

    def layers(self, probe: KVQuantConfig) -> list[LayerReport]:
        """Each compressed layer alone at the probe's bits, and what its keys look like."""
        self.progress(f"probing each layer at {probe.name}")
        numbers = self._compressed_layers(probe)
        first = Windows(self.windows.ids[:1], self.windows.sources[:1])
        caches = {str(n): self._only(probe, n) for n in numbers}
        alone = measure_quality(self.model, first, caches, self.schedule)
        return self._reports(numbers, alone, self._keys(first.ids, probe.page_size))

    def bytes_per_token(self, cfg: KVQuantConfig) -> float:
        """Of all compressible layers, protected ones at their own bits."""
        shapes = self._shapes()
        layers = [cfg.for_layer(i, len(shapes)) for i in range(len(shapes))]
        return sum(
            PageLayout(own, heads, dim).bytes_per_token if own.compresses else 4 * heads * dim
            for own, (heads, dim) in zip(layers, shapes, strict=True)
        )

    # --- inside ---
    def _compressed_layers(self, cfg: KVQuantConfig) -> list[int]:
        cache = TightCache(cfg, model=self.model)
        return [i for i, layer in enumerate(cache.layers) if layer in cache.tight_layers]

    def _only(self, cfg: KVQuantConfig, number: int) -> Callable[[], TightCache]:
        """A cache that compresses one layer and leaves the others to transformers."""

        def make() -> TightCache:
            cache = TightCache(cfg, model=self.model)
            layers = DynamicCache(config=self.model.config).layers
            layers[number] = cache.layers[number]
            cache.layers = layers
            return cache

        return make

    def _shapes(self) -> list[tuple[int, int]]:
        """(KV heads, head_dim) of each compressible layer."""
        if not hasattr(self, "_known_shapes"):
            run = CacheRun(self.model, TightCache("k8v8", model=self.model))
            run.feed(self.windows.ids[:1, :2])
            layouts = [layer.kv.layout for layer in run.cache.tight_layers]
            self._known_shapes = [(x.num_kv_heads, x.head_dim) for x in layouts]
        return self._known_shapes

    def _keys(self, ids: Tensor, page: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Energy of each head's keys [Hkv], and of what page means leave of it, by layer."""
        run = CacheRun(self.model)
        run.feed(ids, last_only=True)
        out = {}
        for number, layer in enumerate(run.cache.layers):
            keys = getattr(layer, "keys", None)
            if keys is None or keys.dim() != 4 or keys.shape[2] < page:
                continue
            pages = keys[:, :, : keys.shape[2] // page * page].float().unflatten(2, (-1, page))
            rest = pages - pages.mean(3, keepdim=True)
            out[number] = tuple(x.square().sum(-1).mean((0, 2, 3)) for x in (pages, rest))
        return out

    def _reports(
        self,
        numbers: Sequence[int],
        alone: dict[str, Quality],
        keys: dict[int, tuple[Tensor, Tensor]],
    ) -> list[LayerReport]:
        typical = median(alone[str(n)].summary.kl for n in numbers)
        centered = torch.cat([rest for n, (_, rest) in keys.items() if n in numbers])
        biases = _key_biases(self.model)
        reports = []
        for n in numbers:
            whole, rest = keys[n]
            kl = alone[str(n)].summary.kl
            share = float((1 - rest / whole.clamp_min(1e-30)).max())
            head = float(rest.max() / centered.median().clamp_min(1e-30))
            warnings = []
            if kl > _SENSITIVE * typical:
                warnings.append(f"{kl / typical:.0f} times as sensitive as the median layer")
            if share > _BIASED:
                warnings.append(f"{100 * share:.0f}% of a head's key energy is its page mean")
            reports.append(LayerReport(n, kl, share, head, biases.get(n), tuple(warnings)))
        return reports

    def _protect(self, missed: Measured, found: Diagnosis) -> KVQuantConfig | None:
        """The missed config with the fewest end layers at 8 bits that should meet the budget."""
        total = sum(report.kl for report in found.layers)
        if missed.kl > _WORTH_PROTECTING * self.budget or not total:
            return None
        sensitivity = [report.kl / total for report in found.layers]
        count, best = len(sensitivity), None
        for first in range(count // 3 + 1):
            for last in range(count // 3 + 1 - first):
                saved = sum(sensitivity[:first]) + sum(sensitivity[count - last :])
                if missed.kl * (1 - saved) > _MARGIN * self.budget:
                    continue
                cfg = missed.cfg.replace(protected_first=first, protected_last=last)
                size = self.bytes_per_token(cfg)
                smaller = found.chosen is None or size < found.chosen.bytes_per_token
                if smaller and (best is None or size < best[0]):
                    best = (size, cfg)
        return None if best is None else best[1]


def default_candidates() -> list[KVQuantConfig]:
    return [KVQuantConfig.preset(name) for name in PRESETS]


def describe(cfg: KVQuantConfig) -> str:
    """k4v4, with its protected layers where it has some."""
    if not cfg.protected_first and not cfg.protected_last:
        return cfg.name
    ends = f"{cfg.protected_first}+{cfg.protected_last}"
    return f"{cfg.name}, {ends} layers at {cfg.protected_bits} bits"


def _key_biases(model: Any) -> dict[int, float]:
    """Largest key bias of each attention layer that has one."""
    out = {}
    for module in model.modules():
        bias = getattr(getattr(module, "k_proj", None), "bias", None)
        if bias is not None and hasattr(module, "layer_idx"):
            out[module.layer_idx] = float(bias.detach().float().abs().max())
    return out
