"""The calibration that a config names, for a loaded model: found, checked and applied."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from tightkv.calibration import Calibration, find_calibration, not_used
from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers.protect_keys import LoadedTensor
from tightkv.model_shape import read_model_shape
from tightkv.model_shape.fingerprint import model_fingerprint

_fingerprints: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
_warned: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


class CalibrationWarning(UserWarning):
    """A calibration does less than was asked; the message has the way out."""


def apply_calibration(cfg: KVQuantConfig, model: Any) -> tuple[KVQuantConfig, Calibration | None]:
    """`cfg` with the bits of its calibration, and that calibration; another model's is refused."""
    if not cfg.calibration:
        return cfg, None
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"calibration={cfg.calibration!r} needs the model, to check that it was "
            "measured on it: TightCache(quant, model=model)"
        )
    name, shape = model.name_or_path or type(model).__name__, read_model_shape(model.config)
    found = find_calibration(cfg.calibration, loaded_fingerprint(model))
    if line := not_used(cfg, found, name):
        _warn_once(model, line)
    if found is None:
        return cfg, None
    found.check_model(loaded_fingerprint(model), name, shape.full_layers())
    return found.applied(cfg), found


def loaded_fingerprint(model: PreTrainedModel) -> str:
    """`model_fingerprint`, computed once."""
    if model not in _fingerprints:
        tensors = {name: LoadedTensor(name, value) for name, value in model.named_parameters()}
        _fingerprints[model] = model_fingerprint(read_model_shape(model.config), tensors)
    return _fingerprints[model]


def _warn_once(model: PreTrainedModel, line: str) -> None:
    """Once for each model."""
    if line not in _warned.setdefault(model, set()):
        _warned[model].add(line)
        warnings.warn(line, CalibrationWarning, stacklevel=4)
