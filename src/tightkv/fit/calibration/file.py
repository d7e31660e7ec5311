"""A calibration as one small safetensors file, and the file that a config names.

Metrics are stored as their Cholesky factors, so that whatever a file says is the metric of some
queries.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tightkv.config import PRESETS, KVQuantConfig, unknown_name
from tightkv.files.atomic import whole_file
from tightkv.files.strict_json import Field, parse_json
from tightkv.files.tensor_file import checksum, read_file
from tightkv.fit.calibration.measured import Calibration, Costs, Measured
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric
from tightkv.model_shape import ModelShape

COST_BITS = (2, 3, 4, 8)
SUFFIX = ".safetensors"
AUTO = "auto"
"""As `calibration`: the bundled file of this very model, if there is one."""
BUNDLED_FOLDER = Path(__file__).with_name("bundled")
_VERSION = 2  # 1 had no centers
_ROOT, _CENTERS = "root", "centers"
_NAME = re.compile(f"({_ROOT}|{_CENTERS})[.](0|[1-9][0-9]{{0,3}})", re.ASCII)
_MOST_BYTES = 1 << 28
_MOST_HEADS, _MOST_DIM, _MOST_TEXT = 1024, 1024, 1 << 16
_LEAST_SHARE = 1e-4  # of the identity in a metric, so that it has a Cholesky factor


def save_calibration(found: Calibration, path: str | os.PathLike[str]) -> None:
    """One file, which appears whole or not at all."""
    from safetensors.torch import save

    tensors = {f"{_ROOT}.{n}": _root(metric.value) for n, metric in sorted(found.metrics.items())}
    for n, centers in sorted(found.centers.items()):
        tensors[f"{_CENTERS}.{n}"] = torch.stack([centers.key, centers.value]).bfloat16().cpu()
    header = {
        "format_version": _VERSION,
        "fingerprint": found.fingerprint,
        "layer_bits": dict(found.layer_bits),
        "costs": {str(n): _cost_lists(costs) for n, costs in sorted(found.costs.items())},
        "model": found.measured.model,
        "texts": [list(text) for text in found.measured.texts],
        "tokens": found.measured.tokens,
        "tightkv": found.measured.tightkv,
    }
    text = json.dumps(header, sort_keys=True)
    _parse(text, tensors, "it")  # nothing is written that could not be read
    with whole_file(path) as temporary:
        metadata = {"tightkv_calibration": text, "checksum": checksum(text, tensors)}
        temporary.write_bytes(save(tensors, metadata))


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Anything but a whole calibration of this version is a ValueError that says why."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"calibration file {os.fspath(path)!r} does not exist; make it: "
            f"tightkv calibrate MODEL -o {os.fspath(path)}"
        )
    state = os.stat(path)
    return _read(os.fspath(path), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _read(path: str, changed: int, size: int) -> Calibration:
    """Once for each state of a file: every cache asks again."""
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes; a calibration has at most {_MOST_BYTES}")
    metadata, tensors = read_file(path)
    if "tightkv_calibration" not in metadata:
        raise ValueError(f"{path} is no calibration; tightkv calibrate writes them")
    text = metadata["tightkv_calibration"]
    try:
        found = _parse(text, tensors, path)
    except ValueError as error:
        raise ValueError(f"{path} is no calibration that can be used: {error}") from None
    right = checksum(text, tensors)
    if metadata.get("checksum") != right:
        raise ValueError(f"{path} is damaged: its checksum does not match. Make it again")
    return replace(found, checksum=right)


# --- which one a config names ---
def load_calibration(source: str) -> Calibration:
    """A file, or a bundled one by its name."""
    if source.endswith(SUFFIX):
        return read_calibration(source)
    if source not in bundled_names():
        raise ValueError(
            unknown_name("calibration", source, (*bundled_names(), AUTO))
            + f"; or give a {SUFFIX} file that tightkv calibrate wrote"
        )
    return read_calibration(BUNDLED_FOLDER / f"{source}{SUFFIX}")


def bundled_names() -> list[str]:
    """The models whose calibrations come with the package."""
    return sorted(path.stem for path in BUNDLED_FOLDER.glob(f"*{SUFFIX}"))


def find_calibration(
    cfg: KVQuantConfig, name: str, identify: Callable[[], tuple[str, ModelShape]]
) -> Calibration | None:
    """The calibration of `cfg` for a model; another model's is refused.

    `identify` reads the model's fingerprint and shape. None where the config names no calibration,
    or "auto" finds none.
    """
    if not cfg.calibration:
        return None
    fingerprint, shape = identify()
    if cfg.calibration == AUTO:
        bundled = map(load_calibration, bundled_names())
        found = next((one for one in bundled if one.fingerprint == fingerprint), None)
    else:
        found = load_calibration(cfg.calibration)
    if found is not None:
        found.check_model(fingerprint, name, shape.full_layers())
    return found


# --- what is in a file ---
def _parse(text: str, tensors: Mapping[str, Tensor], source: str) -> Calibration:
    """Everything is checked: the author of a file writes its checksum too."""
    header = Field(parse_json(text), "")
    version = header.record_of_any().get("format_version", Field(None, "format_version"))
    if version.integer(0, 1 << 31) not in (1, _VERSION):
        raise ValueError(
            f"it has format version {version.value}; this tightkv reads versions 1 and {_VERSION}. "
            "Make it again with tightkv calibrate"
        )
    names = ("fingerprint", "layer_bits", "costs", "model", "texts", "tokens", "tightkv")
    fields = header.record("format_version", *names)
    metrics = _metrics(tensors)
    return Calibration(
        _short(fields["fingerprint"]),
        metrics,
        {
            name: _bits(name, bits, metrics)
            for name, bits in fields["layer_bits"].record_of_any().items()
        },
        _costs(fields["costs"].record(*map(str, metrics))),
        Measured(
            _short(fields["model"]),
            tuple(_text(entry) for entry in fields["texts"].items()),
            fields["tokens"].integer(1, 1 << 62),
            _short(fields["tightkv"]),
        ),
        _centers(tensors, metrics),
        source,
    )


def _costs(layers: Mapping[str, Field]) -> dict[int, Costs]:
    def by_bits(costs: Field) -> dict[int, float]:
        if len(costs.items()) != len(COST_BITS):
            raise costs.wrong(f"{len(COST_BITS)} numbers, for {COST_BITS} bits")
        kl = [cost.number(0, 1e9) for cost in costs.items()]
        return dict(zip(COST_BITS, kl, strict=True))

    found = {}
    for name, layer in layers.items():
        sides = layer.record("key", "value")
        found[int(name)] = Costs(by_bits(sides["key"]), by_bits(sides["value"]))
    return found


def _cost_lists(costs: Costs) -> dict[str, list[float]]:
    return {
        name: [float(f"{side[bits]:.4g}") for bits in COST_BITS]
        for name, side in (("key", costs.key), ("value", costs.value))
    }


def _bits(preset: str, bits: Field, metrics: Mapping[int, QueryMetric]) -> str:
    """Bits of layers that have metrics, as text that a config takes."""
    if preset not in PRESETS:
        raise ValueError(unknown_name("preset in layer_bits", preset[:99], PRESETS))
    text = _short(bits)
    cfg = KVQuantConfig(layer_bits=text)
    if unknown := sorted(set(cfg.bits_of_layers()) - set(metrics)):
        raise ValueError(f"{bits.where} names layer {unknown[0]}, of which it has no metric")
    return cfg.layer_bits


def _text(entry: Field) -> tuple[str, str]:
    name, digest = entry.items() if len(entry.items()) == 2 else (entry, entry)
    return _short(name), _short(digest)


def _short(field: Field) -> str:
    if len(field.text()) > _MOST_TEXT:
        raise field.wrong(f"at most {_MOST_TEXT} characters")
    return field.text()


# --- metrics and their factors ---
def _metrics(tensors: Mapping[str, Tensor]) -> dict[int, QueryMetric]:
    found = {n: QueryMetric(_metric(name, root)) for n, name, root in _numbered(tensors, _ROOT)}
    if not found:
        raise ValueError("it has no metrics")
    return dict(sorted(found.items()))


def _centers(
    tensors: Mapping[str, Tensor], metrics: Mapping[int, QueryMetric]
) -> dict[int, Centers]:
    """bfloat16 [2, Hkv, D]: of keys and of values; of layers that have a metric."""
    found = {}
    for n, name, both in _numbered(tensors, _CENTERS):
        if n not in metrics or both.shape != (2, *metrics[n].value.shape[:2]):
            raise ValueError(f"{name} has shape {list(both.shape)}, which its metric has not")
        if both.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {both.dtype}; allowed: bfloat16")
        found[n] = Centers(*both)
    return found


def _numbered(tensors: Mapping[str, Tensor], wanted: str) -> Iterator[tuple[int, str, Tensor]]:
    """Layer, name and tensor of those with the wanted name; unknown names are refused."""
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"it has a tensor {name[:99]!r}; allowed: {_ROOT}.LAYER and {_CENTERS}.LAYER"
            )
        if match[1] == wanted:
            yield int(match[2]), name, tensor


def _metric(name: str, root: Tensor) -> Tensor:
    """Cholesky factors [Hkv, D (D + 1) / 2], row by row -> metrics of mean diagonal 1."""
    heads, size = root.shape if root.dim() == 2 else (0, 0)
    dim = (math.isqrt(8 * size + 1) - 1) // 2
    if root.dtype != torch.float16 or not 1 <= heads <= _MOST_HEADS or not 1 <= dim <= _MOST_DIM:
        raise ValueError(f"{name} is {root.dtype} {list(root.shape)}; allowed: float16, KV heads")
    if dim * (dim + 1) // 2 != size:
        raise ValueError(f"{name} has {size} numbers per head; allowed: D * (D + 1) / 2")
    if not root.isfinite().all():
        raise ValueError(f"{name} has NaN or Inf")
    lower = torch.zeros(heads, dim, dim, dtype=torch.float32, device=root.device)
    rows, columns = torch.tril_indices(dim, dim, device="cpu")
    lower[:, rows, columns] = root.float()
    return _normalised(lower @ lower.mT)


def _root(metric: Tensor) -> Tensor:
    """What `_metric` reads."""
    dim = metric.shape[-1]
    whole = _normalised(metric.double().cpu())
    unit = torch.eye(dim, dtype=torch.float64, device="cpu")
    lower = torch.linalg.cholesky((1 - _LEAST_SHARE) * whole + _LEAST_SHARE * unit)
    rows, columns = torch.tril_indices(dim, dim, device="cpu")
    return lower[:, rows, columns].half().contiguous()


def _normalised(metric: Tensor) -> Tensor:
    """Mean diagonal 1; the identity for a head without queries."""
    size = metric.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    unit = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    return torch.where(size > 0, metric / torch.where(size > 0, size, 1.0), unit)
