"""What a model needs: bits of its layers, metrics of its queries, key scales and centers.

`fit` decides all of it.
"""

from tightkv.fit.checkpoint import Checkpoint
from tightkv.fit.decide import Fit, Layer, LayerFit, Layers, fit, fit_bits, refit
