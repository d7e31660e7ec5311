"""Kernels are compiled while vLLM starts: every kind of part is run, serving asks for no more."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tightkv import KVQuantConfig
from tightkv.integrations.vllm.step import batch_split
from tightkv.integrations.vllm.step import warm_up as module
from tightkv.integrations.vllm.step.batch_split import split_batch
from tightkv.integrations.vllm.step.layer_step import LayerStep
from tightkv.integrations.vllm.step.metadata import make_part
from tightkv.integrations.vllm.step.ring_table import BatchRings, RingTable
from tightkv.integrations.vllm.step.warm_up import (
    Kinds,
    kinds_of_parts,
    sizes,
    warm_up,
    warm_up_once,
)
from tightkv.kernels import prefill, reference, sdpa
from tightkv.kernels.backend import Backend, Takes
from tightkv.kernels.cpu import backend as cpu
from tightkv.kernels.prefill import CHUNK_TOKENS, MIN_QUERIES
from tightkv.kernels.view import AttendOptions
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

HEADS, DIM = 2, 64
CFG = KVQuantConfig(page_size=32, exact_pages=1, sinks=2, window_bits=16)


def make_rings(layout: PageLayout, rows: int) -> tuple[Tensor, ...]:
    counts = (layout.ring_tokens,) * 2 + (layout.cfg.sinks,) * 2
    shape = (layout.num_kv_heads, layout.head_dim)
    return tuple(torch.ones(rows + 1, n, *shape, dtype=layout.dtype) for n in counts)


def make_step(kernels: Any, dtype: torch.dtype = torch.float32) -> LayerStep:
    return LayerStep(kernels, Codec(PageLayout(CFG, HEADS, DIM, dtype)), 0.125, None)


class Watched:
    """Kernels that tell how they were called, and what came out."""

    NAME, TAKES = "watched", Takes()

    def __init__(self, kernels: Backend) -> None:
        self.kernels = kernels
        self.appended: list[int] = []
        self.attended: list[tuple[int, bool, int | None]] = []
        self.batches: set[int] = set()
        self.finite = True
        self.feedback: list[Tensor | None] = []

    def append(self, *args: Any) -> None:
        self.feedback.append(args[1].feedback)
        self.appended.append(args[-1].max_new)
        self.kernels.append(*args)

    def attend(self, *args: Any) -> tuple[Tensor, Tensor]:
        options: AttendOptions = args[-1]
        new = options.new_key is not None
        self.attended.append((options.max_queries, new, args[2].same_length))
        self.batches.add(args[2].batch)
        found: tuple[Tensor, Tensor] = self.kernels.attend(*args)
        self.finite &= bool(torch.isfinite(found[0]).all() and torch.isfinite(found[1]).all())
        return found


# --- the plan ---
def test_sizes_are_on_both_sides_of_every_doubling() -> None:
    assert sizes(1, 1) == [1]
    assert sizes(1, 16) == [1, 2, 3, 4, 5, 8, 9, 16]
    assert sizes(17, 255) == [17, 32, 33, 64, 65, 128, 129, 255]
    assert sizes(1, 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
def test_every_kind_of_part_is_run(kernels: Backend) -> None:
    reason = None if kernels is reference else cpu.unavailable("cpu")
    if reason:
        pytest.skip(reason)
    watched = Watched(kernels)
    step = make_step(watched)
    rings = make_rings(step.codec.layout, rows=3)
    feedback = torch.eye(DIM).repeat(HEADS, 1, 1)
    warm_up(step, rings, 4, Kinds(4, 5, 3), feedback)
    assert watched.finite and watched.batches == {1, 3}
    assert watched.feedback and all(given is feedback for given in watched.feedback)
    assert watched.appended == [count for count, _, _ in watched.attended]
    decoded = [count for count, new, _ in watched.attended if not new]
    short = [count for count, new, length in watched.attended if new and length is None]
    long = [(count, length) for count, new, length in watched.attended if length is not None]
    assert decoded == [1, *sizes(1, 4)] and short == sizes(5, MIN_QUERIES - 1)
    assert [length for _, length in long] == [32, CHUNK_TOKENS + 3 * 512 + 16]
    assert all(count >= MIN_QUERIES for count, _ in long)
    # No sequence's ring is touched.
    assert all(bool((ring[:3] == 1).all()) for ring in rings)
    assert not bool((rings[0][3] == 1).all())


def test_parts_are_what_the_kernels_may_be_given() -> None:
    layout = PageLayout(CFG, HEADS, DIM)
    for part in kinds_of_parts(layout, make_rings(layout, 3), Kinds(33, 2)):
        rows = BatchRings(*(int(column) for column in part.rows))
        assert rows.lengths - rows.before == part.max_query_len == part.tokens.stop
        assert part.query_start_loc.tolist() == [0, part.max_query_len] and rows.ring_rows == 3
        assert part.block_table.shape[1] * layout.page_size >= rows.lengths
        # The ring holds what is read from it.
        assert rows.lengths - layout.ring_tokens <= rows.ring_read_from <= rows.lengths
        assert rows.before <= rows.ring_read_from and rows.context_ring_read_from == rows.before
        assert part.context_len in (None, rows.before)


# --- once ---
def counting(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[int]:
    calls: list[int] = []

    def run(*_: Any) -> None:
        calls.append(1)
        if error is not None:
            raise error

    monkeypatch.setattr(module, "warm_up", run)
    monkeypatch.setattr(module, "_WARM", set())
    return calls


def test_sinks_are_copied_between_rows_before_anything_is_appended() -> None:
    """Row 1 gives its sinks to row 0 and gets a new sequence's in the same step."""
    step = make_step(reference)
    layout = step.codec.layout
    rings = make_rings(layout, 2)
    for n, ring in enumerate(rings):
        ring += torch.arange(3.0)[:, None, None, None] + n
    old = [ring.clone() for ring in rings]
    part = next(p for p in kinds_of_parts(layout, rings, Kinds(1, 2)) if not p.is_prefill)
    zero = torch.zeros_like(part.rows.before)
    rows = part.rows._replace(
        lengths=zero + 1, before=zero, ring_rows=zero + 1, ring_valid_from=zero
    )
    part = dataclasses.replace(part, rows=rows)
    query, key, value = (torch.full((1, HEADS, DIM), x) for x in (0.5, -7.0, -8.0))
    inherited = (torch.tensor([0, 1]), torch.tensor([1, 1]))
    pages, output = layout.new_pages(1, "cpu"), torch.empty_like(query)
    step.run([part], pages, rings, query, key, value, output, inherited)
    for sinks, before, new in ((rings[2], old[2], key), (rings[3], old[3], value)):
        assert torch.equal(sinks[0], before[1])
        assert torch.equal(sinks[1, 0], new[0]) and torch.equal(sinks[1, 1:], before[1, 1:])
    assert torch.equal(rings[0][0], old[0][0])  # rings are nobody's to inherit


def test_only_attention_right_after_its_append_may_begin_before_it_ends() -> None:
    """With two parts another append or attention lies in between."""
    hints: list[bool] = []

    class Hints(Watched):
        def attend(self, *args: Any) -> tuple[Tensor, Tensor]:
            hints.append(args[2].overlaps_append)
            return super().attend(*args)

    step = make_step(Hints(reference))
    layout = step.codec.layout
    rings = make_rings(layout, 2)
    part = next(p for p in kinds_of_parts(layout, rings, Kinds(1, 2)) if not p.is_prefill)
    pages = layout.new_pages(int(part.block_table.max()) + 1, "cpu")
    query, key, value = (torch.ones(part.max_query_len, HEADS, DIM) for _ in range(3))
    for parts in ([part], [part, part]):
        step.run(parts, pages, rings, query, key, value, torch.empty_like(query))
    assert hints == [True, False, False]


def test_layers_that_are_alike_are_warmed_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = counting(monkeypatch)
    step = make_step(reference)
    rings = make_rings(step.codec.layout, 0)
    alike = LayerStep(reference, Codec(step.codec.layout), 0.5, None)
    # vLLM, once it runs, keeps its loggers' lines to itself.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", logger="vllm.tightkv"):
        for layer in (step, alike, step):
            warm_up_once(layer, rings, 4, Kinds(1, 2))
    assert len(calls) == 1 and len(caplog.records) == 1
    assert "reference kernels" in caplog.text
    assert re.search(r"ready in \d+\.\d s", caplog.text)
    capped = LayerStep(reference, step.codec, 0.125, 30.0)
    warm_up_once(capped, rings, 4, Kinds(1, 2))
    warm_up_once(step, rings, 8, Kinds(1, 2))
    assert len(calls) == 3
    warm_up_once(step, rings, 4, Kinds(5, 2))  # an engine that speculates
    assert len(calls) == 4
    for _ in range(2):
        warm_up_once(step, rings, 4, Kinds(1, 2), torch.eye(DIM).repeat(HEADS, 1, 1))
    assert len(calls) == 5  # another kernel codes keys with feedback
    warm_up_once(step, rings, 4, Kinds(1, 2, 64))
    assert len(calls) == 6


def test_a_kernel_that_does_not_compile_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counting(monkeypatch, RuntimeError("no such instruction"))
    step = make_step(reference)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such instruction"):
            warm_up_once(step, make_rings(step.codec.layout, 0), 4, Kinds(1, 2))
    assert len(calls) == 2


# --- serving ---
class Launches:
    """In place of a Triton kernel: remembers which binaries its launches ask for."""

    def __init__(self, kernel: Any, found: set[Any]) -> None:
        self.signature = inspect.signature(kernel.fn)
        given = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
        self.alike = set(given["do_not_specialize"] or ())
        assert self.alike <= set(self.signature.parameters)
        self.name, self.found = kernel.fn.__name__, found

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        names = self.signature.parameters
        settings = {name: options.pop(name) for name in list(options) if name not in names}
        given = self.signature.bind(*args, **options).arguments
        kinds = tuple((name, self.kind(name, value)) for name, value in given.items())
        self.found.add((self.name, kinds, tuple(sorted(settings.items()))))

    def kind(self, name: str, value: Any) -> Any:
        """By Triton's rules: constants, dtypes, alignment to 16, and whether a number is 1."""
        if value is None or "constexpr" in str(self.signature.parameters[name].annotation):
            return value
        if isinstance(value, Tensor):
            return value.dtype, name in self.alike or value.data_ptr() % 16 == 0
        if isinstance(value, float) or name in self.alike:
            return type(value)
        return "1" if value == 1 else value % 16 == 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """kernels.triton that launches nothing, and the binaries it asked for."""
    kernels = pytest.importorskip("tightkv.kernels.triton.backend")
    from tightkv.kernels.triton import append, attend, merge_splits, prefill, ragged, rotate

    found: set[Any] = set()
    for place in (append, attend, merge_splits, prefill, ragged, rotate):
        for name, kernel in list(vars(place).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(place, name, Launches(kernel, found))
    monkeypatch.setattr(attend, "interpreted", lambda: False)  # long prompts go another way
    return SimpleNamespace(kernels=kernels, found=found)


class Serving:
    """Random batches of a few sequences, as the metadata builder hands them to a layer."""

    def __init__(
        self, step: LayerStep, query_heads: int, most_decoding: int, feedback: Tensor | None
    ) -> None:
        self.step, self.layout, self.hq = step, step.codec.layout, query_heads
        self.feedback = feedback
        self.most_decoding, self.batch, self.blocks = most_decoding, 7, 208  # few are aligned
        self.rings = make_rings(self.layout, self.batch)
        self.pages = self.layout.new_pages(4)
        self.table = RingTable(self.layout.cfg, self.batch, 4, 0, "cpu")
        self.out = torch.zeros(len(BatchRings._fields), self.batch, dtype=torch.int32)
        self.zeros = torch.zeros(self.batch, dtype=torch.int32)
        self.ids = torch.ones(self.batch, self.blocks, dtype=torch.int32)

    def run(self, counts: list[int], before: list[int]) -> None:
        first = [sum(counts[:i]) for i in range(len(counts) + 1)]
        lengths = [a + b for a, b in zip(counts, before, strict=True)]
        starts = torch.tensor(first, dtype=torch.int32)
        ids = self.ids[: len(counts)]
        slots = torch.full((first[-1],), self.layout.page_size)
        rows = self.table.step(ids, torch.tensor(lengths).int(), starts, slots, self.out)
        room = self.step.workspace_tokens
        cuts = split_batch(first, lengths, self.most_decoding, room)
        parts = [make_part(cut, first, starts, ids, rows, self.zeros, room) for cut in cuts]
        heads = (self.hq, HEADS, HEADS)
        qkv = torch.zeros(first[-1], sum(heads), DIM, dtype=self.layout.dtype)
        query, key, value = qkv.split(heads, 1)
        output = torch.empty(query.shape, dtype=query.dtype)
        states = query, key, value
        self.step.run(parts, self.pages, self.rings, *states, output, feedback=self.feedback)


@pytest.mark.sampled
@pytest.mark.parametrize("feedback", [None, torch.eye(DIM).repeat(HEADS, 1, 1)], ids=["", "fed"])
@pytest.mark.parametrize("most_decoding", [1, 5, 16])
@pytest.mark.parametrize("varlen", [False, True], ids=["", "varlen"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_serving_asks_for_no_binary_that_is_not_there(
    launches: SimpleNamespace,
    dtype: torch.dtype,
    group: int,
    varlen: bool,
    most_decoding: int,
    feedback: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: list[int] = []

    def attention(q: Tensor, *_: Any) -> Tensor:
        shared.append(len(q))
        return q[..., 0].float()

    monkeypatch.setattr(sdpa, "_VARLEN", [attention] if varlen else [])
    monkeypatch.setattr(batch_split, "ALONE_FROM", 512)
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 1024)
    step, query_heads = make_step(launches.kernels, dtype), group * HEADS
    serving = Serving(step, query_heads, most_decoding, feedback)
    kinds = Kinds(most_decoding, most_decoding + 1)
    warm_up(step, serving.rings, query_heads, kinds, feedback)
    ready = set(launches.found)
    launches.found.clear()
    shared.clear()
    choose = random.Random(0)
    for prefix in (0, 1, 32, 100, 512, 1000, 2048, 4100, 5000):
        counts = [1, choose.choice([256, 301, 480])]
        serving.run(counts, [choose.randint(1, 600), prefix])
    serving.run([1, 512], [9, 3000])  # alone, over a prefix in several pieces
    for _ in range(60):
        most = choose.choice([1, most_decoding, 17, 40, 255])
        counts = [choose.randint(1, most) for _ in range(choose.randint(1, serving.batch))]
        serving.run(sorted(counts), [choose.randint(1, 2000) for _ in counts])
    assert launches.found <= ready
    names = {name for name, *_ in launches.found}
    assert names == {name for name, *_ in ready}
    # Long prompts and prompts together are of half precision.
    half = dtype == torch.bfloat16
    assert len(names) == (6 if half else 3)
    assert bool(shared) == (half and varlen)
