"""KVQuantConfig: every option of the compressed cache, its default and its one parser."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightkv.config_aliases import ALIASES, SWITCH, WINDOW, expand, overlay, pages_of

BITS = (2, 3, 4, 8, 16)
METHODS = ("mse", "prod", "group", "absmax")
SCALE_MODES = ("norm", "corrected", "least_squares", "unbiased")
ROTATIONS = ("hadamard", "haar", "none")
CODEBOOKS = ("fp8", "gaussian", "beta")
CENTERINGS = ("page", "none")
PAGE_SIZES = (32, 64, 128, 256)
MEAN_BITS = (8, 16)
FEEDBACK = ("auto", "off")
FEEDBACK_BITS = (2, 3, 4)  # of keys; eight bits leave nothing to gain
OUTLIER_SIDES = ("keys", "values", "both")
# Key and value bits, and what else measurement chose for them (docs/log.md).
_PRESET_OPTIONS: dict[str, dict[str, Any]] = {
    "k8v8": {"key_bits": 8, "value_bits": 8},
    "k8v4": {"key_bits": 8, "value_bits": 4},
    "k4v4": {"key_bits": 4, "value_bits": 4},
    "k4v3": {"key_bits": 4, "value_bits": 3},
    "k3v3": {"key_bits": 3, "value_bits": 3},
    "k4v2": {"key_bits": 4, "value_bits": 2},
    "k3v2": {"key_bits": 3, "value_bits": 2},
    "k2v2": {
        "key_bits": 2,
        "value_bits": 2,
        "key_scale": "corrected",
        "page_size": 32,
        "exact_pages": 6,
        "mean_bits": 8,
    },
}
PRESETS = tuple(_PRESET_OPTIONS)

# Bumped whenever the same config and input would give other stored bytes.
FORMAT_VERSION = 2

ENV_PREFIX = "TIGHTKV_"
# TIGHTKV_* variables beside the fields, which all ask for compression: these two do as well,
ENV_SOURCES = ("TIGHTKV_PRESET", "TIGHTKV_CONFIG")
# and these never do: they say how or where things are done.
ENV_SETTINGS = ("TIGHTKV_KERNELS", "TIGHTKV_CACHE_DIR", "TIGHTKV_CPU_ISA")

# A JSON document is the fields themselves, or has them as this block. Beside the block it may
# have those of a server: `tightkv serve` reads both, commands that load a model the first.
_BLOCK, _SERVER_BLOCKS = "kv_quant", ("model", "runtime")

# Fields that change how a cache behaves but not the bytes of a page.
_NOT_STORED = ("exact_pages", "sinks", "check_finite", "protect_keys", "feedback", "calibration")


@dataclass(frozen=True)
class KVQuantConfig:
    """How keys and values are stored. Immutable; impossible values raise when it is made."""

    key_bits: int = 4
    """Bits a key element: 2, 3, 4 or 8; 16 leaves keys alone."""
    value_bits: int = 4
    """Bits a value element: 2, 3, 4 or 8; 16 leaves values alone."""
    key_method: str = "mse"
    """mse (TurboQuant-MSE), prod (one bit fewer plus a QJL sketch), group (min/max), absmax."""
    value_method: str = "mse"
    """As key_method, for values."""
    key_scale: str = "unbiased"
    """Stored scale of a key: norm, corrected, least_squares or unbiased (docs/math.md)."""
    value_scale: str = "unbiased"
    """As key_scale, for values."""
    rotation: str = "hadamard"
    """hadamard (Haar where the size is no power of two), haar, or none."""
    seed: int = 0
    """Seed of the rotation and of the QJL sketch."""
    codebook: str = "fp8"
    """fp8 (hardware-native levels; what the kernels take), gaussian or beta (Lloyd-Max)."""
    group_size: int = 32
    """Elements that share a range in the group method."""
    page_size: int = 64
    """Tokens a page: 32, 64, 128 or 256."""
    exact_pages: int = 3
    """Newest pages kept exact beside their codes, the open one included."""
    sinks: int = 4
    """First tokens of a sequence kept exact."""
    key_centering: str = "page"
    """page subtracts each page's mean key where that helps; none does not."""
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
    """Give keys more bits in layers whose weights say that codes would drown their scores."""
    feedback: str = "auto"
    """auto codes keys in the metric of the model's queries, where it is known; off does not."""
    calibration: str = ""
    """What was measured of the model (tightkv calibrate): a file, a ready one's name, or auto."""
    outlier_share: float = 0.0
    """Share of channels that get outlier_extra_bits more; 0 is off, 0.5 makes 3 bits 3.5."""
    outlier_extra_bits: int = 1
    """Extra bits of an outlier channel."""
    outlier_side: str = "both"
    """Which of keys, values or both have outlier channels."""
    outlier_channels: tuple[int, ...] = ()
    """Which channels; empty takes the slowest RoPE channels of each half."""
    check_finite: bool = False
    """Raise on NaN or Inf instead of storing NaN as 0 and Inf as the largest fp16."""

    def __post_init__(self) -> None:
        _check_types(self)
        _one_of("key_bits", self.key_bits, BITS)
        _one_of("value_bits", self.value_bits, BITS)
        _one_of("key_method", self.key_method, METHODS)
        _one_of("value_method", self.value_method, METHODS)
        _one_of("key_scale", self.key_scale, SCALE_MODES)
        _one_of("value_scale", self.value_scale, SCALE_MODES)
        _one_of("rotation", self.rotation, ROTATIONS)
        _one_of("codebook", self.codebook, CODEBOOKS)
        _one_of("page_size", self.page_size, PAGE_SIZES)
        _one_of("key_centering", self.key_centering, CENTERINGS)
        _one_of("mean_bits", self.mean_bits, MEAN_BITS)
        _one_of("feedback", self.feedback, FEEDBACK)
        _one_of("protected_bits", self.protected_bits, BITS)
        _one_of("outlier_side", self.outlier_side, OUTLIER_SIDES)
        _one_of("group_size", self.group_size, (16, 32, 64, 128))
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

    def bits_of_layers(self) -> dict[int, tuple[int, int]]:
        """`layer_bits`: key and value bits by a layer's number in the model."""
        return _parse_layer_bits(self.layer_bits)

    @property
    def names_layers(self) -> bool:
        """Whether some layers have bits of their own."""
        return bool(self.layer_bits or self.protected_first or self.protected_last)

    def for_layer(
        self, layer: int, num_layers: int, model_layer: int | None = None
    ) -> KVQuantConfig:
        """The config of compressed layer `layer` of `num_layers`.

        `model_layer` is its number among all layers of the model, `layer` unless given. Its
        `layer_bits` come first, then protected_bits.
        """
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer={layer}; allowed: 0 to {num_layers - 1}")
        plain = self.replace(
            protected_first=0,
            protected_last=0,
            layer_bits="",
            protect_keys=True,
            feedback="auto",
            calibration="",
        )
        bits = self.bits_of_layers().get(layer if model_layer is None else model_layer)
        if bits is None and self.protected_first <= layer < num_layers - self.protected_last:
            return plain
        if bits is None:
            least = self.protected_bits
            bits = max(least, self.key_bits), max(least, self.value_bits)
        return plain.replace(
            key_bits=bits[0],
            value_bits=bits[1],
            key_method="mse",
            value_method="mse",
            outlier_share=0.0,
            outlier_channels=(),
        )

    # --- making one ---
    @classmethod
    def preset(cls, name: str, **overrides: Any) -> KVQuantConfig:
        """k8v8, k8v4, k4v4, k4v3, k3v3, k4v2, k3v2 or k2v2: key and value bits, best defaults."""
        return cls.from_dict({"preset": name, **overrides})

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> KVQuantConfig:
        """From a plain mapping; understands {"kv_quant": {...}}, "preset" and aliases."""
        options = fields_of(options)
        enabled, window = options.pop(SWITCH, True), options.pop(WINDOW, None)
        base: dict[str, Any] = {}
        if "preset" in options:
            name = options.pop("preset")
            _one_of("preset", name, PRESETS)
            base = _PRESET_OPTIONS[name]
        for key in options:
            if key not in _FIELDS:
                allowed = (*_FIELDS, "preset", *ALIASES)
                raise ValueError(unknown_name("config field", key, allowed))
        if isinstance(options.get("outlier_channels"), list):
            options["outlier_channels"] = tuple(options["outlier_channels"])
        config = cls(**{**base, **options})
        if window is not None:
            config = config.replace(exact_pages=pages_of(window, config.page_size))
        return config if enabled else cls(key_bits=16, value_bits=16)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> KVQuantConfig:
        """From TIGHTKV_PRESET, TIGHTKV_CONFIG (file or JSON) and TIGHTKV_<FIELD>, in that order."""
        return cls.from_dict(env_fields(os.environ if env is None else env))

    @classmethod
    def parse(
        cls, source: KVQuantConfig | str | Mapping[str, Any] | os.PathLike[str] | None = None
    ) -> KVQuantConfig:
        """From anything a user hands over: a config, preset, mapping, JSON text or JSON file.

        None reads the environment.
        """
        if source is None:
            return cls.from_env()
        if isinstance(source, KVQuantConfig):
            return source
        return cls.from_dict(source if isinstance(source, Mapping) else read_source(source))

    # --- writing one ---
    def replace(self, **changes: Any) -> KVQuantConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, every field."""
        out = dataclasses.asdict(self)
        out["outlier_channels"] = list(self.outlier_channels)
        return out

    def to_json(self) -> str:
        """{"kv_quant": {...}}, which `parse` reads back to an equal config."""
        return json.dumps({"kv_quant": self.to_dict()}, indent=2)

    def fingerprint(self) -> str:
        """16 hex digits that change with anything that changes a page's bytes."""
        stored = {k: v for k, v in self.to_dict().items() if k not in _NOT_STORED}
        if not self.layer_bits:  # as before there was such a field
            del stored["layer_bits"]
        stored["format"] = FORMAT_VERSION
        return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Short label such as k4v4, k4v4+ with layer_bits; a method other than mse is named."""

        def side(letter: str, which: str) -> str:
            label = f"{letter}{self.bits(which)}"
            if self.has_outliers(which):
                label += f".{round(10 * self.outlier_share * self.outlier_extra_bits)}"
            return label if self.method(which) == "mse" else f"{label}{self.method(which)}"

        return side("k", "key") + side("v", "value") + ("+" if self.layer_bits else "")


_FIELDS = {f.name: f for f in dataclasses.fields(KVQuantConfig)}


def _check_types(cfg: KVQuantConfig) -> None:
    for field in _FIELDS.values():
        value, default = getattr(cfg, field.name), field.default
        kind = type(default)
        if kind is float and type(value) is int and abs(value) < 2**53:
            object.__setattr__(cfg, field.name, float(value))
        elif type(value) is not kind:
            raise ValueError(
                f"{field.name}={value!r} is a {type(value).__name__}; "
                f"it must be a {kind.__name__}, for example {default!r}"
            )
    if any(type(c) is not int or c < 0 for c in cfg.outlier_channels):
        raise ValueError(f"outlier_channels={cfg.outlier_channels}; allowed: whole numbers >= 0")


def _parse_layer_bits(text: str) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"([0-9]{1,5})=k([0-9]{1,2})v([0-9]{1,2})", part, re.ASCII)
        if match is None:
            raise ValueError(
                f"layer_bits={text!r}: {part!r} is not LAYER=kBITSvBITS, for example '0=k8v4'"
            )
        layer, key, value = map(int, match.groups())
        for bits in (key, value):
            _one_of(f"layer_bits of layer {layer}", bits, BITS)
        if layer in found:
            raise ValueError(f"layer_bits={text!r} names layer {layer} twice")
        found[layer] = key, value
    return found


def _layer_bits_text(bits: Mapping[int, tuple[int, int]]) -> str:
    return ",".join(f"{layer}=k{key}v{value}" for layer, (key, value) in sorted(bits.items()))


def _one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        if isinstance(value, str):
            raise ValueError(unknown_name(name, value, allowed))
        raise ValueError(f"{name}={value!r}; supported: {', '.join(map(str, allowed))}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}; it must be at least {least}")


def unknown_name(what: str, value: str, allowed: Any) -> str:
    """The message that refuses a name: the nearest right one, and all that are allowed."""
    near = difflib.get_close_matches(value, [str(a) for a in allowed], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}{hint} (allowed: {', '.join(map(str, allowed))})"


def _from_text(field: str, text: str) -> Any:
    """An environment string as the field's type."""
    kind: type = type(_FIELDS[field].default)
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.strip().lower()]
        if kind is tuple:
            return tuple(int(part) for part in text.replace(",", " ").split())
        return kind(text)
    except (ValueError, KeyError):
        forms = {"bool": "0, 1, true or false", "tuple": "numbers with commas"}
        wanted = forms.get(kind.__name__, kind.__name__)
        raise ValueError(f"{ENV_PREFIX}{field.upper()}={text!r}; it must be {wanted}") from None


def env_requests(env: Mapping[str, str]) -> list[str]:
    """The variables that ask for compression; an unknown TIGHTKV_* name is refused."""
    fields = [ENV_PREFIX + field.upper() for field in _FIELDS]
    known = (*ENV_SOURCES, *fields, *ENV_SETTINGS)
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ValueError(unknown_name("environment variable", name, known))
    return [name for name in env if name in known and name not in ENV_SETTINGS]


def env_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """What the TIGHTKV_* variables set, as `KVQuantConfig.from_dict` takes it."""
    options: dict[str, Any] = {}
    if "TIGHTKV_PRESET" in env:
        options["preset"] = env["TIGHTKV_PRESET"]
    if "TIGHTKV_CONFIG" in env:
        options = overlay(options, fields_of(read_json(env["TIGHTKV_CONFIG"])))
    fields = {}
    for name in env_requests(env):
        if name not in ENV_SOURCES:
            field = name[len(ENV_PREFIX) :].lower()
            fields[field] = _from_text(field, env[name])
    return overlay(options, fields)


def is_off(options: Mapping[str, Any]) -> bool:
    """Whether {"enabled": false} leaves everything uncompressed."""
    return fields_of(options).get(SWITCH) is False


def fields_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The config fields of a document: its kv_quant block, or all of it where there is none.

    Aliases are checked. page_size may stand in the runtime block instead.
    """
    if _BLOCK not in document:
        return expand(document)
    for name in document:
        if name in (*_FIELDS, "preset", *ALIASES):
            raise ValueError(f"{name!r} stands beside {_BLOCK!r}; move it into that block")
        if name not in (_BLOCK, *_SERVER_BLOCKS):
            raise ValueError(unknown_name("block", name, (_BLOCK, *_SERVER_BLOCKS)))
    inner = document[_BLOCK]
    if not isinstance(inner, Mapping):
        raise ValueError(f"{_BLOCK}={inner!r}; it must be an object of config fields")
    runtime = document.get("runtime")
    size = runtime.get("page_size") if isinstance(runtime, Mapping) else None
    if size is not None and inner.get("page_size", size) != size:
        raise ValueError(
            f"page_size={inner['page_size']!r} in {_BLOCK!r} and {size!r} in 'runtime'; keep one"
        )
    return expand({**inner, **({} if size is None else {"page_size": size})})


def read_source(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The options that a preset's name, JSON text or a .json file stands for."""
    text = os.fspath(source)
    if text in PRESETS:
        return {"preset": text}
    if not text.lstrip().startswith("{") and not text.endswith(".json"):
        raise ValueError(
            unknown_name("preset", text, PRESETS)
            + "; or give JSON text or the path of a .json file"
        )
    return read_json(text)


def read_json(source: str) -> dict[str, Any]:
    """A JSON object from text or from a file."""
    text = source
    if not source.lstrip().startswith("{"):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"config file {source!r} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"config file {source!r} cannot be read: {error}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config {source!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"config {source!r} is a JSON {type(data).__name__}; it must be an object")
    return data


def cache_root() -> Path:
    """Where converted models and compiled kernels are kept.

    $TIGHTKV_CACHE_DIR, or the user's cache directory.
    """
    own = os.environ.get("TIGHTKV_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "tightkv"
