"""GraphReplay: many small kernels on the same tensors, as one CUDA graph from the second time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger("vllm.tightkv")
T = TypeVar("T")
_MOST_KEPT = 128  # graphs; those not used longest go first


class GraphRecorder(Protocol):
    """Makes something that runs again out of what a function does."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]: ...

    def is_busy(self) -> bool:
        """Whether somebody else is recording at the moment."""


class CudaGraphRecorder:
    """CUDA graphs that share their temporary memory; they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = torch.cuda.graph_pool_handle()

    def is_busy(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Nothing is run yet, only recorded."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph.replay, result


class GraphReplay(Generic[T]):
    """A function of tensors whose work depends on their shapes alone, and that waits for nothing.

    Called again with tensors at the same addresses it is recorded, and replayed from then on.
    What it returns must live in memory that it was given.
    """

    def __init__(self, function: Callable[..., T], recorder: GraphRecorder | None) -> None:
        """Without a recorder the function is simply called."""
        self.function, self.recorder = function, recorder
        self.kept: OrderedDict[Any, tuple[Callable[[], None], T] | None] = OrderedDict()

    def __call__(self, *tensors: Tensor) -> T:
        if self.recorder is None or self.recorder.is_busy():
            return self.function(*tensors)
        key = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors)
        if key not in self.kept:
            self._remember(key)
            return self.function(*tensors)
        self.kept.move_to_end(key)
        recorded = self.kept[key] or self._record(self.recorder, tensors)
        if recorded is None:
            return self.function(*tensors)
        self.kept[key] = recorded
        replay, result = recorded
        replay()
        return result

    def _remember(self, key: Any) -> None:
        self.kept[key] = None
        if len(self.kept) > _MOST_KEPT:
            self.kept.popitem(last=False)

    def _record(
        self, recorder: GraphRecorder, tensors: tuple[Tensor, ...]
    ) -> tuple[Callable[[], None], T] | None:
        try:
            return recorder.record(lambda: self.function(*tensors))
        except RuntimeError as error:  # the device's own; the work can be done without a graph
            logger.warning("tightkv: no CUDA graph of its own bookkeeping: %s", error)
            self.recorder = None
            return None
