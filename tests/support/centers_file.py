"""A calibration with centers far from what tokens are, for engines that read one."""

from __future__ import annotations

from pathlib import Path

import torch

from tightkv.fit.calibration import Calibration, Costs, Measured, save_calibration
from tightkv.fit.calibration.file import COST_BITS
from tightkv.fit.fingerprint import folder_fingerprint
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric
from tightkv.model_shape import read_model_shape


def write_centers(model: Path, path: Path) -> None:
    """A calibration that says nothing else."""
    make = torch.Generator().manual_seed(0)
    layers = read_model_shape(model).full_layers()
    centers = {n: Centers(*(2 * torch.randn(2, *layers[n], generator=make))) for n in layers}
    metrics = {n: QueryMetric(torch.eye(d).expand(h, d, d)) for n, (h, d) in layers.items()}
    free = Costs(*(dict.fromkeys(COST_BITS, 0.0) for _ in "kv"))
    costs, measured = dict.fromkeys(layers, free), Measured("tiny", (("text", "0" * 64),), 1, "0")
    calibration = Calibration(folder_fingerprint(model), metrics, {}, costs, measured, centers)
    save_calibration(calibration, path)
