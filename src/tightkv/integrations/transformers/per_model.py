"""PerModel: what is computed once for each model, whichever thread asks first."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

T = TypeVar("T")
MODEL_LOCK = threading.RLock()
"""Held while a model is measured, since its attention is replaced meanwhile."""


class PerModel(Generic[T]):
    """`make(model)`, kept as long as the model."""

    def __init__(self, make: Callable[[PreTrainedModel], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[PreTrainedModel, T] = WeakKeyDictionary()

    def __call__(self, model: PreTrainedModel) -> T:
        found = self._made.get(model)
        if found is None:
            with MODEL_LOCK:
                found = self._made.get(model)
                if found is None:
                    found = self._made[model] = self._make(model)
        return found
