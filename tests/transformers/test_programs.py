"""Random programs over caches, against a plain model of what they hold (programs.py).

500 programs a run, four times as many with --all-shapes; HYPOTHESIS_PROFILE=explore draws new ones,
eighty times as many.
"""

import os
from copy import deepcopy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from programs import Model, attention_over, readings
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.attention import tightkv_mask
from tightkv.integrations.transformers.states import CompressedStates
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout

FACTOR = 80 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 1
FACTOR = max(FACTOR, 4 if os.environ.get("ALL_SHAPES") else 1)
COUNTS = (1, 1, 2, 5, 16, 17, 31, 32, 33, 40, 64, 97)
SHAPES = ((1, 16), (2, 32))  # heads and head_dim of a table's two layers
SMALL = {"page_size": 32, "sinks": 2, "exact_pages": 1}
EXACT = {**SMALL, "window_bits": 16}
CONFIGS = {
    "k2v2": KVQuantConfig.preset("k2v2", **SMALL),
    "k3v2": KVQuantConfig.preset("k3v2", **{**EXACT, "sinks": 0, "exact_pages": 2}),
    "k4v4": KVQuantConfig.preset("k4v4", **{**EXACT, "page_size": 64}),
    "k8v8": KVQuantConfig.preset("k8v8", **{**SMALL, "sinks": 5}),
    "exact": KVQuantConfig(key_bits=16, value_bits=16, **SMALL),
    "k16v4": KVQuantConfig(key_bits=16, value_bits=4, **SMALL),
}
FAST = ("k2v2", "k3v2", "k4v4", "k8v8")  # configs of the native kernels


def layouts_of(name, shapes=SHAPES, dtype=torch.float32):
    dtype = torch.float16 if CONFIGS[name].key_bits == 16 else dtype
    return [PageLayout(CONFIGS[name], heads, dim, dtype) for heads, dim in shapes]


def kernels_of(name, kernels):
    return kernels if name in FAST else "reference"


numbers = st.integers(0, 999)


def programs(kinds, most=9):
    step = st.tuples(st.sampled_from(kinds), numbers, numbers, numbers)
    return st.lists(step, min_size=2, max_size=most)


class Pages:
    """PagedKV layers over one table, with its model."""

    def __init__(self, name, seed, kernels, shapes=SHAPES):
        layouts = layouts_of(name, shapes)
        self.table = SequenceTable(CONFIGS[name], encode_partial_page=bool(seed % 2))
        kernels = kernels_of(name, kernels)
        generator = torch.Generator().manual_seed(seed)
        self.model = Model(layouts, generator, kernels, bool(seed % 2))
        self.layers = [PagedKV(x, self.table, "cpu", kernels) for x in layouts]
        self.add([0, 0], 2)
        self.append(seed, seed // 12, 2)

    def check(self):
        self.model.check(self.table, self.layers)

    def add(self, starts, count):
        self.table.add_rows(starts[:count])
        self.model.add_rows(starts[:count])

    def append(self, a, b, c):
        counts = [(*COUNTS, 0)[(a + b * i) % 13] for i in range(len(self.table))]
        rows = list(range(len(self.table)))
        rows = rows[c % 2 :] if c % 3 == 0 else rows[::-1] if c % 3 == 1 else rows
        counts = [counts[row] for row in rows]
        if not rows:
            return
        tokens = self.model.draw(len(rows), max(counts))
        plan = self.table.append(rows, counts)
        for kv, x in zip(self.layers, tokens, strict=True):
            kv.append(plan, *x.to(kv.layout.dtype).unbind(2))
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            self.model.append(row, [x[i, :count] for x in tokens])

    def crop(self, a, b, c):
        if len(self.table):
            row = a % len(self.table)
            length = self.table.lengths[row]
            to = max(0, length - b % 40) if c % 2 else b % (length + 1)
            before = readings(self.layers, row, length)
            self.table.crop(row, to)
            self.model.crop(row, to, before)

    def select(self, a, b, c):
        if len(self.table):
            rows = [x % len(self.table) for x in (a, b, c)][: 1 + a % 3]
            self.table.select(rows)
            for kv in self.layers:
                kv.select(rows)
            self.model.select(rows)

    def add_rows(self, a, b, c):
        if len(self.table) < 4:
            self.add([a % 70, 0], 1 + b % 2)

    def drop_exact(self, a, b, c):
        if len(self.table) and self.table.encode_partial_page:
            self.table.drop_exact(a % len(self.table))
            self.model.drop_exact(a % len(self.table))

    def clear(self, a, b, c):
        self.table.clear()
        for kv in self.layers:
            kv.select([])
        self.model.select([])
        self.add([b % 40, 0], 2)

    def refused(self, a, b, c):
        n = len(self.table)
        for attempt in (
            lambda: self.table.select([0, n]),
            lambda: self.table.append([n], [1]),
            lambda: self.table.append([0, 0], [1, 1]),
            lambda: self.table.crop(0, self.table.lengths[0] + 1),
            lambda: self.table.add_rows([3, -1]),
        ):
            with pytest.raises((ValueError, IndexError)):
                attempt()

    def attend(self, a, b, c):
        if not len(self.table):
            return
        for kv in self.layers:
            heads, dim = kv.layout.num_kv_heads, kv.layout.head_dim
            query = torch.randn(len(self.table), 1, 2 * heads, dim, generator=self.model.generator)
            out, _ = attend(kv, query.to(kv.layout.dtype))
            key, value = kv.dequantize()
            for row, state in enumerate(self.table.rows):
                reading = torch.stack([key, value], 2)[row, : state.length].float()
                expected = torch.zeros(2 * heads, dim)
                if state.length > state.left_pad:
                    expected = attention_over(reading, query[row, 0], state.left_pad)
                torch.testing.assert_close(out[row, 0].float(), expected, atol=5e-3, rtol=5e-3)

    def copy(self, a, b, c):
        other = Pages.__new__(Pages)
        other.table, other.layers = deepcopy((self.table, self.layers))
        other.model = self.model.copy()
        return other


PAGE_STEPS = ("append",) * 6 + ("crop",) * 3 + ("select", "select", "copy", "attend")
PAGE_STEPS += ("add_rows", "drop_exact", "clear", "refused")


def run(alive, program):
    """Each step is for the cache it names; all of them are checked at the end."""
    for i, (kind, a, b, c) in enumerate(program):
        at = a * 7 + i
        new = getattr(alive[at % len(alive)], kind)(a, b, c)
        if new is not None and len(alive) < 4:
            alive.append(new)
    for each in alive:
        each.check()


@pytest.mark.parametrize("name", CONFIGS)
@given(program=programs(PAGE_STEPS), seed=numbers, other=st.sampled_from(FAST))
@settings(max_examples=32 * FACTOR)
def test_pages(name, program, seed, other):
    run([Pages(name, seed, "cpu"), Pages(other, seed + 1, "cpu", ((2, 48),))], program)


# longer than the window, cropped before there was a page, and grown again
BACK = [("append", 0, 56, 0), ("crop", 1, 1, 0), ("append", 0, 0, 0)]


@pytest.mark.parametrize("name", FAST)
@example(program=BACK, seed=186)
@given(program=programs(PAGE_STEPS, 6), seed=numbers)
@settings(max_examples=10 * FACTOR)
def test_pages_with_the_reference_kernels(name, program, seed):
    run([Pages(name, seed, "reference")], program)


@pytest.mark.parametrize("name", ["k3v2", pytest.param("k8v8", marks=pytest.mark.thorough)])
@given(program=programs(("append", "append", "crop", "select"), 3), seed=numbers)
@settings(max_examples=2 * FACTOR)
def test_pages_with_the_triton_kernels(name, program, seed):
    run([Pages(name, seed, "triton", ((1, 64),))], program)


class Tight:
    """A TightCache that is fed without a model, with its model.

    What it gets is float32, but numbers that float16 has, so that copies are exact.
    """

    def __init__(self, name, seed, kernels, folder, shapes=SHAPES):
        layouts = layouts_of(name, shapes, torch.float16)
        self.kernels, self.folder, self.name = kernels_of(name, kernels), folder, name
        self.model = Model(layouts, torch.Generator().manual_seed(seed), self.kernels)
        self.cache = TightCache(CONFIGS[name], kernels=self.kernels, offloading=bool(seed % 3))
        self.pads = self.pads_of(seed)
        self.append(seed, seed // 12, 0)

    def pads_of(self, seed):
        return [0, 45 * (seed % 2)][: 1 + seed % 4 // 2]

    @property
    def table(self):
        return self.cache.shared.table

    @property
    def layers(self):
        for layer in self.cache.layers:
            layer.commit()
        return [layer.kv for layer in self.cache.tight_layers]

    def check(self):
        if self.model.rows:
            self.model.check(self.table, self.layers)
        assert {layer.get_seq_length() for layer in self.cache.layers} <= {
            max([row.length for row in self.model.rows], default=0)
        }

    def append(self, a, b, c, layers=None, count=None):
        count = COUNTS[a % len(COUNTS)] if count is None else count
        if not self.model.rows:
            self.model.add_rows(self.pads)
        past, rows = self.model.rows[0].length, len(self.model.rows)
        for row, pad in zip(self.model.rows, self.pads, strict=True):
            if row.length <= row.start:
                row.start = min(pad, past + count)
        tokens = self.model.draw(rows, count)
        visible = torch.arange(past + count) >= torch.tensor(self.pads)[:, None]
        mask = tightkv_mask(rows, count, past + count, q_offset=past, attention_mask=visible)
        if mask is not None and b % 3 == 0:
            mask = mask.clone()  # nobody has noted its padding
        for i, x in list(enumerate(tokens))[:layers]:
            key, value = (y.transpose(1, 2) for y in x.unbind(2))
            states, other = self.cache.update(key, value, i)
            assert isinstance(states, CompressedStates)
            step, way = states.step, (b + i) % 4
            if way == 0 or mask is not None:
                hidden = step.layer.follow(step, mask)
                query = torch.randn(rows, count, 2 * key.shape[1], key.shape[3]).to(key.dtype)
                options = {"mask": None} if hidden else {"mask": mask, "causal": mask is None}
                out, _ = step.layer.attend(step, query, **options)
                assert torch.isfinite(out).all()
            elif way == 1:
                assert torch.equal((states + 0)[:, :, past:], key)
                assert torch.equal((other + 0)[:, :, past:], value)
            elif way == 2:
                step.layer.commit()
        if layers is None:
            for row in range(rows):
                self.model.append(row, [x[row] for x in tokens])

    def crop(self, a, b, c):
        if self.model.rows:
            length = self.model.rows[0].length
            to = max(0, length - b % 40) if c % 2 else b % (length + 1)
            before = [readings(self.layers, row, length) for row in range(len(self.model.rows))]
            self.cache.crop(to - length if a % 2 or not to else to)
            for row, reading in enumerate(before):
                self.model.crop(row, to, reading)

    def interrupt(self, a, b, c):
        """A forward pass that reaches the first layer alone is cropped away."""
        if self.model.rows and all(row.length > row.start for row in self.model.rows):
            length = self.model.rows[0].length
            before = [readings(self.layers, row, length) for row in range(len(self.model.rows))]
            count = (3, 33, 97, 130)[a % 4]
            self.append(a, b, c, layers=1, count=count)
            moved = self.table.lengths[0] > length  # else the first layer has not written it yet
            with pytest.raises(RuntimeError, match="different tokens"):
                self.cache.crop(length + count)
                self.cache.reorder_cache(torch.arange(len(self.model.rows)))
            self.cache.crop(length)
            for number, reading in enumerate(before if moved else ()):
                self.model.interrupted(number, count, reading)

    def select(self, a, b, c):
        if not self.model.rows:
            return
        n = len(self.model.rows)
        rows = [x % n for x in (a, b, c)][: 1 + b % 3]
        if c % 4 == 0:
            rows = [row for row in range(n) for _ in range(1 + (n < 3))]
            self.cache.batch_repeat_interleave(1 + (n < 3))
        elif c % 4 == 1:
            keep = [row % 2 == a % 2 or row == 0 for row in range(n)]
            rows = [row for row in range(n) if keep[row]]
            self.cache.batch_select_indices(torch.tensor(keep))
        elif c % 4 == 2:
            self.cache.batch_select_indices(torch.tensor(rows) - n)
        else:
            self.cache.reorder_cache(torch.tensor(rows))
        self.model.select(rows)
        self.pads = [self.pads[row] for row in rows]

    def reset(self, a, b, c):
        self.cache.reset()
        self.model.select([])
        self.pads = self.pads_of(a)

    def refused(self, a, b, c):
        if self.model.rows:
            for attempt in (
                lambda: self.cache.reorder_cache(torch.tensor([0, 9])),
                lambda: self.cache.batch_select_indices(torch.tensor([0, 9])),
                lambda: self.cache.batch_repeat_interleave(0),
                lambda: self.cache.update(torch.zeros(9, 1, 1, 16), torch.zeros(9, 1, 1, 16), 0),
            ):
                with pytest.raises((ValueError, IndexError)):
                    attempt()

    def copy(self, a, b, c):
        return self.twin(deepcopy(self.cache))

    def file(self, a, b, c):
        if self.model.rows:
            self.cache.save(self.folder / "cache")
            return self.twin(TightCache.load(self.folder / "cache", kernels=self.kernels))

    def twin(self, cache):
        other = Tight.__new__(Tight)
        other.cache, other.model, other.pads = cache, self.model.copy(), list(self.pads)
        other.kernels, other.folder, other.name = self.kernels, self.folder, self.name
        return other


TIGHT_STEPS = ("append",) * 6 + ("crop", "crop", "select", "select", "copy", "file")
TIGHT_STEPS += ("interrupt", "interrupt", "reset", "refused")


# saved when the ring is still read from before the page that was sealed last
SAVED = [("append", 0, 0, 0), ("append", 427, 0, 0), ("file", 0, 0, 0), ("append", 0, 0, 0)]


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "exact"])
@example(program=SAVED, seed=0, other="k2v2")
@given(program=programs(TIGHT_STEPS), seed=numbers, other=st.sampled_from(FAST))
@settings(max_examples=52 * FACTOR)
def test_tight_caches(name, program, seed, other, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    shapes = ((1, 16), (2, 64))
    run([Tight(name, seed, "cpu", folder), Tight(other, seed + 1, "cpu", folder, shapes)], program)
