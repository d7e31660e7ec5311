"""ConfigFields: every option of the compressed cache, its default and what it may be."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

BITS = (2, 3, 4, 8, 16)
METHODS = ("mse", "prod", "group", "absmax")
SCALE_MODES = ("norm", "corrected", "least_squares", "unbiased")
ROTATIONS = ("hadamard", "haar", "none")
CODEBOOKS = ("fp8", "gaussian", "beta")
CENTERINGS = ("page", "none")
PAGE_SIZES = (32, 64, 128, 256)
MEAN_BITS = (8, 16)
WINDOW_BITS = (8, 16)  # of values; keys have 12 with 8
FEEDBACK = ("auto", "off")
FEEDBACK_BITS = (2, 3, 4)  # of keys; eight bits leave nothing to gain
OUTLIER_SIDES = ("keys", "values", "both")


@dataclass(frozen=True)
class ConfigFields:
    """How keys and values are stored; impossible values raise. Used as `KVQuantConfig`."""

    key_bits: int = 4
    """Bits per key element: 2, 3, 4 or 8; 16 does not compress keys."""
    value_bits: int = 4
    """Bits per value element: 2, 3, 4 or 8; 16 does not compress values."""
    key_method: str = "mse"
    """mse (TurboQuant-MSE), prod (one bit fewer plus a QJL sketch), group (min/max), absmax."""
    value_method: str = "mse"
    """As key_method, for values."""
    key_scale: str = "unbiased"
    """Stored scale of a key: norm, corrected, least_squares or unbiased (docs/math.md)."""
    value_scale: str = "unbiased"
    """As key_scale, for values."""
    rotation: str = "hadamard"
    """hadamard (Haar if head_dim is not a power of two), haar, or none."""
    seed: int = 0
    """Seed of the rotation and of the QJL sketch."""
    codebook: str = "fp8"
    """fp8 (hardware-native levels; the fast kernels need it), gaussian or beta (Lloyd-Max)."""
    group_size: int = 32
    """Elements that share a range in the group method."""
    page_size: int = 64
    """Tokens per page: 32, 64, 128 or 256."""
    exact_pages: int = 3
    """Pages of the window of newest tokens, including the open one; see window_bits."""
    sinks: int = 4
    """First tokens of a sequence kept exact."""
    window_bits: int = 8
    """Newest tokens: 16 (exact), or 8 for values and 12 for keys. 16 where a side has 16 bits."""
    key_centering: str = "page"
    """page subtracts the page's mean from each key that is closer to it than to zero; none: off."""
    mean_bits: int = 16
    """Precision of a page's mean key: 16 (fp16) or 8 (int8 and a scale)."""
    protected_first: int = 0
    """How many of the first compressed layers use protected_bits."""
    protected_last: int = 0
    """How many of the last compressed layers use protected_bits."""
    protected_bits: int = 8
    """Bits of protected layers, keys and values: 2, 3, 4, 8 or 16."""
    layer_bits: str = ""
    """Bits of single layers, by their number in the model: "0=k8v4,5=k4v4"."""
    protect_keys: bool = True
    """Give keys more bits in layers where quantization noise would hide the scores."""
    feedback: str = "auto"
    """auto codes keys with error feedback, and scales their uneven channels; off does neither."""
    calibration: str = ""
    """Calibration of the model (tightkv calibrate): a file, a bundled one by name, or auto."""
    outlier_share: float = 0.0
    """Share of channels that get outlier_extra_bits more; 0 is off, 0.5 turns 3 bits into 3.5."""
    outlier_extra_bits: int = 1
    """Extra bits of an outlier channel."""
    outlier_side: str = "both"
    """Which of keys, values or both have outlier channels."""
    outlier_channels: tuple[int, ...] = ()
    """Which channels; by default the slowest RoPE channels of each half."""
    check_finite: bool = False
    """Raise on NaN or Inf instead of storing NaN as 0 and Inf as the largest fp16."""

    def __post_init__(self) -> None:
        _check_types(self)
        one_of("key_bits", self.key_bits, BITS)
        one_of("value_bits", self.value_bits, BITS)
        one_of("key_method", self.key_method, METHODS)
        one_of("value_method", self.value_method, METHODS)
        one_of("key_scale", self.key_scale, SCALE_MODES)
        one_of("value_scale", self.value_scale, SCALE_MODES)
        one_of("rotation", self.rotation, ROTATIONS)
        one_of("codebook", self.codebook, CODEBOOKS)
        one_of("page_size", self.page_size, PAGE_SIZES)
        one_of("key_centering", self.key_centering, CENTERINGS)
        one_of("mean_bits", self.mean_bits, MEAN_BITS)
        one_of("window_bits", self.window_bits, WINDOW_BITS)
        one_of("feedback", self.feedback, FEEDBACK)
        one_of("protected_bits", self.protected_bits, BITS)
        one_of("outlier_side", self.outlier_side, OUTLIER_SIDES)
        one_of("group_size", self.group_size, (16, 32, 64, 128))
        _at_least("seed", self.seed, 0)
        _at_least("exact_pages", self.exact_pages, 1)
        _at_least("sinks", self.sinks, 0)
        _at_least("protected_first", self.protected_first, 0)
        _at_least("protected_last", self.protected_last, 0)
        _at_least("outlier_extra_bits", self.outlier_extra_bits, 1)
        object.__setattr__(self, "layer_bits", _layer_bits_text(self.bits_of_layers()))
        if self.sinks > self.page_size:
            raise ValueError(
                f"sinks={self.sinks} does not fit a page; allowed: 0 to {self.page_size}"
            )
        if not 0.0 <= self.outlier_share < 1.0:
            raise ValueError(f"outlier_share={self.outlier_share}; allowed: 0 <= share < 1")
        if self.outlier_channels and not self.outlier_share:
            raise ValueError("outlier_channels are named but outlier_share is 0; set the share too")
        if len(set(self.outlier_channels)) != len(self.outlier_channels):
            raise ValueError(f"outlier_channels={self.outlier_channels} names a channel twice")
        if 16 in (self.key_bits, self.value_bits):  # the window is rounded as pages are rotated
            object.__setattr__(self, "window_bits", 16)
        for side in ("key", "value"):
            self._check_side(side)

    def _check_side(self, side: str) -> None:
        bits, method = self.bits(side), self.method(side)
        widths = (1, 2, 3, 4, 8) if self.codebook == "fp8" else tuple(range(1, 9))
        if method == "prod" and bits != 16 and bits - 1 not in widths:
            raise ValueError(
                f"{side}_method='prod' with {side}_bits={bits} needs a {bits - 1}-bit codebook; "
                f"codebook={self.codebook!r} has {widths}; use 2, 3 or 4, or codebook='gaussian'"
            )
        if self.has_outliers(side):
            if method != "mse" or bits == 16:
                raise ValueError(
                    f"outlier channels need {side}_method='mse' and {side}_bits below 16; got "
                    f"{method!r} and {bits}; set outlier_side to leave the {side}s out"
                )
            wide = bits + self.outlier_extra_bits
            if wide not in widths:
                raise ValueError(
                    f"{side}_bits={bits} + outlier_extra_bits={self.outlier_extra_bits} = {wide}; "
                    f"codebook={self.codebook!r} has {widths}"
                )

    # --- one side, by name ---
    def bits(self, side: str) -> int:
        return self.key_bits if side == "key" else self.value_bits

    def method(self, side: str) -> str:
        return self.key_method if side == "key" else self.value_method

    def scale_mode(self, side: str) -> str:
        return self.key_scale if side == "key" else self.value_scale

    def has_outliers(self, side: str) -> bool:
        return self.outlier_share > 0 and self.outlier_side in ("both", side + "s")

    @property
    def takes_feedback(self) -> bool:
        """Whether sealed keys can be coded in the metric of their queries (`math.feedback`)."""
        return (
            self.key_bits in FEEDBACK_BITS
            and self.method("key") == "mse"
            and not self.has_outliers("key")
        )

    @property
    def centered(self) -> bool:
        """Whether pages carry a mean key."""
        return self.key_centering == "page" and self.key_bits != 16

    @property
    def compresses(self) -> bool:
        return self.key_bits != 16 or self.value_bits != 16

    def bits_of_layers(self) -> Mapping[int, tuple[int, int]]:
        """`layer_bits`: key and value bits by a layer's number in the model."""
        return parse_layer_bits(self.layer_bits)


DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(ConfigFields)}
"""The default of every field, by its name."""


def _check_types(cfg: ConfigFields) -> None:
    for name, default in DEFAULTS.items():
        value, kind = getattr(cfg, name), type(default)
        if kind is float and type(value) is int and abs(value) < 2**53:
            object.__setattr__(cfg, name, float(value))
        elif type(value) is not kind:
            raise ValueError(
                f"{name}={value!r} is a {type(value).__name__}; "
                f"it must be a {kind.__name__}, for example {default!r}"
            )
    if any(type(c) is not int or c < 0 for c in cfg.outlier_channels):
        raise ValueError(f"outlier_channels={cfg.outlier_channels}; allowed: whole numbers >= 0")


@lru_cache(maxsize=64)
def parse_layer_bits(text: str) -> Mapping[int, tuple[int, int]]:
    """Once for each text: a config is asked for each of its layers."""
    found: dict[int, tuple[int, int]] = {}
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"([0-9]{1,5})=k([0-9]{1,2})v([0-9]{1,2})", part, re.ASCII)
        if match is None:
            raise ValueError(
                f"layer_bits={text!r}: {part!r} is not LAYER=kBITSvBITS, for example '0=k8v4'"
            )
        layer, key, value = map(int, match.groups())
        for bits in (key, value):
            one_of(f"layer_bits of layer {layer}", bits, BITS)
        if layer in found:
            raise ValueError(f"layer_bits={text!r} names layer {layer} twice")
        found[layer] = key, value
    return MappingProxyType(found)


def _layer_bits_text(bits: Mapping[int, tuple[int, int]]) -> str:
    return ",".join(f"{layer}=k{key}v{value}" for layer, (key, value) in sorted(bits.items()))


def one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        if isinstance(value, str):
            raise ValueError(unknown_name(name, value, allowed))
        raise ValueError(f"{name}={value!r}; supported: {', '.join(map(str, allowed))}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}; it must be at least {least}")


def unknown_name(what: str, value: object, allowed: Any) -> str:
    """The message that refuses a name: the nearest right one, and all that are allowed."""
    near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}{hint} (allowed: {', '.join(map(str, allowed))})"
