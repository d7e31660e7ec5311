"""What a model needs: bits of its layers, metrics of its queries, key scales and centers.

`fit` decides all of it.
"""

from tightkv.fit.checkpoint import Checkpoint
from tightkv.fit.decide import (
    Fit,
    FittedBits,
    Layer,
    LayerFit,
    Layers,
    Source,
    fit,
    fit_bits,
    refit,
)

__all__ = [
    "Checkpoint",
    "Fit",
    "FittedBits",
    "Layer",
    "LayerFit",
    "Layers",
    "Source",
    "fit",
    "fit_bits",
    "refit",
]
