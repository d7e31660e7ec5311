"""Measure a calibration: the metric of each layer's queries, and bits of layers at equal bytes.

One exact pass over each window and one back give queries, keys, values and gradients of every
layer (sensitivity.py). From these come the metrics, then what each layer's keys, coded in their
metric, and values cost at each number of bits, then for each preset the bits of its layers that
cost least at no more bytes than the preset takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import tightkv
from tightkv.calibration import Calibration, Costs, Measured
from tightkv.config import KVQuantConfig
from tightkv.eval.bit_search import SEARCHED_BITS, Option, least_kl
from tightkv.eval.forward import Bars, advance_bar
from tightkv.eval.sensitivity import Layer, estimate, query_metric, record
from tightkv.eval.text import Text
from tightkv.eval.windows import Windows
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.calibrated import loaded_fingerprint
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.layout import page_layout
from tightkv.math.codebook import get_codebook
from tightkv.math.feedback import QueryMetric

PRESETS = ("k4v4", "k3v3", "k2v2")
"""Whose bits are chosen layer by layer."""
WINDOW = 1024
PREFILL = 256  # tokens of a window whose queries read no codes, or hardly any
_ESTIMATED = (2, 3, 4)  # bits; eight cost what four do, times the ratio of their distortions


class Calibrator:
    """Measures one model on one set of windows."""

    def __init__(
        self, model: Any, windows: Windows, bars: Bars | None = None, prefill: int = PREFILL
    ) -> None:
        self.model, self.windows, self.first = model, windows, prefill
        self.bars = bars or (lambda title, total: nullcontext())
        self.base = KVQuantConfig(protect_keys=False)
        cache = TightCache(self.base, model=model)
        self.numbers = [i for i, x in enumerate(cache.layers) if isinstance(x, TightLayer)]
        self.metrics: dict[int, QueryMetric] = {}
        self.costs: dict[int, Costs] = {}
        self._shapes: dict[int, tuple[int, int]] = {}

    def run(self, name: str, texts: Sequence[Text]) -> Calibration:
        """All of it. `name` is the model's, `texts` what the windows are from."""
        steps = len(self.windows) * len(self.numbers)
        with self.bars("queries", steps) as bar:
            recorded = self._record(bar)
        with self.bars("layers", steps) as bar:
            self._estimate(recorded, bar)
        return Calibration(
            loaded_fingerprint(self.model),
            self.metrics,
            {preset: self.bits(KVQuantConfig.preset(preset)) for preset in PRESETS},
            self.costs,
            Measured(
                name,
                tuple((text.name, text.sha256) for text in texts),
                self.windows.ids.numel(),
                tightkv.__version__,
            ),
        )

    def _record(self, bar: Any) -> list[dict[int, Layer]]:
        generator = torch.Generator().manual_seed(0)
        recorded, sums = [], dict[int, Tensor]()
        for row in range(len(self.windows)):
            ids = self.windows.ids[row : row + 1]
            layers, _ = record(self.model, ids, self.numbers, self.first, generator)
            for n, layer in layers.items():
                own = query_metric(layer, self.base, self.first).cpu()
                sums[n] = sums[n] + own if n in sums else own
                self._shapes[n] = layer.key.shape[1], layer.key.shape[3]
                advance_bar(bar)
            recorded.append(layers)
        self.metrics = {n: QueryMetric(total) for n, total in sums.items()}
        return recorded

    @torch.no_grad()
    def _estimate(self, recorded: Sequence[Mapping[int, Layer]], bar: Any) -> None:
        cfgs = [self.base.replace(key_bits=b, value_bits=b) for b in _ESTIMATED]
        positions = len(self.windows) * (self.windows.ids.shape[1] - 1 - self.first)
        for n in self.numbers:
            keys, values = dict.fromkeys(_ESTIMATED, 0.0), dict.fromkeys(_ESTIMATED, 0.0)
            for layers in recorded:
                both = estimate(layers[n], cfgs, self.first, self.metrics[n])
                for total, costs in zip((keys, values), both, strict=True):
                    for bits, kl in costs.items():
                        total[bits] += kl / positions
                advance_bar(bar)
            self.costs[n] = Costs(_all_bits(keys), _all_bits(values))

    def bits(self, preset: KVQuantConfig) -> str:
        """`layer_bits` of the least KL at the bytes that the preset takes in this model.

        No layer's keys get fewer bits than `protect_keys` gives them.
        """
        layers = TightCache(preset, model=self.model).layers
        # A layer whose keys no code holds stays uncompressed.
        own = {n: layers[n].cfg for n in self.numbers if isinstance(layers[n], TightLayer)}
        size = sum(page_layout(cfg, *self._shapes[n]).bytes_per_token for n, cfg in own.items())
        chosen = least_kl({n: self._options(preset, n, cfg) for n, cfg in own.items()}, size)
        assert chosen is not None  # the preset itself is among them
        plain = preset.key_bits, preset.value_bits
        others = {n: option.bits for n, option in chosen.items() if option.bits != plain}
        return ",".join(f"{n}=k{k}v{v}" for n, (k, v) in others.items())

    def _options(self, preset: KVQuantConfig, n: int, own: KVQuantConfig) -> list[Option]:
        raised = own.key_bits > preset.key_bits
        found = []
        for k in SEARCHED_BITS:
            for v in SEARCHED_BITS:
                if raised and k < own.key_bits:
                    continue
                cfg = preset.replace(key_bits=k, value_bits=v)
                size = page_layout(cfg, *self._shapes[n]).bytes_per_token
                found.append(Option((k, v), size, self.costs[n].key[k] + self.costs[n].value[v]))
        return found


def _all_bits(costs: Mapping[int, float]) -> dict[int, float]:
    """KL of every number of bits; more of them never cost more: the rest is noise."""
    ratio = get_codebook("fp8", 8).distortion / get_codebook("fp8", 4).distortion
    found, least = {}, float("inf")
    for bits, kl in {**costs, 8: costs[4] * ratio}.items():
        found[bits] = least = min(least, kl)
    return found
