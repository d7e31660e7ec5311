"""OffloadedPages: one layer's pages in host memory, on the device only while they are used.

All copies run on one side stream per device, in order, so that two copies never meet in the same
memory. That stream waits for the caller's stream before it reads or overwrites what attention and
appends have used (`release`), and the caller's stream waits for a copy before it reads its result
(`tensor`). The host never waits. Devices other than CUDA copy synchronously.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import lru_cache, wraps
from itertools import groupby
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from tightkv.pages.layout import PageLayout

_KEPT_BUFFERS = 2  # for the layer that attends and the one that is fetched ahead of it
_P = ParamSpec("_P")
_T = TypeVar("_T")
_lock = threading.Lock()


def lasting(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method whose tensors can be written outside of torch.inference_mode(), too."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class DeviceBuffers:
    """Device memory that the layers of a cache take turns with."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @lasting
    def take(self, size: int, device: torch.device) -> Tensor:
        """A buffer, uint8 [>= size]. Other streams than the side stream must wait for that one."""
        mine = [buffer for buffer in self._free if buffer.device == device]
        fitting = [buffer for buffer in mine if buffer.numel() >= size]
        if fitting:
            self._free = [buffer for buffer in self._free if buffer is not fitting[0]]
            return fitting[0]
        # Too small ones go before a larger one is made. Room to grow saves copies later.
        self._free = [buffer for buffer in self._free if buffer.device != device]
        del mine
        buffer = torch.empty(size + size // 8, dtype=torch.uint8, device=device)
        if (stream := side_stream(device)) is not None:
            stream.wait_stream(torch.cuda.current_stream(device))  # its former user
            buffer.record_stream(stream)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer that the side stream may overwrite."""
        if sum(other.device == buffer.device for other in self._free) < _KEPT_BUFFERS:
            self._free.append(buffer)

    def clear(self) -> None:
        self._free = []

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceBuffers:
        return DeviceBuffers()


class OffloadedPages:
    """A pool of `len(self)` pages: `fetch` it ahead, use its `tensor`, `release` it."""

    def __init__(self, layout: PageLayout, device: torch.device, buffers: DeviceBuffers) -> None:
        """`device` has a number: cuda:0, not cuda."""
        self.layout, self.device, self.buffers = layout, device, buffers
        self._count = 0
        self._host: list[Tensor] = []  # uint8 [n, num_kv_heads, record_bytes] each, pinned for CUDA
        self._buffer: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None
        self._dirty: set[int] = set()  # pages that are newer in the buffer than in host memory

    def __len__(self) -> int:
        return self._count

    def fetch(self) -> None:
        """Begin to bring the pages to the device."""
        if self._buffer is not None or not self._count:
            return
        self._buffer = self.buffers.take(self._count * self.layout.page_bytes, self.device)
        pages, at = self._shaped(self._buffer), 0
        with self._side():
            for chunk in self._host:
                target = pages[at : at + len(chunk)]
                target.copy_(chunk[: len(target)], non_blocking=self._asynchronous)
                at += len(chunk)
            pages[at:].zero_()
            if self._asynchronous:
                self._arrival = torch.cuda.Event()
                self._arrival.record()

    def tensor(self) -> Tensor:
        """The pages on the device, for the current stream; `mark` those that are written."""
        self.fetch()
        if self._buffer is None:
            return self.layout.new_pages(0, self.device)
        if self._arrival is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._arrival)
            self._buffer.record_stream(stream)
        return self._shaped(self._buffer)

    def grow(self, count: int) -> None:
        """Make the pool hold `count` pages, on the device."""
        old, old_buffer, had = self.tensor(), self._buffer, self._count
        self._buffer = self.buffers.take(count * self.layout.page_bytes, self.device)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._count, self._arrival = count, None
        pages = self._shaped(self._buffer)
        pages[:had] = old
        pages[had:].zero_()
        if old_buffer is not None:
            self._wait_for_current()
            self.buffers.give(old_buffer)

    def mark(self, pages: Iterable[int]) -> None:
        """Note that these pages have been written on the device."""
        self._dirty.update(pages)

    def release(self) -> None:
        """Bring written pages to host memory and hand the device memory on."""
        if self._buffer is None:
            return
        buffer, pages = self._buffer, self._shaped(self._buffer)
        self._make_room(max(self._dirty, default=-1) + 1)
        self._wait_for_current()
        with self._side():
            for target, first in self._runs():
                target.copy_(pages[first : first + len(target)], non_blocking=self._asynchronous)
        self._buffer, self._arrival = None, None
        self._dirty.clear()
        self.buffers.give(buffer)

    def allocated_bytes(self) -> int:
        """Bytes of the pages in host memory; buffers belong to all layers together."""
        return sum(chunk.numel() for chunk in self._host)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedPages:
        self.release()
        if self._stream is not None:
            self._stream.synchronize()
        copy = OffloadedPages(
            deepcopy(self.layout, memo), self.device, deepcopy(self.buffers, memo)
        )
        copy._count = self._count
        copy._host = [copy._new_chunk(len(chunk)).copy_(chunk) for chunk in self._host]
        return copy

    # --- streams and memory ---
    @property
    def _stream(self) -> torch.cuda.Stream | None:
        return side_stream(self.device)

    @property
    def _asynchronous(self) -> bool:
        return self._stream is not None

    def _side(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait_for_current(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _shaped(self, buffer: Tensor) -> Tensor:
        shape = (self._count, self.layout.num_kv_heads, self.layout.record_bytes)
        return buffer[: self._count * self.layout.page_bytes].view(shape)

    @lasting
    def _new_chunk(self, count: int) -> Tensor:
        shape = (count, self.layout.num_kv_heads, self.layout.record_bytes)
        pinned = self.device.type == "cuda"
        return torch.zeros(shape, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def _make_room(self, count: int) -> None:
        """Grow host memory by a whole chunk, so that nothing in it ever moves."""
        have = sum(len(chunk) for chunk in self._host)
        if count > have:
            self._host.append(self._new_chunk(max(count - have, have // 8)))

    def _runs(self) -> Iterator[tuple[Tensor, int]]:
        """Written pages as runs of neighbours: their host memory, and the first page's number."""
        written, begin = sorted(self._dirty), 0
        for chunk in self._host:
            mine = [page for page in written if begin <= page < begin + len(chunk)]
            for _, run in groupby(enumerate(mine), lambda pair: pair[1] - pair[0]):
                pages = [page for _, page in run]
                yield chunk[pages[0] - begin : pages[-1] + 1 - begin], pages[0]
            begin += len(chunk)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of all copies from and to a device; None where copies are synchronous."""
    if device.type != "cuda":
        return None
    with _lock:  # two first callers must not get two streams
        return _stream(device)


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
