"""AttentionWeights: the tensors that make a model's queries and keys, under any of their names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tightkv.files.tensor_file import stored_tensors
from tightkv.model_shape.families import column
from tightkv.model_shape.shape import ModelShape

NOT_READABLE = (OSError, ValueError, TypeError, AttributeError, OverflowError)
"""What a config or a weight file may raise that is broken, or not understood."""

LANGUAGE_PARTS = ("model.language_model.", "language_model.model.", "thinker.model.", "model.", "")
"""Where a checkpoint keeps its language model; towers of images have layers of like names."""
_INPUT_NORMS = ("input_layernorm", "operator_norm")
_HEAD_NORMS = ("{}_norm", "{}_layernorm")
# What may stand in an attention block beside the two: it does not touch queries and keys.
_UNRELATED = ("v_proj", "o_proj", "out_proj", "dense", "v_norm", "rotary_emb", "sinks", "attn")
_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale")


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

    def rows(self, first: int, count: int) -> WeightTensor:
        """A part of its first dimension, unread."""

    def read(self, step: int = 1) -> Tensor:
        """Every `step`-th of its first dimension, from the first on."""


@dataclass(frozen=True)
class Projected:
    """A layer's queries or keys before RoPE, made of inputs of unit RMS."""

    name: str
    matrix: WeightTensor | None  # [heads * head_rows, hidden], unread; None where it is quantized
    dim: int
    head_rows: int  # dim, or twice that: each query has a gate after it
    bias: Tensor | None  # [heads * dim]
    norm: Tensor | None  # after the matrix: [dim] of each head, or [heads * dim] of all together
    gain: Tensor | None  # of the norm before the matrix; what it adds is `shift`
    shift: Tensor | None

    def gained(self, weight: Tensor) -> Tensor:
        """Rows of the matrix with the norm before it; ValueError where there is no norm at all."""
        if self.gain is None and self.norm is None:
            raise ValueError(f"its files have no norm before {self.name}")
        return weight if self.gain is None else weight * self.gain.to(weight)

    def constant(self, weight: Tensor, heads: slice = slice(None)) -> Tensor | None:
        """[heads, dim]: what every token has; `weight` [heads, dim, hidden] is that of `heads`."""
        bias = None if self.bias is None else self.bias.view(-1, self.dim)[heads].to(weight)
        if self.shift is None:
            return bias
        return weight @ self.shift.to(weight) + (0 if bias is None else bias)


class AttentionWeights:
    """What makes the queries and keys of the given layers; ValueError where that is unknown."""

    def __init__(
        self, shape: ModelShape, layers: list[int], tensors: Mapping[str, WeightTensor] | None
    ) -> None:
        """`tensors` are those of the model's folder unless given."""
        if tensors is None:
            if shape.folder is None:
                raise ValueError("it has no folder")
            tensors = stored_tensors(shape.folder)
            if not tensors:
                raise ValueError("its folder has no safetensors files")
        self.shape, self.layers = shape, layers
        self.one_more = float(shape.model_type in column("norm_adds_one"))  # 1 + weight
        self.interleaved = shape.model_type in column("interleaved_rope")  # pairs are neighbours
        names = [name for name in tensors if ".self_attn." in name or "norm" in name]
        first = f"layers.{layers[0]}.self_attn." if layers else ""
        found = (
            part for part in LANGUAGE_PARTS if any(name.startswith(part + first) for name in names)
        )
        self.part = next(found, "")
        self.tensors = {name: tensors[name] for name in names if name.startswith(self.part)}
        self._blocks: dict[str, list[str]] = {}  # names in an attention block, by its own
        for name in self.tensors:
            block, dot, rest = name.partition(".self_attn.")
            self._blocks.setdefault(block + dot, []).append(rest)
        if not (self.block(layers[0]) in self._blocks if layers else self.tensors):
            raise ValueError(f"its files have no tensors model.{first}*")

    def block(self, layer: int) -> str:
        return f"{self.part}layers.{layer}.self_attn."

    def refuse_unknown(self, layer: int) -> None:
        """A tensor that is not understood may change queries or keys."""
        block = self.block(layer)
        known = {"q_proj", "k_proj", "qkv_proj", *_UNRELATED, *_SCALES}
        norms = {f"{form.format(side)}.weight" for form in _HEAD_NORMS for side in "qk"}
        for rest in self._blocks.get(block, ()):
            if rest.split(".")[0] not in known and rest not in norms:
                raise ValueError(f"its tensor {block}{rest} is not understood")

    def inv_freq(self, layer: int) -> Tensor:
        """RoPE's angles per token; none in a layer without RoPE."""
        flags = self.shape.config.get("no_rope_layers")  # 1: this layer has RoPE
        turns = not isinstance(flags, list) or layer >= len(flags) or bool(flags[layer])
        if not turns or self.shape.model_type in column("no_rope"):
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return rope_frequencies(self.shape.config, self.shape.layers[layer].head_dim)

    def input_norm(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """What the norm before the projections multiplies by, and what it adds."""
        size = self.shape.hidden_size
        for norm in _INPUT_NORMS:
            name = f"{self.part}layers.{layer}.{norm}"
            if f"{name}.weight" in self.tensors:
                gain = self._vector(f"{name}.weight", size) + self.one_more
                return gain, self._bias(name, size)
        return None, None

    def head_norm(self, layer: int, side: str) -> Tensor | None:
        """Weight of a norm after a projection: [head_dim], or [heads * head_dim] of all heads."""
        heads, dim = self.sizes(layer, side)
        for form in _HEAD_NORMS:
            name = f"{self.block(layer)}{form.format(side)}.weight"
            if name in self.tensors:
                stored = self.tensors[name]
                if math.prod(stored.shape) not in (dim, heads * dim):
                    raise ValueError(f"{name} has the shape {list(stored.shape)}")
                return finite(stored.read().float().flatten() + self.one_more, name)
        return None

    def projection(self, layer: int, side: str) -> Projected:
        """`side` is q or k."""
        block, (heads, dim) = self.block(layer), self.sizes(layer, side)
        name, total, first = f"{block}{side}_proj", heads, 0
        if self._has(layer, "qkv_proj"):
            queries, keys = self.sizes(layer, "q")[0], self.sizes(layer, "k")[0]
            total, first = queries + 2 * keys, 0 if side == "q" else queries
            name = f"{block}qkv_proj"
        if not self._has(layer, name.removeprefix(block)):
            raise ValueError(f"its files have no tensor {name}.weight")
        bias = self._bias(name, total * dim)
        if bias is not None:
            bias = finite(bias[first * dim : (first + heads) * dim], name)
        gated = side == "q" and self.shape.model_type in column("gated_queries")
        rows = 2 * dim if gated else dim  # a gate of each head's output follows its queries
        matrix, stored = None, self.tensors.get(f"{name}.weight")
        if stored is not None and stored.is_float:
            if stored.shape != (total * rows, self.shape.hidden_size):
                raise ValueError(f"{stored.name} has the shape {list(stored.shape)}")
            matrix = stored.rows(first * rows, heads * rows)
        norm = self.head_norm(layer, side)
        return Projected(name, matrix, dim, rows, bias, norm, *self.input_norm(layer))

    def matrix_bytes(self, layer: int, *sides: str) -> int:
        names = (f"{self.block(layer)}{side}_proj.weight" for side in sides)
        return sum(self.tensors[name].bytes for name in names if name in self.tensors)

    def sizes(self, layer: int, side: str) -> tuple[int, int]:
        shape = self.shape.layers[layer]
        return self.shape.num_heads if side == "q" else shape.num_kv_heads, shape.head_dim

    def _has(self, layer: int, module: str) -> bool:
        names = self._blocks.get(self.block(layer), ())
        return any(name.startswith(module + ".") for name in names)

    def _bias(self, module: str, size: int) -> Tensor | None:
        name = f"{module}.bias"
        return self._vector(name, size) if name in self.tensors else None

    def _vector(self, name: str, size: int) -> Tensor:
        stored = self.tensors[name]
        if stored.shape != (size,):
            raise ValueError(f"{name} has the shape {list(stored.shape)} instead of [{size}]")
        return stored.read().float()


def finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")
    return tensor


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Angles per token of full-attention layers, unscaled.

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
    steps = torch.arange(0, turned, 2, dtype=torch.float64, device="cpu")
    return torch.pow(theta, -steps / max(1, turned))
