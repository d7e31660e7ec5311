"""What was measured of a model: how its keys are coded, and bits of its layers."""

from tightkv.calibration.file import SUFFIX, read_calibration, save_calibration
from tightkv.calibration.find import (
    AUTO,
    find_calibration,
    find_for_folder,
    load_calibration,
    not_used,
    ready_names,
)
from tightkv.calibration.measured import Calibration, Costs, Measured

__all__ = [
    "AUTO",
    "SUFFIX",
    "Calibration",
    "Costs",
    "Measured",
    "find_calibration",
    "find_for_folder",
    "load_calibration",
    "not_used",
    "read_calibration",
    "ready_names",
    "save_calibration",
]
