"""Recorder: the launches of `kernels.cuda` for each step of a static cache, and their operands."""

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tightkv.export.static_shape import RingParts, StaticShape, new_ring, ring_parts
from tightkv.kernels.cuda import backend
from tightkv.kernels.cuda.driver import Launch, recording
from tightkv.kernels.cuda.params import StepParams
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView
from tightkv.paged.sequences import RowTensors
from tightkv.pages.codec import Codec
from tightkv.pages.layout import RING_SLACK, page_layout, window_step

OPERANDS = (
    "query", "key", "value", "position", "left_pad", "feedback", "pages", "ring", "sinks",
    "state", "out", "refused",
)  # fmt: skip
# What a launch gets in place of recorded bytes: a number of the call, or an address.
COUNT, SCALE, _CONSTANT, _SCRATCH = 100, 101, 1_000, 2_000
# Kinds of programs.
APPEND, STEP, ATTEND_NEW = 0, 1, 2


@dataclass(frozen=True)
class Relocation:
    """Bytes of a launch's argument that each call sets."""

    argument: int
    at: int
    what: int
    offset: int = 0


@dataclass(frozen=True)
class Program:
    """The launches of one step. STEP has exactly `tokens` new tokens, APPEND at most as many.

    ATTEND_NEW has `tokens` queries of one row, over exact keys and values from the row's first
    token on: for a call's own tokens, where torch's attention cannot do it.
    """

    kind: int
    tokens: int
    scratch: list[int]  # bytes of each buffer
    launches: list[tuple[Launch, list[Relocation]]]


class Recorder:
    """Calls the kernels' wrappers with tensors that stand for the operands of a step."""

    def __init__(self, shape: StaticShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        layout, batch = shape.layout, shape.batch
        self.codec = Codec(layout)
        table = shape.block_table().to(device)
        rows = torch.arange(batch, dtype=torch.int32, device="cpu").to(device)
        self.table, self.rows = table, rows
        tables = [side.rotation.table(device) for side in (self.codec.key, self.codec.value)]
        self._constants = [table, rows, *tables]
        as_bytes = (x.cpu().contiguous().flatten().view(torch.uint8) for x in self._constants)
        self.constants = [bytes(x.tolist()) for x in as_bytes]
        heads, dim = layout.num_kv_heads, layout.head_dim
        self.operands = {
            "pages": layout.new_pages(1, device),  # its address and the size of a page count
            "ring": new_ring(layout, batch, device),
            "sinks": self._empty(2, batch, layout.cfg.sinks, heads, dim),
            "state": self._empty(batch, 5, dtype=torch.int64),
            "refused": self._empty(1, dtype=torch.int32),
            "left_pad": self._empty(batch, dtype=torch.int64),
        }
        if shape.feedback:
            self.operands["feedback"] = self._empty(heads, dim, dim, dtype=torch.float32)

    def program(self, kind: int, tokens: int) -> Program:
        shape, layout = self.shape, self.shape.layout
        rows = tokens if kind == ATTEND_NEW else shape.batch * tokens
        self.operands |= {
            "query": self._empty(rows, shape.query_heads, layout.head_dim),
            "out": self._empty(rows, shape.query_heads, layout.head_dim),
            "key": self._empty(rows, layout.num_kv_heads, layout.head_dim),
            "value": self._empty(rows, layout.num_kv_heads, layout.head_dim),
            "position": self._empty(tokens, dtype=torch.int64),
        }
        numbers = [self._empty(shape.batch, dtype=torch.int32) for _ in range(5)]
        numbers.append(self._empty(shape.batch + 1, dtype=torch.int32))
        with recording() as launches, _Allocations() as allocations:
            if kind == ATTEND_NEW:
                self._attend_new(numbers, tokens)
            else:
                self._step(numbers, tokens, kind == STEP)
        scratch = [*numbers, *allocations.made]
        sizes = [x.numel() * x.element_size() for x in scratch]
        places = _Places(self.operands, self._constants, scratch)
        recorded = [(launch, places.relocations(launch)) for launch in launches]
        return Program(kind, tokens, sizes, recorded)

    def _step(self, numbers: list[Tensor], tokens: int, attends: bool) -> None:
        """Record the counters, append and attend, in the order of a layer in vLLM."""
        shape, layout, x = self.shape, self.shape.layout, self.operands
        cfg, window = layout.cfg, shape.window if layout.ring_holds(shape.window) else None
        sizes = (cfg.exact_pages, layout.ring_tokens, cfg.sinks, RING_SLACK, window or 0)
        self._counters(numbers, tokens, shape.batch, (*sizes, window_step(cfg)))
        *_, ring_valid_from, cu_seqlens = numbers
        view = self._view(numbers, shape.batch, ring_parts(layout, x["ring"]))
        view = dataclasses.replace(view, overlaps_append=True, feedback=x.get("feedback"))
        options = AppendOptions(cu_seqlens, ring_valid_from, tokens, encode_partial_page=False)
        backend.append(self.codec, view, x["key"], x["value"], options)
        if attends:
            self._attend(self.codec, view, cu_seqlens, tokens)

    def _attend_new(self, numbers: list[Tensor], tokens: int) -> None:
        """Record attention over new tokens alone: they are the ring of a cache without pages."""
        shape, layout, x = self.shape, self.shape.layout, self.operands
        most = shape.max_tokens
        self._counters(numbers, tokens, 1, (most, most, 0, RING_SLACK, 0, layout.page_size))
        key, value = (x[name][:1].expand(1, most, -1, -1) for name in ("key", "value"))
        exact = page_layout(
            layout.cfg.replace(window_bits=16), layout.num_kv_heads, layout.head_dim, layout.dtype
        )
        self._attend(Codec(exact), self._view(numbers, 1, (key, value, None)), numbers[-1], tokens)

    def _counters(
        self, numbers: list[Tensor], tokens: int, batch: int, sizes: tuple[int, ...]
    ) -> None:
        shape, x = self.shape, self.operands
        pointers = (x["position"], x["left_pad"], x["state"], *numbers, x["refused"])
        addresses = [tensor.data_ptr() for tensor in pointers]
        layer = (batch, shape.max_tokens, shape.layout.page_size)
        backend.static_step(StepParams(*addresses, tokens, *layer, *sizes), self.device)

    def _view(self, numbers: list[Tensor], batch: int, ring: RingParts) -> CacheView:
        rows = RowTensors(*(x[:batch] for x in (self.table, *numbers[:4], self.rows)))
        sinks, (key, value, scales) = self.operands["sinks"], ring
        exact = key, value, sinks[0], sinks[1]
        return CacheView(self.operands["pages"], *rows, *exact, ring_scales=scales)

    def _attend(self, codec: Codec, view: CacheView, cu_seqlens: Tensor, tokens: int) -> None:
        shape, x = self.shape, self.operands
        options = AttendOptions(
            max_queries=tokens, window=shape.window, softcap=shape.softcap, out=x["out"]
        )
        backend.attend(codec, x["query"], view, cu_seqlens, options)

    def _empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.shape.layout.dtype, device=self.device)


class _Allocations(TorchFunctionMode):
    """The tensors made within."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like):
            self.made.append(result)
        return result


class _Places:
    """Which operand an address belongs to."""

    def __init__(
        self, operands: dict[str, Tensor], constants: list[Tensor], scratch: list[Tensor]
    ) -> None:
        known = [(OPERANDS.index(name), x) for name, x in operands.items()]
        known += [(_CONSTANT + i, x) for i, x in enumerate(constants)]
        known += [(_SCRATCH + i, x) for i, x in enumerate(scratch)]
        self.ranges = [
            (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), what)
            for what, x in known
            if x.numel()
        ]

    def relocations(self, launch: Launch) -> list[Relocation]:
        found = []
        for number, argument in enumerate(launch.args):
            if isinstance(argument, ctypes.Structure):
                fields = [
                    (name, kind, getattr(type(argument), name).offset, getattr(argument, name))
                    for name, kind, *_ in argument._fields_
                ]
            else:
                fields = [("", type(argument), 0, argument.value)]
            for name, kind, at, value in fields:
                if kind is ctypes.c_void_p and value:
                    found.append(Relocation(number, at, *self._find(value)))
                elif name == "count":
                    found.append(Relocation(number, at, COUNT))
                elif name == "scale":
                    found.append(Relocation(number, at, SCALE))
        return found

    def _find(self, address: int) -> tuple[int, int]:
        for start, end, what in self.ranges:
            if start <= address < end:
                return what, address - start
        raise RuntimeError("a kernel is given an address that is no operand's")
