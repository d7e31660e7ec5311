"""What was measured of a model: how its keys are coded, and bits of its layers."""

from tightkv.fit.calibration.file import SUFFIX, read_calibration, save_calibration
from tightkv.fit.calibration.find import (
    AUTO,
    bundled_names,
    find_calibration,
    find_for_folder,
    find_for_model,
    load_calibration,
    not_comparable,
    not_used,
    without_bits,
)
from tightkv.fit.calibration.measured import Calibration, Costs, Measured, own_heads

__all__ = [
    "AUTO",
    "SUFFIX",
    "Calibration",
    "Costs",
    "Measured",
    "bundled_names",
    "find_calibration",
    "find_for_folder",
    "find_for_model",
    "load_calibration",
    "not_comparable",
    "not_used",
    "own_heads",
    "read_calibration",
    "save_calibration",
    "without_bits",
]
