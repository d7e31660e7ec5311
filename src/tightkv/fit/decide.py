"""fit(): what a cache of one model is told, layer by layer. Both integrations call it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Calibration, bundled_names
from tightkv.fit.key_check import CheckedConfig, KeyCheck, in_equal_blocks, wants_check
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import KeyScale
from tightkv.model_shape import LayerShape


class Layer(NamedTuple):
    """A compressed layer, as a source is asked about it."""

    shape: LayerShape  # with the KV heads of this process
    cfg: KVQuantConfig


Scales = tuple[Mapping[int, KeyScale], str | None]
Metrics = tuple[Mapping[int, QueryMetric], str | None]


class Source(Protocol):
    """The weights of a model: of a loaded one, or in a checkpoint's folder.

    Of a model that is spread over tensor-parallel ranks, the KV heads of one rank.
    """

    @property
    def name(self) -> str: ...
    @property
    def key_check(self) -> KeyCheck: ...

    def find_calibration(self, cfg: KVQuantConfig) -> Calibration | None:
        """The calibration that `cfg` names; ValueError where it is another model's."""

    def key_scales(self, cfg: KVQuantConfig, layers: Mapping[int, Layer]) -> Scales:
        """Scales of the layers that have some, and the line that reports them."""

    def query_metrics(self, cfg: KVQuantConfig, layers: Mapping[int, Layer]) -> Metrics:
        """Metrics of the layers that have one, and the line that reports them."""


@dataclass(frozen=True)
class Layers:
    """The layers of one process that are compressed, and which bits they can have."""

    shapes: Mapping[int, LayerShape]
    """By their numbers in the model, in order; layers without a number have negative ones."""
    refuse: Callable[[KVQuantConfig], None]
    """Raises where the layers cannot have a config, for example if it names one that stays."""
    fit_together: Callable[[Mapping[int, KVQuantConfig]], bool] = lambda configs: True
    """Whether layers can have these configs side by side."""
    before: int = 0  # compressed layers of earlier pipeline stages
    total: int | None = None  # compressed layers of all stages; those of `shapes` unless given

    def configs(self, cfg: KVQuantConfig) -> dict[int, KVQuantConfig]:
        total = len(self.shapes) if self.total is None else self.total
        return {n: cfg.for_layer(self.before + i, total, n) for i, n in enumerate(self.shapes)}


@dataclass(frozen=True)
class LayerFit:
    """How one layer holds its keys and values."""

    cfg: KVQuantConfig
    metric: QueryMetric | None = None  # of queries that are multiplied by `scale`
    scale: KeyScale | None = None
    centers: Centers | None = None


@dataclass(frozen=True)
class Fit:
    """What a cache is told, and the lines that are to be said about it."""

    asked: KVQuantConfig  # what the user asks for, with the bits of the calibration
    cfg: KVQuantConfig  # that with the bits which the weights ask for
    calibration: Calibration | None = None
    checked: bool = False  # whether the weights have said which bits keys need
    calibration_line: str | None = None
    keys_line: str | None = None
    layers: Mapping[int, LayerFit] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines about scales and metrics


def fit(source: Source | None, cfg: KVQuantConfig, layers: Layers) -> Fit:
    """Decide bits, then key scales, then metrics in the frame of these scales, then centers.

    Without a source, all layers have the bits of `cfg`, and nothing else is known.
    """
    bits = fit_bits(source, cfg, layers)
    configs = layers.configs(bits.cfg)
    if source is None:
        return replace(bits, layers={n: LayerFit(own) for n, own in configs.items()})
    layered = {n: Layer(shape, configs[n]) for n, shape in layers.shapes.items()}
    feeds = bits.asked.feedback != "off"
    wanted = {n: layer for n, layer in layered.items() if feeds and layer.cfg.takes_feedback}
    known, told = source.key_scales(bits.asked, wanted) if wanted else ({}, None)
    scales = {n: known.get(n) for n in wanted}
    centers = {} if bits.calibration is None else bits.calibration.centers
    held = {n: LayerFit(own, None, scales.get(n), centers.get(n)) for n, own in configs.items()}
    found, more = _with_metrics(source, bits.asked, bits.calibration, layered, held)
    return replace(bits, layers=found, notes=tuple(filter(None, (told, more))))


def fit_bits(source: Source | None, cfg: KVQuantConfig, layers: Layers | None = None) -> Fit:
    """Bits of the calibration, then those that the keys of noisy layers need, and nothing else.

    Layers that cannot have them side by side keep the bits of `cfg`.
    """
    calibration = None if source is None else source.find_calibration(cfg)
    asked = cfg if calibration is None else calibration.applied(cfg)
    if layers is not None:
        layers.refuse(asked)
    if source is None:
        return Fit(asked, asked)
    line, checked = _not_used(cfg, calibration, source.name), _checked(source, asked)
    changed = checked.raised or asked != cfg
    if changed and layers and not layers.fit_together(layers.configs(checked.config)):
        if asked != cfg:
            checked = _checked(source, cfg)
            line = (
                f"tightkv {cfg.name}: the calibration's bits of layers are ignored, because all of "
                "vLLM's blocks have one size in models with layers of other kinds; its metrics are "
                "used"
            )
        if checked.raised:
            checked = in_equal_blocks(cfg, checked)
    known = checked.raised or checked.line is None
    return Fit(asked, checked.config, calibration, known, line, checked.line)


def _not_used(cfg: KVQuantConfig, found: Calibration | None, name: str) -> str | None:
    """What is said of a calibration that does less than was asked."""
    if not cfg.calibration:
        return None
    if found is None:
        return (
            f"tightkv: calibration={cfg.calibration!r}: {name} is none of "
            f"{', '.join(bundled_names())}; nothing is changed. Measure it: "
            f"tightkv calibrate {name} -o FILE"
        )
    if cfg.names_layers or cfg.name in found.layer_bits:
        return None
    return (
        f"tightkv: {found.source} has no bits of layers for {cfg.name}, only for "
        f"{', '.join(found.layer_bits) or 'none'}: keys are coded in the metric of their queries, "
        "and all layers have the same bits"
    )


def _checked(source: Source, cfg: KVQuantConfig) -> CheckedConfig:
    """The weights are looked at only if they are asked."""
    return source.key_check.protect(cfg) if wants_check(cfg) else CheckedConfig(cfg)


def _with_metrics(
    source: Source,
    cfg: KVQuantConfig,
    calibration: Calibration | None,
    layers: Mapping[int, Layer],
    held: Mapping[int, LayerFit],
) -> tuple[Mapping[int, LayerFit], str | None]:
    """`held` with metrics in the frame of its scales: the calibration's, or the source's.

    No layer has one where no layer's keys are coded with error feedback.
    """
    if cfg.feedback == "off" or not any(layer.cfg.takes_feedback for layer in layers.values()):
        return held, None
    if calibration is not None:
        known, line = calibration.metrics, None
    else:
        known, line = source.query_metrics(cfg, layers)
    metrics = {n: known[n].scaled(own.scale) for n, own in held.items() if n in known}
    return {n: replace(own, metric=metrics.get(n)) for n, own in held.items()}, line


def refit(source: Source, cfg: KVQuantConfig, held: Mapping[int, LayerFit]) -> Fit:
    """Metrics for layers that hold tokens already: their bits, scales and centers stay."""
    calibration = source.find_calibration(cfg)
    said = _not_used(cfg, calibration, source.name)
    layers = {n: Layer(LayerShape("full"), own.cfg) for n, own in held.items()}
    found, line = _with_metrics(source, cfg, calibration, layers, held)
    notes = () if line is None else (line,)
    return Fit(cfg, cfg, calibration, calibration_line=said, layers=found, notes=notes)
