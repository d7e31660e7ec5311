"""The planner as one HTML page that needs no server and no network.

Its scripts do what `model_shape` and `planner` do; tables, sizes and models are written into it
here. tests/cli/test_plan_page.py compares the two in a browser.
"""

import json
from pathlib import Path
from typing import Any

from tightkv import __version__
from tightkv.config import PRESETS, KVQuantConfig
from tightkv.model_shape import (
    compressible,
    families,
    kinds,
    planner,
    reader,
    shape,
    source,
    weights,
)
from tightkv.pages.latent import RANKS, ROPE_DIMS, latent_layout
from tightkv.pages.layout import PageLayout, seal_lag

_HERE = Path(__file__).parent
_EXTRAS = ["ALIBI", "SHARED", "SINKS", "WINDOW", "INDEXED", "BESIDE_OTHERS", "LATENT_WINDOW"]
# names of rooms that the scripts read in lower case
_TABLES = (
    (planner, "GPUS WEIGHT_BITS BASELINES INDEXED_LATENT_BYTES NOT_FOR_LATENTS"),
    (compressible, "KIND_REASONS SUPPORTED_EXTRAS"),
    (source, "MOST MOST_LAYERS MOST_HEADS MOST_DIM TEXT_PARTS SHARED"),
    (families, "DEFAULTS NESTED_DEFAULTS ALL_SLIDE ALIBI_FAMILIES SINK_FAMILIES REFUSED"),
    (families, "MLP_MATRICES"),
    (kinds, "LAYER_NAMES PATTERN ADDS_TO_ATTENTION NOT_UNDERSTOOD UNRELATED_LISTS"),
    (reader, "SAYS_LAYERS CONV_BYTES RECURRENT_BYTES"),
    (weights, "FP8_METHODS"),
)
_SCRIPTS = ("config.js", "bytes.js", "page.js")


def plan_page(context: int, utilization: float) -> str:
    """The page, with the defaults of the command line."""
    data = _tables() | {"context": context, "utilization": utilization}
    scripts = [f"const DATA = {json.dumps(data)};", *map(_read, _SCRIPTS)]
    page = _read("page.html").replace("/* style.css */", _read("style.css").strip())
    return page.replace("/* scripts */", "\n".join(scripts).strip())


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _tables() -> dict[str, Any]:
    layout = PageLayout(KVQuantConfig(), 1, 16)
    exact = layout.exact_bytes_per_token
    return {
        "version": __version__,
        "models": json.loads(_read("models.json")),
        **{name.lower(): getattr(room, name) for room, names in _TABLES for name in names.split()},
        "dtypes": {name: str(d).removeprefix("torch.") for name, d in reader.DTYPES.items()},
        "extras": {name: getattr(shape, name) for name in _EXTRAS},
        "latent_ranks": list(RANKS),
        "latent_rope_dims": ROPE_DIMS,
        "presets": {name: _preset(KVQuantConfig.preset(name)) for name in PRESETS},
        "exact_element_bytes": exact // 32,
        "counter_bytes": layout.sequence_bytes(0) - layout.cfg.sinks * exact,
        "entry_bytes": layout.total_bytes(64) - layout.sequence_bytes(64) - layout.page_bytes,
    }


def _preset(cfg: KVQuantConfig) -> dict[str, Any]:
    """What a layer's bytes follow from: a head's record grows evenly with head_dim."""
    sizes = [PageLayout(cfg, 1, dim).record_bytes for dim in range(16, 1025, 16)]
    slope, rest = divmod(sizes[1] - sizes[0], 16)
    offset = sizes[0] - 16 * slope
    if rest or any(size != slope * 16 * i + offset for i, size in enumerate(sizes, 1)):
        raise NotImplementedError(f"records of {cfg.name} do not grow evenly: bytes.js needs more")
    layout, wider = PageLayout(cfg, 1, 16), PageLayout(cfg, 1, 32)
    ring_slope = (wider.ring_bytes_per_token - layout.ring_bytes_per_token) / 16
    return {
        "key_bits": cfg.key_bits,
        "value_bits": cfg.value_bits,
        "page_size": cfg.page_size,
        "ring_tokens": layout.ring_tokens,
        "seal_lag": seal_lag(cfg),
        "sinks": cfg.sinks,
        "ring_slope": ring_slope,
        "ring_offset": layout.ring_bytes_per_token - 16 * ring_slope,
        "record_slope": slope,
        "record_offset": offset,
        "latent": _latent(cfg),
    }


def _latent(cfg: KVQuantConfig) -> dict[str, Any]:
    """The same of latents, whose bytes grow evenly with their rank; or why there are none."""
    try:
        latent_layout(cfg, RANKS[0], ROPE_DIMS[0])
    except ValueError as error:
        return {"refusal": str(error)}
    sizes = {
        (rank, rope): latent_layout(cfg, rank, rope).bytes_per_token - 2 * rope
        for rank in RANKS
        for rope in ROPE_DIMS
    }
    slope = (sizes[128, 64] - sizes[64, 64]) / 64
    offset = sizes[64, 64] - 64 * slope
    if any(size != slope * rank + offset for (rank, _), size in sizes.items()):
        raise NotImplementedError(f"latents of {cfg.name} do not grow evenly: bytes.js needs more")
    return {"refusal": None, "slope": slope, "offset": offset}
