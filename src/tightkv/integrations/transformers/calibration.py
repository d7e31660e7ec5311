"""The calibration that a config names, for a loaded model: found, checked and applied."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedModel

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Calibration, find_calibration, not_used
from tightkv.fit.fingerprint import model_fingerprint
from tightkv.integrations.transformers.per_model import MODEL_LOCK, PerModel
from tightkv.integrations.transformers.protect_keys import LoadedTensor
from tightkv.model_shape import read_model_shape

_warned = PerModel[set[str]](lambda model: set())


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


def _read_fingerprint(model: PreTrainedModel) -> str:
    tensors = {name: LoadedTensor(name, value) for name, value in model.named_parameters()}
    return model_fingerprint(read_model_shape(model.config), tensors)


loaded_fingerprint = PerModel(_read_fingerprint)
"""`model_fingerprint`, computed once."""


def _warn_once(model: PreTrainedModel, line: str) -> None:
    """Once for each model."""
    with MODEL_LOCK:
        said = _warned(model)
        first = line not in said
        said.add(line)
    if first:
        warnings.warn(line, CalibrationWarning, stacklevel=4)
