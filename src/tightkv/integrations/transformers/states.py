"""CompressedStates: the keys or values of a layer, as a tensor that is made when it is read."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from tightkv.integrations.transformers.layer import TightLayer

_NO_GRADIENT = (
    "attention over a TightCache that holds tokens has no gradient; train without a cache "
    "(use_cache=False) or with DynamicCache"
)


class StepStates:
    """What one `update` of a layer hands to attention: the layer and its new tokens."""

    def __init__(self, layer: TightLayer, new_key: Tensor, new_value: Tensor) -> None:
        self.layer, self.past = layer, layer.length
        self.new_key, self.new_value = new_key, new_value  # [B, Hkv, T, D]
        self._whole: tuple[Tensor, Tensor] | None = None

    def tensors(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens, read lazily. `key` and `value` are the new ones as the model gave them."""
        if not needs_gradient(key, value):
            return CompressedStates(self, 0), CompressedStates(self, 1)
        shown: tuple[Tensor, Tensor] = _WithGradient.apply(key, value, self)
        return shown

    def without_gradient(self, out: Tensor, query: Tensor) -> Tensor:
        """`out`, whose gradient is an error: it would lack that of tokens in the cache."""
        if not needs_gradient(query, self.new_key, self.new_value):
            return out
        marked: Tensor = _WithoutGradient.apply(out, query, self.new_key, self.new_value)
        return marked

    def whole(self) -> tuple[Tensor, Tensor]:
        """Every key and value [B, Hkv, tokens, D], the new ones exact."""
        if self._whole is None:
            if self.past:
                _warn_slow()
            self._whole = self.layer.materialize(self)
        return self._whole


class CompressedStates(Tensor):
    """A tensor with the shape of all keys (or values) of a layer, dequantized if an op reads it.

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


def needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _WithGradient(torch.autograd.Function):
    """New tokens -> all tokens: the gradient of a first step is that of its tokens."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, step: StepStates) -> tuple[Tensor, Tensor]:
        ctx.past = step.past
        return CompressedStates(step, 0), CompressedStates(step, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.past:
            raise RuntimeError(_NO_GRADIENT)
        return (*gradients, None)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError(_NO_GRADIENT)


@lru_cache(maxsize=1)
def _warn_slow() -> None:
    warnings.warn(
        "this model's attention reads the whole cache, so tightkv dequantizes it at every step; "
        'load the model with attn_implementation="tightkv" to attend over the compressed pages '
        "(models with attention code of their own always read the whole cache)",
        stacklevel=2,
    )
