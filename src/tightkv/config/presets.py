"""Presets: key and value bits, and what else measurement chose for them (docs/log.md)."""

from typing import Any

PRESET_OPTIONS: dict[str, dict[str, Any]] = {
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
PRESETS = tuple(PRESET_OPTIONS)
