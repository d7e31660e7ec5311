"""What was measured of a model: how its keys are coded, and bits of its layers."""

from tightkv.fit.calibration.file import (
    SUFFIX,
    bundled_names,
    find_calibration,
    load_calibration,
    save_calibration,
)
from tightkv.fit.calibration.measured import Calibration, Costs, Measured, own_heads
