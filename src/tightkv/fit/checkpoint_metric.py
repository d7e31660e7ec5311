"""The metrics of a model's queries (`query_metric`), from its folder or its weights.

And the energies of its keys' channels, in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tightkv.fit.attention_weights import (
    NOT_READABLE,
    AttentionWeights,
    WeightTensor,
    finite,
)
from tightkv.fit.key_noise import turned_energy
from tightkv.fit.query_metric import MeanRope, covariance, normed
from tightkv.model_shape.reader import read_model_shape

READ_BYTES = 3 << 29
"""Of larger query matrices only some heads of each group are read, one at least."""
LEAST_BITS = 3
"""Of keys that gain by this metric. Fewer need one of real queries (docs/log.md)."""

# Families whose queries are known to be what is computed here (tests compare them all).
KNOWN = (
    "arcee", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon_h1", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "helium", "lfm2", "llama",
    "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


@dataclass(frozen=True)
class ByLayer:
    """Float32 tensors by a layer's number in the model."""

    by_layer: dict[int, Tensor] = field(default_factory=dict)
    reason: str | None = None
    """Why there are no others, where there are not."""


def query_metrics(
    source: str | os.PathLike[str] | Any,
    layers: Collection[int] | None = None,
    *,
    tensors: Mapping[str, WeightTensor] | None = None,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | str = "cpu",
) -> ByLayer:
    """Metrics [KV heads, dim, dim] of a checkpoint's folder; or of a config, and weights by name.

    `layers` are all with full attention unless given. Of `ranks` tensor-parallel ranks, `rank`
    gets its own KV heads. Work is done on `device`, and the metrics are there.
    """
    return _each(lambda reader, n: reader.metric(n), source, layers, tensors, rank, ranks, device)


def key_energies(
    source: str | os.PathLike[str] | Any,
    layers: Collection[int],
    page_size: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | str = "cpu",
) -> dict[int, Tensor]:
    """[KV heads, dim] by layer: what page means leave of each channel; see `query_metrics`.

    Layers whose energies are not known are left out.
    """

    def energy(reader: _Reader, layer: int) -> Tensor:
        return reader.key_energy(layer, page_size)

    return _each(energy, source, layers, None, rank, ranks, device).by_layer


def _each(
    read: Callable[[_Reader, int], Tensor],
    source: str | os.PathLike[str] | Any,
    layers: Collection[int] | None,
    tensors: Mapping[str, WeightTensor] | None,
    rank: int,
    ranks: int,
    device: torch.device | str,
) -> ByLayer:
    found: dict[int, Tensor] = {}
    reason = None
    try:
        shape = read_model_shape(source)
        if shape.model_type not in KNOWN:
            raise ValueError(f"queries of model_type {shape.model_type!r} are not known")
        if layers is None:
            layers = shape.full_layers()
        reader = _Reader(AttentionWeights(shape, sorted(layers), tensors), rank, ranks, device)
    except NOT_READABLE as error:
        return ByLayer(reason=str(error))
    for layer in sorted(layers):
        try:
            found[layer] = read(reader, layer)
        except (*NOT_READABLE, IndexError) as error:
            reason = reason or f"layer {layer}: {error}"
    return ByLayer(found, reason)


class _Reader:
    def __init__(
        self, weights: AttentionWeights, rank: int, ranks: int, device: torch.device | str
    ) -> None:
        self.weights, self.rank, self.ranks, self.device = weights, rank, ranks, device
        total = sum(weights.matrix_bytes(layer, "q") for layer in weights.layers) / ranks
        self.share = min(1.0, READ_BYTES / max(1.0, total))
        self._ropes: dict[tuple[float, ...], MeanRope] = {}

    def metric(self, layer: int) -> Tensor:
        weights, shape = self.weights, self.weights.shape
        weights.refuse_unknown(layer)
        mine, kv_heads = shape.layers[layer].shard(self.ranks), shape.layers[layer].num_kv_heads
        group, rest = divmod(shape.num_heads, kv_heads)
        if rest:
            raise ValueError(f"{shape.num_heads} query heads for {kv_heads} KV heads")
        query = self._projected(layer, "q")
        first, count = self.rank * kv_heads // self.ranks, max(1, int(group * self.share))
        heads = range(first, first + mine.num_kv_heads)
        found = torch.stack([query.covariance(head * group, count) for head in heads])
        return finite(self._rope(layer)(found), f"the metric of layer {layer}")

    def key_energy(self, layer: int, page_size: int) -> Tensor:
        weights, kv_heads = self.weights, self.weights.shape.layers[layer].num_kv_heads
        weights.refuse_unknown(layer)
        mine = weights.shape.layers[layer].shard(self.ranks).num_kv_heads
        first = self.rank * kv_heads // self.ranks
        key, rope = self._projected(layer, "k"), self._rope(layer)
        still = key if key.norm is not None else replace(key, bias=None, shift=None)
        heads = range(first, first + mine)
        moving = torch.stack([still.covariance(head, 1) for head in heads])
        energy = rope(moving).diagonal(dim1=1, dim2=2).clamp_min(0).cpu()
        if still is not key and (constant := key.constant(first, mine)) is not None:
            inv_freq = weights.inv_freq(layer)
            turned = turned_energy(constant.cpu(), inv_freq, page_size, weights.interleaved) / 2
            pairs = turned.shape[1]
            both = turned.repeat_interleave(2, 1) if weights.interleaved else turned.repeat(1, 2)
            energy[:, : 2 * pairs] += both
        return finite(energy, f"the key energies of layer {layer}")

    def _projected(self, layer: int, what: str) -> _Projected:
        found, norm = self.weights.projection(layer, what), self.weights.head_norm(layer, what)
        gain, shift = self.weights.input_norm(layer)
        if found.matrix is None:
            raise ValueError(f"{found.name} is quantized")
        if gain is None and norm is None:
            raise ValueError(f"its files have no norm before {found.name}")
        dim = self.weights.shape.layers[layer].head_dim
        vectors = [v if v is None else v.to(self.device) for v in (found.bias, norm, gain, shift)]
        return _Projected(self.device, found.matrix, dim, found.head_rows, *vectors)

    def _rope(self, layer: int) -> MeanRope:
        inv_freq = self.weights.inv_freq(layer)
        dim = self.weights.shape.layers[layer].head_dim
        key = (dim, *inv_freq.tolist())
        if key not in self._ropes:
            self._ropes[key] = MeanRope(inv_freq, dim, self.weights.interleaved, self.device)
        return self._ropes[key]


@dataclass(frozen=True)
class _Projected:
    """A layer's queries or keys before RoPE; vectors are on `device`."""

    device: torch.device | str
    matrix: WeightTensor
    dim: int
    head_rows: int
    bias: Tensor | None
    norm: Tensor | None
    """[dim] of each head, or [heads * dim] of all together."""
    gain: Tensor | None
    """Of the norm before the matrix; what it adds is `shift`."""
    shift: Tensor | None

    def _weight(self, first: int, count: int) -> Tensor:
        rows = self.matrix.rows(first * self.head_rows, count * self.head_rows)
        weight = rows.read().to(self.device).float()
        return weight.view(count, self.head_rows, -1)[:, : self.dim]

    def constant(self, first: int, count: int, weight: Tensor | None = None) -> Tensor | None:
        """[count, dim]: what every token has."""
        bias = None if self.bias is None else self.bias.view(-1, self.dim)[first : first + count]
        if self.shift is not None:
            weight = self._weight(first, count) if weight is None else weight
            bias = weight @ self.shift + (0 if bias is None else bias)
        return bias

    def covariance(self, first: int, count: int) -> Tensor:
        """[dim, dim]: sum over `count` heads."""
        weight, heads = self._weight(first, count), slice(first, first + count)
        bias = self.constant(first, count, weight)
        found = covariance(weight if self.gain is None else weight * self.gain, bias)
        if self.norm is None:
            return found.sum(0)
        if self.norm.numel() == self.dim:
            own, found = self.norm[None], normed(found)
        else:
            own = self.norm.view(-1, self.dim)[heads]
        return (found * own[:, :, None] * own[:, None, :]).sum(0)
