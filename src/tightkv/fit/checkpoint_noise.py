"""The noise that coded keys would put into a model's scores, from its folder or its weights.

Only what makes queries and keys is read: norms, biases, and matrices where they are no quantized
ones. Queries and keys under a norm of their own need no matrix at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tightkv.fit.attention_weights import (
    AttentionWeights,
    WeightTensor,
    finite,
)
from tightkv.fit.key_noise import Projection, score_noise
from tightkv.model_shape.shape import ModelShape

READ_BYTES = 3 << 29
"""Of larger matrices, every 2nd, 4th, ... row of each head is read: about a second's work."""
_FEWEST_ROWS = 8  # of a head
# Families whose scores are not scaled.
_SCALE_ONE = ("gemma3n_text", "gemma4_text")


@dataclass(frozen=True)
class LayerScores:
    """What makes the scores of one layer."""

    query: Projection
    key: Projection
    inv_freq: Tensor
    scale: float
    interleaved: bool

    def noise(self, page_size: int) -> float:
        """`score_noise` of the worst head; ValueError where weights make it no number."""
        heads = score_noise(
            self.query, self.key, None, self.inv_freq, page_size, self.scale, self.interleaved
        )
        if not heads.isfinite().all():
            raise ValueError("its weights are not finite, or too large")
        return float(heads.max())


def read_scores(
    shape: ModelShape,
    layers: Collection[int] | None = None,
    tensors: Mapping[str, WeightTensor] | None = None,
) -> dict[int, LayerScores]:
    """What makes the scores of a model's layers; ValueError or OSError where that is unknown.

    `tensors` are those of its folder unless given.
    """
    if layers is None:
        layers = [i for i, layer in enumerate(shape.layers) if layer.kind == "full"]
    weights = AttentionWeights(shape, sorted(layers), tensors)
    total = sum(weights.matrix_bytes(layer, "q", "k", "qkv") for layer in layers)
    step, dims = 1, math.gcd(*(shape.layers[i].head_dim for i in layers))
    while total / step > READ_BYTES and dims % (2 * step * _FEWEST_ROWS) == 0:
        step *= 2
    return {layer: _layer(weights, layer, step) for layer in sorted(layers)}


def _layer(weights: AttentionWeights, layer: int, step: int) -> LayerScores:
    weights.refuse_unknown(layer)
    norm = weights.input_norm(layer)
    return LayerScores(
        _projection(weights, layer, "q", norm, step),
        _projection(weights, layer, "k", norm, step),
        weights.inv_freq(layer),
        score_scale(weights.shape.config, weights.shape.layers[layer].head_dim),
        weights.interleaved,
    )


def _projection(
    weights: AttentionWeights,
    layer: int,
    side: str,
    norm: tuple[Tensor | None, Tensor | None],
    step: int,
) -> Projection:
    shape = weights.shape.layers[layer]
    heads, dim = weights.shape.num_heads if side == "q" else shape.num_kv_heads, shape.head_dim
    own = weights.head_norm(layer, side)
    if own is not None and own.numel() == dim:
        return Projection(heads, dim, head_norm=own)
    if own is not None:  # of all heads
        return Projection(heads, dim, own[:, None])
    found, (gain, shift) = weights.projection(layer, side), norm
    bias, name = found.bias, found.name
    if found.matrix is None:
        if bias is None:
            raise ValueError(f"{name} is quantized and has no bias")
        return Projection(heads, dim, None, bias)
    if gain is None:
        raise ValueError(f"its files have no norm before {name}")
    step = 1 if shift is not None else step
    weight = found.matrix.read(step).float()
    if shift is not None:
        bias = finite(weight @ shift + (0 if bias is None else bias), name)
    energy = (weight * gain).square().sum(1).view(heads, dim // step).mean(1)
    # A column with the energy of the matrix.
    return Projection(heads, dim, finite(energy.sqrt(), name).repeat_interleave(dim)[:, None], bias)


def score_scale(config: Mapping[str, Any], head_dim: int) -> float:
    """What scores q.k are multiplied by; factors on keys and inputs included."""

    def number(name: str, default: float) -> float:
        found = config.get(name)
        return float(found) if isinstance(found, (int, float)) and found > 0 else default

    if config.get("model_type") in _SCALE_ONE:
        return 1.0
    scale = number("query_pre_attn_scalar", head_dim) ** -0.5
    scale = number("attention_multiplier", scale)
    return scale * number("key_multiplier", 1.0) * number("attention_in_multiplier", 1.0) ** 2
