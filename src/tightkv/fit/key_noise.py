"""How much noise coded keys would put into attention scores, from a layer's weights alone.

A code of b bits replaces a key's residual r (what its page's mean leaves) by r + e, where the
rotation makes e isotropic: E|e|^2 = D_b |r|^2. A score scale * q.k then has a noise of variance

    scale^2 * E|q|^2 * D_b * E|r|^2 / d.

Both energies follow from the weights, for inputs of unit RMS: E|W (g * x)|^2 = |W diag(g)|^2 in
the Frobenius norm, plus the bias. The mean of a page takes off what is constant in it: of a key
bias, the RoPE pairs that hardly turn within the page.

Only what makes queries and keys is read: norms, biases, and matrices where they are no quantized
ones. Queries and keys under a norm of their own need no matrix at all.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import BITS, KVQuantConfig
from tightkv.fit.attention_weights import AttentionWeights, WeightTensor, finite
from tightkv.math.codebook import get_codebook
from tightkv.model_shape.families import column
from tightkv.model_shape.shape import ModelShape

NOISE_LIMIT = 12.0
"""Variance of a score beyond which a layer's keys get more bits."""
READ_BYTES = 3 << 29
"""Of larger matrices, every 2nd, 4th, ... row of each head is read: about a second's work."""
_FEWEST_ROWS = 8  # of a head


class Vectors(NamedTuple):
    """A layer's queries or keys before RoPE."""

    energy: Tensor
    """[heads]: E|x|^2, less that of the constant. Zero where it is not known: a lower bound."""
    constant: Tensor  # [heads, dim]: what every token has


@dataclass(frozen=True)
class LayerScores:
    """What makes the scores of one layer: scale * q.k."""

    query: Vectors
    key: Vectors
    inv_freq: Tensor
    scale: float
    interleaved: bool = False

    def noise(self, page_size: int) -> Tensor:
        """[KV heads]: variance of a score for a code of distortion 1, mean of a group's queries."""
        kv_heads, dim = self.key.constant.shape
        if len(self.query.energy) % kv_heads:
            raise ValueError(
                f"{len(self.query.energy)} query heads do not share {kv_heads} KV heads evenly"
            )
        turned = turned_energy(self.key.constant, self.inv_freq, page_size, self.interleaved)
        queries = self.query.energy + self.query.constant.square().sum(1)
        grouped = queries.unflatten(0, (kv_heads, -1)).mean(1)
        return self.scale**2 / dim * grouped * (self.key.energy + turned.sum(1))

    def worst_noise(self, page_size: int) -> float:
        """That of the worst head; ValueError where weights make it no number."""
        heads = self.noise(page_size)
        if not heads.isfinite().all():
            raise ValueError("its weights are not finite, or too large")
        return float(heads.max())


def turned_share(inv_freq: Tensor, page_size: int) -> Tensor:
    """[pairs]: the share of a constant pair's energy that a page's mean leaves after RoPE.

    The mean of page_size unit vectors, each turned by w more, has the length
    |sin(page_size w / 2) / (page_size sin(w / 2))|.
    """
    steps = torch.arange(page_size, dtype=torch.float64, device="cpu")
    angles = steps[:, None] * inv_freq.double().cpu()
    mean = angles.cos().mean(0).square() + angles.sin().mean(0).square()
    return (1 - mean).clamp_min(0).float()


def turned_energy(
    bias: Tensor, inv_freq: Tensor, page_size: int, interleaved: bool = False
) -> Tensor:
    """[heads, pairs]: energy of a key bias [heads, head_dim] that page means leave.

    Pairs are (i, i + pairs), or (2i, 2i + 1) where interleaved; channels beyond the pairs do not
    turn.
    """
    pairs = inv_freq.numel()
    if 2 * pairs > bias.shape[-1]:
        raise ValueError(f"{pairs} RoPE pairs do not fit a head of {bias.shape[-1]} channels")
    squares = bias[..., : 2 * pairs].float().cpu().square()
    split = squares.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    energy = split.sum(-1 if interleaved else -2)
    return energy * turned_share(inv_freq, page_size)


def read_scores(
    shape: ModelShape,
    layers: Collection[int] | None = None,
    tensors: Mapping[str, WeightTensor] | None = None,
) -> dict[int, LayerScores]:
    """What makes the scores of layers; ValueError or OSError where it is unknown.

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

    if config.get("model_type") in column("unscaled_scores"):
        return 1.0
    scale = number("query_pre_attn_scalar", head_dim) ** -0.5
    scale = number("attention_multiplier", scale)
    return scale * number("key_multiplier", 1.0) * number("attention_in_multiplier", 1.0) ** 2


def needed_key_bits(cfg: KVQuantConfig, noise: float, limit: float = NOISE_LIMIT) -> int:
    """The fewest bits, no fewer than the config's, that keep a layer's score noise at the limit.

    `noise` is that of its worst head. Keys that no code keeps at it get 16.
    """
    if not noise >= 0:  # NaN too: broken weights must not pass for quiet ones
        raise ValueError(f"noise={noise}; a variance is a number of at least 0")
    for bits in BITS[:-1]:
        if bits >= cfg.key_bits and noise * get_codebook("fp8", bits).distortion <= limit:
            return bits
    return 16


def protected_layer_bits(cfg: KVQuantConfig, noise_by_layer: Mapping[int, float]) -> str:
    """The `layer_bits` of `cfg` and those that keys of noisy layers need.

    `noise_by_layer` has every compressed layer by its number in the model. A layer that `cfg`
    names keeps its bits; one whose keys no code holds stays uncompressed.
    """
    bits = dict(cfg.bits_of_layers())
    for index, layer in enumerate(sorted(noise_by_layer)):
        own = cfg.for_layer(index, len(noise_by_layer), layer)
        needed = needed_key_bits(own, noise_by_layer[layer])
        if layer not in bits and needed > own.key_bits:
            bits[layer] = needed, 16 if needed == 16 else own.value_bits
    text = ",".join(f"{layer}=k{key}v{value}" for layer, (key, value) in bits.items())
    return cfg.replace(layer_bits=text).layer_bits
