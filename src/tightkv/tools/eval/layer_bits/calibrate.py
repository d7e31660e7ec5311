"""Measure a calibration: metrics and centers of each layer, and bits of layers at equal bytes.

One exact pass over each window gives queries, keys and values of every layer (sensitivity.py), and
from these come metrics and centers. Gradients of the first window then say what each layer's keys
and values, coded so, cost at each number of bits, and with this the bits of layers are chosen that
cost least at the bytes a preset takes (k2v2: at most 5% more).
"""

from collections.abc import Sequence
from typing import Any

import tightkv
from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Calibration, Costs, Measured
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.fitting import loaded_fingerprint
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.integrations.transformers.query_probe import probed
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric
from tightkv.pages.layout import page_layout
from tightkv.tools.eval.forward import Bars, no_bars
from tightkv.tools.eval.layer_bits import sensitivity
from tightkv.tools.eval.layer_bits.search import SEARCHED_BITS, least_kl, options_of
from tightkv.tools.eval.text import Text
from tightkv.tools.eval.windows import Windows

PRESETS = ("k4v4", "k3v3", "k2v2")  # whose bits are chosen layer by layer
WINDOW = 2048
GROWTH = 0.05
"""Of the bytes, for presets of the fewest bits: their layers have none to give to others."""
PREFILL = 256  # tokens of a window whose queries read no codes, or hardly any


class Calibrator:
    """Measures one model on one set of windows."""

    def __init__(
        self, model: Any, windows: Windows, bars: Bars = no_bars, prefill: int = PREFILL
    ) -> None:
        self.model, self.windows, self.bars, self.first = model, windows, bars, prefill
        self.base = KVQuantConfig(protect_keys=False)
        self.numbers = sensitivity.compressible(model)
        self.metrics: dict[int, QueryMetric] = {}
        self.centers: dict[int, Centers] = {}
        self.costs: dict[int, Costs] = {}
        self._shapes: dict[int, tuple[int, int]] = {}

    def run(self, name: str, texts: Sequence[Text]) -> Calibration:
        """All of it. `name` is the model's, `texts` what the windows are from."""
        with self.bars("queries", len(self.windows) * len(self.numbers)) as bar:
            self._observe(bar)
        with self.bars("layers", len(self.numbers)) as bar:
            self._estimate(bar)
        fingerprint = loaded_fingerprint(self.model)
        bits = {preset: self.bits(KVQuantConfig.preset(preset)) for preset in PRESETS}
        hashes = tuple((text.name, text.sha256) for text in texts)
        measured = Measured(name, hashes, self.windows.ids.numel(), tightkv.__version__)
        return Calibration(fingerprint, self.metrics, bits, self.costs, measured, self.centers)

    def _observe(self, bar: Any) -> None:
        sums: dict[int, sensitivity.Moments] = {}
        plain: dict[int, bool] = {}  # whether attention is the softmax of scores and nothing else
        for row in range(len(self.windows)):
            layers = sensitivity.observe(self.model, self.windows.ids[row : row + 1], self.numbers)
            for n in self.numbers:
                layer = layers.pop(n)
                own = sensitivity.moments(layer, self.base, self.first)
                sums[n] = sums[n] + own if n in sums else own
                plain[n] = layer.softcap is None and layer.sink is None
                self._shapes[n] = layer.key.shape[1], layer.key.shape[3]
                bar.advance(1)
        self.metrics = {n: QueryMetric(total.metric.cpu()) for n, total in sums.items()}
        self.centers = {n: total.centers() for n, total in sums.items() if plain[n]}

    def _estimate(self, bar: Any) -> None:
        """By the gradients of one window: bits depend on ratios of costs, which are far apart."""
        layers = sensitivity.record(self.model, self.windows.ids[:1], self.numbers, self.first)[0]
        scales = probed(self.model).scales
        for n in self.numbers:
            how = sensitivity.Coding(self.metrics[n], self.centers.get(n), scales.get(n))
            self.costs[n] = sensitivity.layer_costs(layers.pop(n), self.base, self.first, how)
            bar.advance(1)

    def bits(self, preset: KVQuantConfig) -> str:
        """`layer_bits` of the least KL at the bytes that the preset takes in this model.

        No layer's keys get fewer bits than `protect_keys` gives them. A preset of the fewest bits
        takes up to `GROWTH` more bytes than with `protect_keys` alone.
        """
        layers = TightCache(preset, model=self.model).layers
        # A layer whose keys no code holds stays uncompressed.
        own = {n: layers[n].cfg for n in self.numbers if isinstance(layers[n], TightLayer)}
        size = sum(page_layout(cfg, *self._shapes[n]).bytes_per_token for n, cfg in own.items())
        if preset.key_bits == preset.value_bits == min(SEARCHED_BITS):
            size *= 1 + GROWTH
        options = {}
        for n, cfg in own.items():
            least = cfg.key_bits if cfg.key_bits > preset.key_bits else 0
            options[n] = options_of(preset, self._shapes[n], self.costs[n], least)
        chosen = least_kl(options, size)
        assert chosen is not None  # the preset itself is among them
        common = preset.key_bits, preset.value_bits
        others = {n: option.bits for n, option in chosen.items() if option.bits != common}
        return ",".join(f"{n}=k{k}v{v}" for n, (k, v) in others.items())
