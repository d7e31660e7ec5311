"""What was measured of a model: how its keys are coded, and bits of its layers."""

from tightkv.fit.calibration.file import SUFFIX, save_calibration
from tightkv.fit.calibration.find import (
    bundled_names,
    find_calibration,
    load_calibration,
    not_used,
    without_bits,
)
from tightkv.fit.calibration.measured import Calibration, Costs, Measured, own_heads
