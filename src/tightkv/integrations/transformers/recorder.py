"""recording(): every attention call of a model goes through an observer.

One implementation is registered with transformers for all who look at what attention is given:
the query probe, the sensitivity of layers (`eval.layer_bits.sensitivity`), and export.
PerModel: what is found out once for each model, whichever thread asks first.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tightkv.integrations.transformers.attention import (
    tightkv_attention,
    tightkv_mask,
    use_attention,
)

NAME = "tightkv_recorder"
T = TypeVar("T")
MODEL_LOCK = threading.RLock()
"""Held while a model is measured, since its attention is replaced meanwhile."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call, as transformers passes them."""

    module: torch.nn.Module
    query: Tensor  # [B, Hq, N, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]

    @property
    def layer(self) -> int | None:
        """Its number in the model, where the module has one."""
        return getattr(self.module, "layer_idx", None)

    def attend(self) -> Tensor:
        """The output [B, N, Hq, D] of the attention "tightkv"."""
        out, _ = tightkv_attention(
            self.module, self.query, self.key, self.value, self.mask, **self.options
        )
        return out


Observer = Callable[[AttentionCall], Tensor]
"""Returns the output [B, N, Hq, D] that the model goes on with."""

_observer: ContextVar[Observer] = ContextVar("observer", default=AttentionCall.attend)


def _recorded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    call = AttentionCall(module, query, key, value, attention_mask, options)
    return _observer.get()(call), None


AttentionInterface.register(NAME, _recorded_attention)
AttentionMaskInterface.register(NAME, tightkv_mask)


@contextmanager
def recording(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Inside, the model attends through `observer`; afterwards as before. One thread at a time."""
    token = _observer.set(observer)
    try:
        with MODEL_LOCK, use_attention(model, NAME):
            yield
    finally:
        _observer.reset(token)


class PerModel(Generic[T]):
    """`make(model)`, kept as long as the model."""

    def __init__(self, make: Callable[[PreTrainedModel], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[PreTrainedModel, T] = WeakKeyDictionary()

    def __call__(self, model: PreTrainedModel) -> T:
        if model not in self._made:  # else nobody waits for another model that is measured
            with MODEL_LOCK:
                if model not in self._made:
                    self._made[model] = self._make(model)
        return self._made[model]
