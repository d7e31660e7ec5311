"""PagedKV: the compressed pages, ring and sinks of one layer. Knows no model.

Tokens are appended, pages are sealed (when they leave the window, or as they complete:
`SequenceTable`), and `view()` is what attention reads. Appending t tokens costs O(t): no history is
encoded again but the page being sealed.
Rings grow with the sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tightkv.kernels import registry
from tightkv.kernels.backend import Backend
from tightkv.kernels.check import check_feedback, check_new_tokens, expect
from tightkv.kernels.cpu.decode import PreparedAttend, PreparedPut
from tightkv.kernels.reference import materialize
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView
from tightkv.math.feedback import QueryMetric
from tightkv.math.quantize import finite
from tightkv.paged.offload import DeviceBuffers, OffloadedPages, lasting
from tightkv.paged.sequences import AppendPlan, RowTensors, SequenceTable, common_length
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.pages.window import rotated


class PagedKV:
    """One layer's cache for the sequences of a table."""

    _put: PreparedPut | None = None
    _again: PreparedAttend | None = None
    _again_at = 0  # the table's changes then

    def __init__(
        self,
        layout: PageLayout,
        table: SequenceTable,
        device: torch.device | str = "cpu",
        kernels: str = "auto",
    ) -> None:
        wanted = layout.page_size, layout.cfg.sinks, layout.ring_tokens
        if (table.page_size, table.sinks, table.ring_tokens) != wanted:
            raise ValueError("the table was made for another page_size, exact_pages or sinks")
        self.layout, self.table, self.device = layout, table, torch.device(device)
        self.codec = Codec(layout)
        self._kernels = registry.select(kernels, self.device, layout).NAME
        self._pages = layout.new_pages(0, self.device)
        self._offloaded: OffloadedPages | None = None
        self._feedback: Tensor | None = None
        self.device = self._pages.device  # "cuda" has a number now
        self.ring_key, self.ring_value, self.ring_scales = layout.new_ring(0, 1, self.device)
        sinks = (0, 0, layout.num_kv_heads, layout.head_dim)
        self.sink_key, self.sink_value = (
            torch.zeros(sinks, dtype=layout.dtype, device=self.device) for _ in "kv"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle of before names a module of kernels (tightkv.kernels.cpu.backend)."""
        self.__dict__.update({"ring_scales": None, **state})
        kernels = self._kernels.removeprefix("tightkv.kernels.").removesuffix(".backend")
        self._kernels = kernels

    @property
    def kernels(self) -> Backend:
        """Whose append and attend this layer uses; kept by name, so caches can be copied."""
        return registry.load(self._kernels)

    @property
    def pages(self) -> Tensor:
        """uint8 [pages, Hkv, record_bytes] on the device; offloaded ones are brought there."""
        return self._pages if self._offloaded is None else self._offloaded.tensor()

    @pages.setter
    def pages(self, pages: Tensor) -> None:
        old, self._offloaded, self._pages = self._offloaded, None, pages
        if old is not None:
            self.offload(old.buffers)

    @property
    def feedback(self) -> Tensor | None:
        """The factors that code keys of future pages (`Codec.feedback_factors`), or None."""
        return self._feedback

    @feedback.setter
    def feedback(self, factors: Tensor | None) -> None:
        if factors is not None:
            check_feedback(self.layout, factors, self.device)
        self._feedback = factors

    def use_metric(self, metric: QueryMetric | None) -> None:
        """Code keys of future pages in the metric of the layer's queries, if they take one."""
        known = None if metric is None else self.codec.feedback_factors(metric, self.device)
        self.feedback = known

    @lasting
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKV:
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            shared = name == "_feedback"  # of the model, not of its tokens
            setattr(copied, name, value if shared else copy.deepcopy(value, memo))
        return copied

    # --- reading ---
    def view(self, rows: RowTensors | None = None, same_length: int | None = None) -> CacheView:
        """The tensors attention needs for every row of the table.

        `rows` (and `same_length`) describe this layer where the table has moved on before it.
        """
        self.fit_rows()
        self._fit_pages()
        plans = None
        if rows is None:
            rows, same_length = self.table.tensors(self.device), common_length(self.table.rows)
            plans = self.table.plans(self.device)
        exact = (self.ring_key, self.ring_value, self.sink_key, self.sink_value)
        coding: dict[str, Any] = {"feedback": self._feedback, "ring_scales": self.ring_scales}
        return CacheView(self.pages, *rows, *exact, same_length, plans=plans, **coding)

    def allocated_bytes(self) -> int:
        """Bytes of every tensor this layer holds, its share of the table's tensors included."""
        own = (self._pages, *(getattr(self, name) for name in self.exact_names))
        away = 0 if self._offloaded is None else self._offloaded.allocated_bytes()
        of_table = (*self.table.tensors(self.device), *self.table.plans(self.device).values())
        tensors = (*own, *of_table)
        return away + sum(t.numel() * t.element_size() for t in tensors)

    @property
    def exact_names(self) -> tuple[str, ...]:
        """The tensors of rings and sinks; their first dimension is rows."""
        scales = () if self.ring_scales is None else ("ring_scales",)
        return ("ring_key", "ring_value", "sink_key", "sink_value", *scales)

    def newest(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The last token of rows of these lengths [rows, 1, Hkv, D], as far as rings hold it."""
        self.fit_rows()
        row = torch.arange(len(lengths), device=self.device)
        last = torch.tensor(list(lengths), device=self.device) - 1
        at = row, last.clamp_min(0) % self.ring_key.shape[1]
        key, value = self.ring_key[at], self.ring_value[at]
        if self.ring_scales is not None:
            both = rotated(self.codec, key, value, self.ring_scales[at])
            sides = self.codec.key, self.codec.value
            key, value = (
                self.exact(side.rotation.inverse(y)) for side, y in zip(sides, both, strict=True)
            )
        return key[:, None], value[:, None]

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Every token's key and value [B, tokens, Hkv, D] as attention sees them.

        Padded on the right to the longest row with zeros.
        """
        return materialize(self.codec, self.view())

    # --- writing ---
    def append(self, plan: AppendPlan, key: Tensor, value: Tensor) -> None:
        """Write the tokens of a plan: key and value [len(plan.rows), T, Hkv, D], T >= counts.

        They are kept in the layout's dtype; numbers beyond its range become its largest.
        """
        if plan.ring_only and self._put_in_rings(plan, key, value):
            return
        self._check(plan, key, value)
        self._put = self._again = None
        self.fit_rows()
        self._fit_pages()
        kernels = self.kernels
        if plan.copies:
            source, target = torch.tensor(plan.copies, device=self.device).T
            self.pages[target] = self.pages[source]
        if self._offloaded is not None:
            self._offloaded.mark(self.table.written_pages(plan))
        if not any(plan.counts):
            return
        if self.layout.cfg.check_finite:  # kernels do not see tokens that go to the ring alone
            for x in (key, value):
                finite(_pack(x, plan.counts), check=True)
        if key.dtype != self.layout.dtype:
            key, value = self.exact(key), self.exact(value)
        whole = plan.counts == (key.shape[1],) * len(plan.rows)
        if not (kernels.TAKES.batches and whole):
            key, value = _pack(key, plan.counts), _pack(value, plan.counts)
        self._fit_exact(plan)
        view = self.view(self.table.tensors(self.device).pick(plan.rows))
        of_table = self.table.encode_partial_page, self.table.lag
        options = AppendOptions(*plan.tensors(self.device), max(plan.counts), *of_table)
        kernels.append(self.codec, view, key, value, options)

    def _put_in_rings(self, plan: AppendPlan, key: Tensor, value: Tensor) -> bool:
        """Carry out a `ring_only` plan on a CPU without torch; False if that is impossible."""
        put, ring, ring_value = self._put, self.ring_key, self.ring_value
        if put is None or not put.takes(plan.rows, ring, ring_value, key, value):
            self._check(plan, key, value)
            self._put = None
            cfg = self.layout.cfg
            if self._kernels != "cpu" or cfg.check_finite or key.shape[1] != 1:
                return False
            put = PreparedPut(self.layout, ring, ring_value, self.ring_scales, key, value)
            if not put.possible:
                return False
            self._put = put
        if put.ring_shape != (len(self.table), plan.ring_tokens):
            return False
        slots = [row * plan.ring_tokens + plan.held[row] % plan.ring_tokens for row in plan.rows]
        put(key, value, slots)
        return True

    def attend_again(
        self, query: Tensor, options: tuple[object, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Attend as last time, where nothing has changed but lengths and the query's numbers."""
        again = self._again
        if (
            again is None
            or self._again_at != self.table.changes
            or self._pages is not again.view.pages
            or self.ring_key is not again.view.ring_key
            or self.ring_value is not again.view.ring_value
            or self.sink_key is not again.view.sink_key
            or self.sink_value is not again.view.sink_value
            or not again.takes(query, options)
        ):
            return None
        return again(query, *self._moving)

    def attend_first(
        self, query: Tensor, view: CacheView, cu_seqlens: Tensor, options: AttendOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to the cache's own view on a CPU, and keep what `attend_again` needs."""
        prepared = PreparedAttend(self.codec, query, view, cu_seqlens, options)
        self._again = prepared if self._offloaded is None else None
        self._again_at = self.table.changes
        return prepared(query, *self._moving)

    @property
    def _moving(self) -> tuple[list[int], list[int]]:
        rows = self.table.rows
        return [row.length for row in rows], [row.ring_read_from for row in rows]

    @lasting
    def select(self, rows: Sequence[int]) -> None:
        """Follow `table.select(rows)`: move rings and sinks; pages stay where they are."""
        self._put = self._again = None
        self.fit_rows(max(rows, default=-1) + 1)
        index = torch.tensor(list(rows), device=self.device, dtype=torch.long)
        for name in self.exact_names:
            setattr(self, name, getattr(self, name).index_select(0, index))

    @lasting
    def reserve(self, pages: int) -> None:
        """Make the pool hold at least `pages` pages, once, instead of growing to it."""
        if pages <= self._num_pages:
            return
        if self._offloaded is not None:
            self._offloaded.grow(pages)
            return
        grown = self.layout.new_pages(pages, self.device)
        grown[: len(self._pages)] = self._pages
        self._pages = grown

    # --- offloading ---
    def offload(self, buffers: DeviceBuffers) -> None:
        """Keep the pages in host memory, except from each use to the next `release`.

        Rings and sinks stay on the device. Layers that share `buffers` share device memory.
        """
        if self._offloaded is None:
            pages, self._pages = self._pages, self.layout.new_pages(0, self.device)
            self._offloaded = OffloadedPages(self.layout, self.device, buffers)
            if len(pages):
                self._offloaded.grow(len(pages))
                self._offloaded.tensor().copy_(pages)
                self._offloaded.mark(range(len(pages)))
            self.release()

    def fetch(self) -> None:
        """Begin to bring offloaded pages to the device, ahead of their use."""
        if self._offloaded is not None:
            self._offloaded.fetch()

    def release(self) -> None:
        """Hand on the device memory of offloaded pages; the next use brings them back."""
        if self._offloaded is not None:
            self._offloaded.release()

    @property
    def _num_pages(self) -> int:
        return self._pages.shape[0] if self._offloaded is None else len(self._offloaded)

    def _check(self, plan: AppendPlan, key: Tensor, value: Tensor) -> None:
        heads, d = self.layout.num_kv_heads, self.layout.head_dim
        wanted = (len(plan.rows), "T", heads, d)
        expect("key", key, wanted, self.device)
        if (value.shape, value.dtype, value.device) != (key.shape, key.dtype, key.device):
            expect("value", value, wanted, self.device)
            check_new_tokens(self.layout, key, value)
        most = max(plan.counts, default=0)
        if key.shape[1] < most:
            raise ValueError(f"key and value {list(key.shape)} must hold {most} tokens")

    @lasting
    def fit_rows(self, rows: int = 0) -> None:
        """Give every row of the table, and at least `rows`, a ring and sinks."""
        missing = max(rows, len(self.table)) - self.ring_key.shape[0]
        if missing > 0:
            for name in self.exact_names:
                old = getattr(self, name)
                setattr(self, name, torch.cat([old, old.new_zeros(missing, *old.shape[1:])]))

    def exact(self, x: Tensor) -> Tensor:
        """Tokens in the dtype of exact copies; numbers beyond its range become its largest."""
        if x.dtype == self.layout.dtype:
            return x
        most = torch.finfo(self.layout.dtype).max
        if most < torch.finfo(x.dtype).max:
            x = x.clamp(-most, most)
        return x.to(self.layout.dtype)

    @lasting
    def _fit_exact(self, plan: AppendPlan) -> None:
        """Give rings and sinks the size that a plan wants; exact tokens move to their slots."""
        tokens = self.ring_key.shape[1]
        if tokens != plan.ring_tokens:
            row, slot = plan.ring_slots(tokens, self.device)
            for name in self.exact_names:
                if name.startswith("ring"):
                    setattr(self, name, getattr(self, name)[row, slot])
        if self.sink_key.shape[1] != plan.sinks:
            self.sink_key, self.sink_value = (
                x.new_zeros(len(x), plan.sinks, *x.shape[2:])
                for x in (self.sink_key, self.sink_value)
            )

    def _fit_pages(self) -> None:
        """Grow the pool by a share of it at least, so that decoding rarely copies it."""
        if self.table.num_pages > self._num_pages:
            wanted = max(self.table.num_pages, self._num_pages + self._num_pages // POOL_GROWTH)
            if self.table.max_pages is not None:
                wanted = min(wanted, self.table.max_pages)
            self.reserve(wanted)


POOL_GROWTH = 128  # a pool that is full grows by this part of it


def _pack(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The first counts[i] tokens of each row of [n, T, Hkv, D], one after another."""
    if counts == (x.shape[1],) * len(counts):
        return x.flatten(0, 1)
    return torch.cat([row[:count] for row, count in zip(x, counts, strict=True)])
