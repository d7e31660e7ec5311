"""CompressedStates: the keys or values of a layer, as a tensor that is not there yet."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class CompressedLayer(Protocol):
    """A cache layer that can give back all of its tokens."""

    length: int

    def materialize(self, step: StepStates) -> tuple[Tensor, Tensor]:
        """All keys and values [B, Hkv, tokens, D] as of a step, its own tokens exact."""


class StepStates:
    """What one `update` of a layer hands to attention: the layer and its new tokens."""

    def __init__(self, layer: CompressedLayer, new_key: Tensor, new_value: Tensor) -> None:
        self.layer, self.past = layer, layer.length
        self.new_key, self.new_value = new_key, new_value  # [B, Hkv, T, D]
        self._whole: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> tuple[CompressedStates, CompressedStates]:
        return CompressedStates(self, 0), CompressedStates(self, 1)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Every key and value [B, Hkv, tokens, D], the new ones exact."""
        if self._whole is None:
            if self.past:
                _warn_slow()
            self._whole = self.layer.materialize(self)
        return self._whole


class CompressedStates(Tensor):
    """Has the shape of all keys (or values) of a layer; dequantized only if some op reads it.

    The "tightkv" attention reads `step` instead and attends over the pages.
    """

    step: StepStates
    side: int

    @staticmethod
    def __new__(cls, step: StepStates, side: int) -> CompressedStates:
        new = step.new_key
        shape = (*new.shape[:2], step.past + new.shape[2], new.shape[3])
        self: CompressedStates = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=new.dtype, device=new.device
        )
        self.step, self.side = step, side
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CompressedStates(shape={tuple(self.shape)}, side={'kv'[self.side]})"

    def whole(self) -> Tensor:
        """Every key (or value) of the layer, the new ones exact."""
        return self.step.whole()[self.side]

    def is_pair_with(self, value: Tensor) -> bool:
        """Whether these are keys, and `value` the values of the same step."""
        return isinstance(value, CompressedStates) and value.step is self.step and value.side == 1

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(CompressedStates, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


@lru_cache(maxsize=1)
def _warn_slow() -> None:
    warnings.warn(
        "this model's attention reads the whole cache, so tightkv dequantizes it at every step; "
        'load the model with attn_implementation="tightkv" to attend over the compressed pages '
        "(models with attention code of their own always read the whole cache)",
        stacklevel=2,
    )
