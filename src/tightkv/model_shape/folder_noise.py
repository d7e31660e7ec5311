"""The noise that coded keys would put into a model's scores, from its folder or its weights.

Only what makes queries and keys is read: norms, biases, and matrices where they are no quantized
ones. Queries and keys under a norm of their own need no matrix at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tightkv.model_shape.key_noise import Projection, score_noise
from tightkv.model_shape.reader import read_model_shape
from tightkv.model_shape.shape import ModelShape
from tightkv.model_shape.tensors import stored_tensors

READ_BYTES = 3 << 29
"""Of larger matrices, every 2nd, 4th, ... row of each head is read: about a second's work."""
_FEWEST_ROWS = 8  # of a head
NOT_READABLE = (OSError, ValueError, TypeError, AttributeError, OverflowError)
"""What a config or a weight file may raise that is broken, or not understood."""

LANGUAGE_PARTS = ("model.language_model.", "language_model.model.", "thinker.model.", "model.", "")
"""Where a checkpoint keeps its language model; towers of images have layers of like names."""
_INPUT_NORMS = ("input_layernorm", "operator_norm")
_HEAD_NORMS = ("{}_norm", "{}_layernorm")
# What may stand in an attention block beside the two: it does not touch queries and keys.
_UNRELATED = ("v_proj", "o_proj", "out_proj", "dense", "v_norm", "rotary_emb", "sinks", "attn")
_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale")

# Families whose norms multiply by 1 + weight.
_ONE_MORE = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "nemotron",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "vaultgemma",
)
# Families whose RoPE turns neighbouring channels.
_INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
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


def layer_noise_of_folder(
    folder: str | os.PathLike[str], page_size: int, layers: Collection[int] | None = None
) -> dict[int, float] | str:
    """The noise of each layer's worst head by the layer's number; a reason where it is unknown.

    `layers` are all with full attention unless given.
    """
    try:
        found = read_scores(read_model_shape(folder), layers)
        return {layer: scores.noise(page_size) for layer, scores in found.items()}
    except NOT_READABLE as error:
        return str(error)


class WeightTensor(Protocol):
    """A tensor of a model, in a file or in memory."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def is_float(self) -> bool:
        """Whether `read` can read it: it is there, and not quantized."""

    def read(self, step: int = 1) -> Tensor:
        """Every `step`-th of its first dimension, from the first on."""


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
    if tensors is None:
        if shape.folder is None:
            raise ValueError("it has no folder")
        tensors = stored_tensors(shape.folder)
        if not tensors:
            raise ValueError("its folder has no safetensors files")
    return _Reader(shape, tensors, sorted(layers)).read()


class _Reader:
    def __init__(
        self, shape: ModelShape, tensors: Mapping[str, WeightTensor], layers: list[int]
    ) -> None:
        self.shape, self.layers = shape, layers
        self.one_more = float(shape.model_type in _ONE_MORE)
        names = [name for name in tensors if ".self_attn." in name or "norm" in name]
        first = f"layers.{layers[0]}.self_attn." if layers else ""
        self.part = next(
            (p for p in LANGUAGE_PARTS if any(name.startswith(p + first) for name in names)), ""
        )
        self.tensors = {name: tensors[name] for name in names if name.startswith(self.part)}
        if not any(name.startswith(self.part + first) for name in names):
            raise ValueError(f"its files have no tensors model.{first}*")

    def read(self) -> dict[int, LayerScores]:
        step, total = 1, sum(map(self._matrix_bytes, self.layers))
        dims = math.gcd(*(self.shape.layers[i].head_dim for i in self.layers))
        while total / step > READ_BYTES and dims % (2 * step * _FEWEST_ROWS) == 0:
            step *= 2
        return {layer: self._layer(layer, step) for layer in self.layers}

    def _block(self, layer: int) -> str:
        return f"{self.part}layers.{layer}."

    def _matrix_bytes(self, layer: int) -> int:
        block = self._block(layer) + "self_attn."
        names = (f"{block}{side}_proj.weight" for side in ("q", "k", "qkv"))
        return sum(self.tensors[name].bytes for name in names if name in self.tensors)

    def _layer(self, layer: int, step: int) -> LayerScores:
        self._refuse_unknown(layer)
        dim, norm = self.shape.layers[layer].head_dim, self._input_norm(layer)
        config = self.shape.config
        flags = config.get("no_rope_layers")  # 1: this layer has RoPE
        turns = not isinstance(flags, list) or layer >= len(flags) or bool(flags[layer])
        return LayerScores(
            self._projection(layer, "q", norm, step),
            self._projection(layer, "k", norm, step),
            rope_frequencies(config, dim) if turns else torch.empty(0),
            score_scale(config, dim),
            self.shape.model_type in _INTERLEAVED,
        )

    def _refuse_unknown(self, layer: int) -> None:
        """A tensor that is not understood may change queries or keys."""
        block = self._block(layer) + "self_attn."
        known = {"q_proj", "k_proj", "qkv_proj", *_UNRELATED, *_SCALES}
        norms = {f"{form.format(side)}.weight" for form in _HEAD_NORMS for side in "qk"}
        for name in self.tensors:
            rest = name.removeprefix(block)
            if rest != name and rest.split(".")[0] not in known and rest not in norms:
                raise ValueError(f"its tensor {name} is not understood")

    def _input_norm(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """What the norm before the projections multiplies by, and what it adds."""
        size = self.shape.hidden_size
        for norm in _INPUT_NORMS:
            name = f"{self._block(layer)}{norm}"
            if f"{name}.weight" in self.tensors:
                gain = self._vector(f"{name}.weight", size) + self.one_more
                return gain, self._bias(name, size)
        return None, None

    def _projection(
        self, layer: int, side: str, norm: tuple[Tensor | None, Tensor | None], step: int
    ) -> Projection:
        block, shape = self._block(layer) + "self_attn.", self.shape.layers[layer]
        queries, keys, dim = self.shape.num_heads, shape.num_kv_heads, shape.head_dim
        heads = queries if side == "q" else keys
        for form in _HEAD_NORMS:
            name = f"{block}{form.format(side)}.weight"
            if name in self.tensors:
                return self._normed(name, heads, dim)
        name, total, first = f"{block}{side}_proj", heads, 0
        if self._has(f"{block}qkv_proj"):
            total, first = queries + 2 * keys, 0 if side == "q" else queries
            name = f"{block}qkv_proj"
        if not self._has(name):
            raise ValueError(f"its files have no tensor {name}.weight")
        bias = self._bias(name, total * dim)
        if bias is not None:
            bias = bias[first * dim : (first + heads) * dim]
        stored, (gain, shift) = self.tensors.get(f"{name}.weight"), norm
        if stored is None or not stored.is_float:
            if bias is None:
                raise ValueError(f"{name} is quantized and has no bias")
            return _finite(Projection(heads, dim, None, bias), name)
        if gain is None:
            raise ValueError(f"its files have no norm before {name}")
        if stored.shape != (total * dim, self.shape.hidden_size):
            raise ValueError(f"{stored.name} has the shape {list(stored.shape)}")
        step = 1 if shift is not None else step
        rows = dim // step
        weight = stored.read(step)[first * rows : (first + heads) * rows].float()
        if shift is not None:
            bias = weight @ shift + (0 if bias is None else bias)
        energy = (weight * gain).square().sum(1).view(heads, rows).mean(1)
        # A column with the energy of the matrix.
        column = energy.sqrt().repeat_interleave(dim)[:, None]
        return _finite(Projection(heads, dim, column, bias), name)

    def _normed(self, name: str, heads: int, dim: int) -> Projection:
        """Under a norm of its own: of each head, or of all heads with one weight a channel."""
        stored = self.tensors[name]
        if math.prod(stored.shape) not in (dim, heads * dim):
            raise ValueError(f"{name} has the shape {list(stored.shape)}")
        weight = stored.read().float().flatten() + self.one_more
        if weight.numel() == dim:
            return _finite(Projection(heads, dim, head_norm=weight), name)
        return _finite(Projection(heads, dim, weight[:, None]), name)

    def _has(self, module: str) -> bool:
        return any(name.startswith(module + ".") for name in self.tensors)

    def _bias(self, module: str, size: int) -> Tensor | None:
        name = f"{module}.bias"
        return self._vector(name, size) if name in self.tensors else None

    def _vector(self, name: str, size: int) -> Tensor:
        stored = self.tensors[name]
        if stored.shape != (size,):
            raise ValueError(f"{name} has the shape {list(stored.shape)} instead of [{size}]")
        return stored.read().float()


def _finite(projection: Projection, name: str) -> Projection:
    parts = (projection.weight, projection.bias, projection.head_norm)
    if not all(part is None or bool(part.isfinite().all()) for part in parts):
        raise ValueError(f"{name} has numbers that are not finite")
    return projection


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Angles a token of full-attention layers, unscaled.

    Scaling for long contexts slows pairs that hardly turn within a page, or all of them: what
    turns is overstated by leaving it out, never missed.
    """
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    own = rope.get("full_attention", rope)
    own = own if isinstance(own, Mapping) else {}

    def value(default: float, *names: str) -> float:
        for name in names:
            found = own.get(name, config.get(name))
            if isinstance(found, (int, float)) and found > 0:
                return float(found)
        return default

    theta = value(10000.0, "rope_theta", "rotary_emb_base")
    share = min(1.0, value(1.0, "partial_rotary_factor", "rotary_pct"))
    turned = int(head_dim * share) // 2 * 2
    steps = torch.arange(0, turned, 2, dtype=torch.float64)
    return torch.pow(theta, -steps / max(1, turned))


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
