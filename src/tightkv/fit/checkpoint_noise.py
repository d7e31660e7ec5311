"""What makes the scores of a model's layers (`key_noise`), from its folder or its weights.

Only what makes queries and keys is read: norms, biases, and matrices where they are no quantized
ones. Queries and keys under a norm of their own need no matrix at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from tightkv.fit.attention_weights import AttentionWeights, WeightTensor, finite
from tightkv.fit.key_noise import LayerScores, Vectors
from tightkv.model_shape.families import column
from tightkv.model_shape.shape import ModelShape

READ_BYTES = 3 << 29
"""Of larger matrices, every 2nd, 4th, ... row of each head is read: about a second's work."""
_FEWEST_ROWS = 8  # of a head
# Families whose scores are not scaled.
_SCALE_ONE = column("unscaled_scores")


def read_scores(
    shape: ModelShape,
    layers: Collection[int] | None = None,
    tensors: Mapping[str, WeightTensor] | None = None,
) -> dict[int, LayerScores]:
    """The scores of layers by number; ValueError or OSError where they are unknown.

    `layers` are all with full attention unless given, `tensors` those of the model's folder.
    """
    numbers = sorted(shape.full_layers() if layers is None else layers)
    weights = AttentionWeights(shape, numbers, tensors)
    total = sum(weights.matrix_bytes(layer, "q", "k", "qkv") for layer in numbers)
    step, dims = 1, math.gcd(*(shape.layers[i].head_dim for i in numbers))
    while total / step > READ_BYTES and dims % (2 * step * _FEWEST_ROWS) == 0:
        step *= 2
    found = {}
    for layer in numbers:
        weights.refuse_unknown(layer)
        query, key = (_vectors(weights, layer, side, step) for side in "qk")
        scale = score_scale(shape.config, shape.layers[layer].head_dim)
        inv_freq = weights.inv_freq(layer)
        found[layer] = LayerScores(query, key, inv_freq, scale, weights.interleaved)
    return found


def _vectors(weights: AttentionWeights, layer: int, side: str, step: int) -> Vectors:
    """Of a large matrix every `step`-th row is read."""
    heads, dim = weights.sizes(layer, side)
    none = torch.zeros(heads, dim, dtype=torch.float32, device="cpu")
    norm = weights.head_norm(layer, side)  # takes the size of a bias away
    if norm is not None:
        return Vectors(norm.cpu().square().view(-1, dim).sum(1).expand(heads), none)
    found = weights.projection(layer, side)
    if found.matrix is None:
        if found.bias is None:
            raise ValueError(f"{found.name} is quantized and has no bias")
        return Vectors(none[:, 0], found.bias.cpu().view(heads, dim))
    step = 1 if found.shift is not None else step
    weight = found.matrix.read(step).float().view(heads, dim // step, -1)
    constant = found.bias if step > 1 else found.constant(weight)
    energy = found.gained(weight).square().sum(2).mean(1) * dim
    return Vectors(
        finite(energy, found.name).cpu(),
        none if constant is None else finite(constant, found.name).cpu().view(heads, dim),
    )


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
