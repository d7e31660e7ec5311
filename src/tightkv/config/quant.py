"""KVQuantConfig: how it is made, changed, written and named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tightkv.config import sources
from tightkv.config.fields import DEFAULTS, ConfigFields, one_of, unknown_name

# Bumped whenever the same config and input would give other stored bytes.
FORMAT_VERSION = 2

# Fields that change how a cache behaves but not the bytes of a page.
_NOT_STORED = ("exact_pages", "sinks", "check_finite", "protect_keys", "feedback", "calibration")
# What a page had before these fields existed: fingerprints and files from then stay.
BEFORE: dict[str, Any] = {"layer_bits": "", "window_bits": 16}


@dataclass(frozen=True)
class KVQuantConfig(ConfigFields):
    """How keys and values are stored. Immutable; impossible values raise when it is made."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle of before lacks the newest fields."""
        self.__dict__.update({**BEFORE, **state})

    @property
    def names_layers(self) -> bool:
        """Whether some layers have other bits than the rest."""
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
        bits = self.bits_of_layers().get(layer if model_layer is None else model_layer)
        if bits is None and not self.protected_first <= layer < num_layers - self.protected_last:
            least = self.protected_bits
            bits = max(least, self.key_bits), max(least, self.value_bits)
        return _of_one_layer(self, bits)

    # --- making one ---
    @classmethod
    def preset(cls, name: str, **overrides: Any) -> KVQuantConfig:
        """k8v8, k8v4, k4v4, k4v3, k3v3, k4v2, k3v2 or k2v2: key and value bits, best defaults."""
        return cls.from_dict({"preset": name, **overrides})

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> KVQuantConfig:
        """The config of a plain mapping, which may have "preset", aliases or a "kv_quant" block."""
        options = sources.fields_of(options)
        enabled, window = options.pop(sources.SWITCH, True), options.pop(sources.WINDOW, None)
        base: dict[str, Any] = {}
        if "preset" in options:
            name = options.pop("preset")
            one_of("preset", name, sources.PRESETS)
            base = sources.PRESET_OPTIONS[name]
        for key in options:
            if key not in DEFAULTS:
                allowed = (*DEFAULTS, "preset", *sources.ALIASES)
                raise ValueError(unknown_name("config field", key, allowed))
        if isinstance(options.get("outlier_channels"), list):
            options["outlier_channels"] = tuple(options["outlier_channels"])
        config = cls(**{**base, **options})
        if window is not None:
            pages = -(-window // config.page_size) + 1  # enough however full the open one is
            config = config.replace(exact_pages=pages)
        return config if enabled else cls(key_bits=16, value_bits=16)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> KVQuantConfig:
        """The config of TIGHTKV_PRESET, TIGHTKV_CONFIG (file or JSON), then TIGHTKV_<FIELD>."""
        return cls.from_dict(sources.env_fields(os.environ if env is None else env))

    @classmethod
    def parse(
        cls, source: KVQuantConfig | str | Mapping[str, Any] | os.PathLike[str] | None = None
    ) -> KVQuantConfig:
        """From a config, preset, mapping, JSON text or JSON file; None reads the environment."""
        if source is None:
            return cls.from_env()
        if isinstance(source, KVQuantConfig):
            return source
        return cls.from_dict(source if isinstance(source, Mapping) else sources.read_source(source))

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
        for field, value in BEFORE.items():
            if stored[field] == value:
                del stored[field]
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


@lru_cache(maxsize=256)
def _of_one_layer(cfg: KVQuantConfig, bits: tuple[int, int] | None) -> KVQuantConfig:
    """`cfg` for one layer, with these bits if given; layers that are alike share one config."""
    plain = cfg.replace(protected_first=0, protected_last=0, layer_bits="")
    plain = plain.replace(protect_keys=True, feedback="auto", calibration="")
    if bits is None:
        return plain
    return plain.replace(
        key_bits=bits[0],
        value_bits=bits[1],
        key_method="mse",
        value_method="mse",
        outlier_share=0.0,
        outlier_channels=(),
    )
