"""A plain model of a cache for tests that run random programs: exact tokens, and what the design
promises about each.

- A token with an exact copy (ring, sinks) is read exactly. A window of 8 bits has rounded copies,
  and pages follow from those.
- The bytes of a sealed page follow from its own exact tokens, so they are those of a fresh cache.
- A crop into a sealed page whose exact copies are gone keeps the codes of the tokens that stay.
- Everything is within the codec's error of the exact token; 16 bits are exact.
"""

from dataclasses import dataclass, field

import torch

from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.window import ring_tokens, rotated

# Of a token's energy, at most; the worst of many tokens of 16 channels, not the mean of the codec.
# Of a vector's energy; rare vectors have a coordinate beyond the last level.
ERROR = {2: 0.8, 3: 0.4, 4: 0.15, 8: 0.05}


@dataclass
class Row:
    """One sequence: tokens [T, 2, heads, dim] of each layer, key and value."""

    layers: list[torch.Tensor]
    start: int = 0
    copied_from: int = 0  # exact copies exist from here on
    sinks: int = 0
    frozen: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # reading, for each layer
    mixed: set[int] = field(default_factory=set)  # pages with tokens of before and after a crop

    @property
    def length(self):
        return len(self.layers[0])

    def copy(self):
        return Row(
            list(self.layers), self.start, self.copied_from, self.sinks, dict(self.frozen),
            set(self.mixed),
        )  # fmt: skip


class Model:
    """What a table and the layers over it should hold."""

    def __init__(self, layouts, generator, kernels="reference", partial=False):
        """`partial`: open pages are coded."""
        self.layouts, self.generator, self.kernels = layouts, generator, kernels
        self.partial = partial
        self.cfg = layouts[0].cfg
        self.page, self.ring = self.cfg.page_size, layouts[0].ring_tokens
        self.rows = []

    def copy(self):
        other = Model(self.layouts, self.generator, self.kernels, self.partial)
        other.rows = [row.copy() for row in self.rows]
        return other

    # --- the operations ---
    def add_rows(self, starts):
        for start in starts:
            empty = [torch.zeros(0, 2, x.num_kv_heads, x.head_dim) for x in self.layouts]
            self.rows.append(Row(empty, start))

    def draw(self, rows, count):
        """New tokens for each layer, [rows, count, heads, dim], keys and values."""
        out = []
        for layout in self.layouts:
            shape = (rows, count, 2, layout.num_kv_heads, layout.head_dim)
            x = torch.randn(shape, generator=self.generator)
            x[:, :, 0] += torch.linspace(-2, 2, layout.head_dim)  # keys have a common mean
            out.append(x.to(layout.dtype).float())
        return out

    def append(self, number, tokens):
        """tokens [T, 2, heads, dim] for each layer."""
        row, count = self.rows[number], len(tokens[0])
        if not count:
            return
        old = row.length
        row.layers = [torch.cat(both) for both in zip(row.layers, tokens, strict=True)]
        self._grown(row, old, row.length)

    def _grown(self, row, old, new):
        """What becomes of copies when tokens [old, new) join a row."""
        row.copied_from = max(row.copied_from, new - self.ring)
        if max(0, old - row.start) <= row.sinks:
            row.sinks = max(0, min(new - row.start, self.cfg.sinks))

    def _sealed(self, length):
        """Pages of a sequence that have left the window, or are complete where open ones count."""
        lag = 0 if self.partial else (self.cfg.exact_pages - 1) * self.page + 1
        return max(0, length - lag) // self.page

    def crop(self, number, length, reading):
        """`reading`: keys and values [T, 2, heads, dim] of each layer before the crop."""
        row, page = self.rows[number], length // self.page
        row.copied_from = min(row.copied_from, length)
        if length % self.page and row.copied_from > page * self.page:
            row.mixed.add(page)
            for at in range(page * self.page, row.copied_from):
                if at >= row.start + row.sinks and at not in row.frozen:
                    row.frozen[at] = [x[at].clone() for x in reading]
        row.frozen = {at: x for at, x in row.frozen.items() if at < length}
        row.mixed = {i for i in row.mixed if i * self.page < length}
        row.layers = [x[:length] for x in row.layers]
        row.sinks = min(row.sinks, max(0, length - row.start))

    def interrupted(self, number, count, reading):
        """`count` tokens reached some layers only, and were cropped away."""
        row, old = self.rows[number], self.rows[number].copied_from
        page = row.length // self.page * self.page
        self._grown(row, row.length, row.length + count)
        row.copied_from = min(row.copied_from, row.length)
        row.sinks = min(row.sinks, max(0, row.length - row.start))
        if row.copied_from > page:
            # The page was sealed with those tokens; what had no copy before has the codes it had.
            row.mixed.add(page // self.page)
            for at in range(page, min(old, row.length)):
                if at >= row.start + row.sinks and at not in row.frozen:
                    row.frozen[at] = [x[at].clone() for x in reading]

    def drop_exact(self, number):
        """Ring and sinks are lost: the open page is sealed later from its codes."""
        row = self.rows[number]
        page = row.length // self.page
        if row.length % self.page and row.copied_from < row.length:
            row.mixed.add(page)
            row.frozen = {at: x for at, x in row.frozen.items() if at < page * self.page}
        row.copied_from, row.sinks = row.length, 0

    def select(self, rows):
        self.rows = [self.rows[i].copy() for i in rows]

    # --- the promises ---
    def check(self, table: SequenceTable, layers: list[PagedKV]):
        assert table.lengths == [row.length for row in self.rows]
        self._check_pool(table)
        readings = [torch.stack(kv.dequantize(), 2).float() for kv in layers]
        fresh = self._fresh(table.encode_partial_page)
        for number, (row, state) in enumerate(zip(self.rows, table.rows, strict=True)):
            assert (state.left_pad, state.sink_count) == (row.start, row.sinks)
            newest = max(0, row.length - 1) // self.page
            window = (newest - self.cfg.exact_pages + 1) * self.page
            assert row.copied_from <= state.ring_read_from <= max(row.copied_from, window)
            for i, kv in enumerate(layers):
                self._check_row(row, state, readings[i][number], i, kv.codec)
                self._check_pages(row, state, kv, fresh[i], number)

    def _check_row(self, row, state, reading, layer, codec):
        exact = row.layers[layer]
        at = torch.arange(row.length)
        real = at >= row.start
        in_ring = at >= state.ring_read_from
        copied = in_ring | (at < row.start + row.sinks)
        got, want = reading[: row.length], exact
        if self.cfg.window_bits == 8:
            want = torch.where(in_ring[:, None, None, None], as_rings_hold(codec, exact), exact)
        assert torch.equal(got[real & copied], want[real & copied])
        assert not got[~real].any() and not reading[row.length :].any()
        for side, name in enumerate(("key", "value")):
            a, b = got[real, side].flatten(1), exact[real, side].flatten(1)
            if self.cfg.bits(name) == 16:
                assert torch.equal(a, b)
            else:
                error = (a - b).square().sum(1) / b.square().sum(1)
                assert (error < ERROR[self.cfg.bits(name)]).all(), (name, error.max())
        for position, kept in row.frozen.items():
            if position < state.ring_read_from and position >= row.start + row.sinks:
                assert torch.equal(got[position], kept[layer]), f"token {position} has other codes"

    def _check_pages(self, row, state, kv, fresh, number):
        clean = [i for i in range(self._sealed(row.length)) if i not in row.mixed]
        ours = kv.pages[[state.pages[i] for i in clean]]
        theirs = fresh.pages[[fresh.table.rows[number].pages[i] for i in clean]]
        assert torch.equal(ours, theirs), "a sealed page follows from its own tokens alone"

    def _check_pool(self, table):
        owned = [page for row in table.rows for page in row.pages]
        free = table._free
        assert len(set(free)) == len(free) and not set(free) & set(owned)
        assert set(free) | set(owned) == set(range(table.num_pages))
        assert table._references == {page: owned.count(page) for page in set(owned)}

    def _fresh(self, encode_partial_page):
        """Caches that get the tokens that are left, all at once."""
        table = SequenceTable(self.cfg, encode_partial_page=encode_partial_page)
        table.add_rows([row.start for row in self.rows])
        plan = table.append(range(len(self.rows)), [row.length for row in self.rows])
        out = []
        for i, layout in enumerate(self.layouts):
            kv = PagedKV(layout, table, "cpu", self.kernels)
            both = (
                torch.nn.utils.rnn.pad_sequence(
                    [row.layers[i] for row in self.rows], batch_first=True
                )
                if self.rows
                else torch.zeros(0, 0, 2, layout.num_kv_heads, layout.head_dim)
            )
            both = both.to(layout.dtype)
            kv.append(plan, both[:, :, 0], both[:, :, 1])
            out.append(kv)
        return out


def readings(layers, number, length):
    return [torch.stack(kv.dequantize(), 2)[number, :length].float() for kv in layers]


def attention_over(reading, query, start):
    """query [heads, dim] over keys and values [T, 2, kv heads, dim]: plain softmax attention."""
    group = query.shape[0] // reading.shape[2]
    keys, values = (reading[start:, i].repeat_interleave(group, 1) for i in (0, 1))
    scores = torch.einsum("hd,thd->ht", query, keys) / query.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def as_rings_hold(codec, tokens):
    """Tokens [n, 2, Hkv, D] rounded to a window of 8 bits."""
    both = rotated(codec, *ring_tokens(codec, tokens[:, 0], tokens[:, 1]))
    sides = zip((codec.key, codec.value), both, strict=True)
    held = torch.stack([side.rotation.inverse(y) for side, y in sides], 1)
    return held.to(codec.layout.dtype).to(tokens.dtype)
