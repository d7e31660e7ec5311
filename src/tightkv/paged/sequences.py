"""SequenceTable: which pages, ring slots and sinks belong to which sequence.

Host bookkeeping alone, no cache bytes: layers that hold the same tokens share one table.
Every change is planned whole before anything is changed, so a refused call leaves no trace.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.kernels.ragged_plan import uniform_cu_seqlens
from tightkv.pages.layout import MAX_TOKENS, RING_SLACK, ring_tokens, seal_lag, window_step


@dataclass
class SequenceState:
    """A sequence of tokens [left_pad, length). The first sink_count are read from the sinks.

    Tokens from ring_read_from on are read from the ring, which holds copies from ring_valid_from
    on: a few more than the window, so that the window is complete again when tokens are taken back
    (speculative decoding).
    """

    left_pad: int = 0
    length: int = 0
    ring_valid_from: int = 0
    ring_read_from: int = 0
    sink_count: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass  # frozen ones take three times as long to make
class AppendPlan:
    """What every layer does when `counts[i]` tokens join sequence `rows[i]`."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    ring_valid_from: tuple[int, ...]  # from where the ring held copies before
    copies: tuple[tuple[int, int], ...]  # page copies (from, to): a shared page is written
    held: tuple[int, ...]  # tokens of each row of the table before
    ring_tokens: int  # that rings have from now on
    sinks: int  # likewise
    ring_only: bool  # a token for each row is copied to its ring, and nothing else changes
    _tensors: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cu_seqlens of packed rows [n + 1] and ring_valid_from, int32; made once per device."""
        if device not in self._tensors:
            rows, first = len(self.counts), self.counts[0]
            if self.counts == (first,) * rows:
                cu_seqlens = uniform_cu_seqlens(rows, first, device)
                self._tensors[device] = cu_seqlens, _int32(self.ring_valid_from, device)
            else:
                both = _int32([0, *accumulate(self.counts), *self.ring_valid_from], device)
                self._tensors[device] = both[: rows + 1], both[rows + 1 :]
        return self._tensors[device]

    def ring_slots(self, old: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each slot of the new rings, the row and slot of its token in rings of `old` tokens.

        int64, [rows, 1] and [rows, ring_tokens]; made once per device.
        """
        key = str(device), old
        if key not in self._tensors:
            last = torch.tensor(self.held, device="cpu")[:, None] - 1
            slot = torch.arange(self.ring_tokens, device="cpu")
            at = last - (last - slot) % self.ring_tokens  # the position a slot is for
            row = torch.arange(len(last), device="cpu")[:, None]
            self._tensors[key] = row.to(device), (at.clamp_min(0) % old).to(device)
        return self._tensors[key]


class SequenceTable:
    """Rows of sequences over one pool of pages, with reference counts for shared pages."""

    def __init__(
        self, cfg: KVQuantConfig, *, encode_partial_page: bool = True, max_pages: int | None = None
    ) -> None:
        """`encode_partial_page`: all tokens have codes, those in the window, too.

        Without it a page is sealed when it leaves the window, and its tokens have no codes before.
        `max_pages` bounds the pool; None lets it grow.
        """
        self.page_size, self.sinks = cfg.page_size, cfg.sinks
        self.ring_tokens, self.window_step = ring_tokens(cfg), window_step(cfg)
        self.lag = 0 if encode_partial_page else seal_lag(cfg)
        self.exact_pages, self.max_pages = cfg.exact_pages, max_pages
        self.encode_partial_page = encode_partial_page
        self.rows: list[SequenceState] = []
        self.num_pages = 0  # pages ever handed out: the pool a layer must have
        self._references: dict[int, int] = {}
        self._free: list[int] = []
        self._tensors: dict[torch.device, RowTensors] = {}
        self._plans: dict[torch.device, dict[object, Tensor]] = {}
        self._longer: set[torch.device] = set()  # devices whose tensors have outdated lengths
        self._blocks: dict[torch.device, Tensor] = {}

    changes = 0  # of the tensors but for lengths and, with 8 bits, where windows begin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle of before has windows of whole pages alone, and pages in the window."""
        size, pages = state["page_size"], state["exact_pages"]
        if state.pop("exact_limit", 0) and any(x.length and not x.pages for x in state["rows"]):
            raise ValueError(
                "a pickle of sequences without pages, from an older tightkv; save it there with "
                "TightCache.save, whose files load"
            )
        lag = 0 if state["encode_partial_page"] else (pages - 1) * size + 1
        self.__dict__.update({"window_step": size, "lag": lag, **state})

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @property
    def used_pages(self) -> int:
        return len(self._references)

    # --- rows ---
    def add_rows(self, left_pad: Iterable[int]) -> list[int]:
        """New empty sequences; the first left_pad[i] tokens appended to one are left padding."""
        pads = list(map(operator.index, left_pad))
        if any(pad < 0 for pad in pads):
            raise ValueError(f"left_pad={pads}; left padding cannot be negative")
        first = len(self.rows)
        self.rows += [SequenceState(left_pad=pad) for pad in pads]
        self._forget_tensors()
        return list(range(first, len(self.rows)))

    def restore(self, rows: Sequence[SequenceState]) -> None:
        """Start from saved rows and their pages, if this table could have made them."""
        pages = _count_pages(rows)
        for i, row in enumerate(rows):
            self._check_state(f"rows[{i}]", row)
        self.clear()
        self.rows, self._references, self.num_pages = list(rows), pages, len(pages)
        self._free = []
        for row in self.rows:
            self._drop_pages(row)

    def _check_state(self, where: str, row: SequenceState) -> None:
        size, length = self.page_size, row.length
        _check_range(f"{where}.left_pad", row.left_pad, 0, MAX_TOKENS)
        _check_range(f"{where}.length", length, 0, MAX_TOKENS)
        # A page that a crop has opened again stays.
        least, most = self._pages_for(length), -(-length // size)
        _check_range(f"the number of {where}.pages", len(row.pages), least, most)
        held = min(length, size * len(row.pages))  # the ring may begin after all tokens with codes
        oldest = min(max(0, length - self.ring_tokens), held)
        _check_range(f"{where}.ring_valid_from", row.ring_valid_from, oldest, held)
        newest = range(length - RING_SLACK, max(length, 1))  # see append
        windows = {max(row.ring_valid_from, self._window(at)) for at in newest}
        if row.ring_read_from not in windows:
            allowed = ", ".join(map(str, sorted(windows)))
            raise ValueError(f"{where}.ring_read_from={row.ring_read_from}; allowed: {allowed}")
        sinks = min(self.sinks, max(0, length - row.left_pad))
        _check_range(f"{where}.sink_count", row.sink_count, 0, sinks)

    def clear(self) -> None:
        """Forget every sequence and page; the next pages are handed out from 0 on."""
        self.rows, self.num_pages = [], 0
        self._references.clear()
        self._free.clear()
        self._forget_tensors()

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of what was row rows[i] (beam search, batch repeat, drop).

        Pages are shared, not copied, until one of the sharers writes to one.
        """
        for row in rows:
            self._check_row(row)
        old = self.rows
        self.rows = [replace(old[row], pages=list(old[row].pages)) for row in rows]
        for state in self.rows:
            for page in state.pages:
                self._references[page] += 1
        for state in old:
            self._release(state.pages)
        self._forget_tensors()

    def crop(self, row: int, length: int) -> None:
        """Drop the tokens from `length` on."""
        self._check_row(row)
        state, length = self.rows[row], operator.index(length)
        if not 0 <= length <= state.length:
            raise ValueError(f"crop to {length}; sequence {row} holds {state.length} tokens")
        state.length = length
        state.ring_valid_from = min(state.ring_valid_from, length)
        self._set_window(state)
        self._drop_pages(state)
        state.sink_count = min(state.sink_count, max(0, length - state.left_pad))
        self._forget_tensors()

    def _drop_pages(self, state: SequenceState) -> None:
        """Let go of pages that nothing is read from, but for those that no append seals again.

        After an append of several tokens, the ring is read from before the last sealed pages.
        """
        end = state.length if self.encode_partial_page else state.ring_read_from
        keep = max(-(-end // self.page_size), self._pages_for(state.length))
        self._release(state.pages[keep:])
        state.pages = state.pages[:keep]

    def set_left_pad(self, row: int, left_pad: int) -> None:
        """Change a sequence's left padding: up only before its first real token, down at any time.

        Tokens that turn out to be real keep the bytes they have; the sinks, whose copies lie
        relative to the start, are read from the pages then.
        """
        self._check_row(row)
        state, left_pad = self.rows[row], operator.index(left_pad)
        if left_pad < 0 or (left_pad > state.left_pad and state.left_pad < state.length):
            raise ValueError(
                f"left_pad={left_pad} for sequence {row}, which holds real tokens from "
                f"{state.left_pad} on; supported: 0 to {state.left_pad}"
            )
        if left_pad != state.left_pad:
            state.left_pad, state.sink_count = left_pad, 0
            self._forget_tensors()

    def drop_exact(self, row: int) -> None:
        """Forget a sequence's ring and sinks: accuracy is lost, data is not."""
        self._check_row(row)
        state = self.rows[row]
        if state.length > self.page_size * len(state.pages):
            raise ValueError(
                f"sequence {row} has tokens in its ring alone; drop_exact needs a table with "
                "encode_partial_page=True"
            )
        state.ring_valid_from, state.sink_count = state.length, 0
        self._set_window(state)
        self._forget_tensors()

    # --- append ---
    def append(self, rows: Sequence[int], counts: Sequence[int]) -> AppendPlan:
        """Grow rows[i] by counts[i] tokens and say what the layers must write."""
        rows, counts = tuple(map(operator.index, rows)), tuple(map(operator.index, counts))
        if len(rows) != len(counts) or len(set(rows)) != len(rows):
            raise ValueError(f"rows={list(rows)}, counts={list(counts)}: one count for each row")
        for row in rows:
            self._check_row(row)
        if counts and min(counts) < 0:
            raise ValueError(f"counts={list(counts)}; a count cannot be negative")
        if self.max_pages is not None:
            self._check_room(rows, counts)
        states = [self.rows[row] for row in rows]
        ring_valid_from = tuple([state.ring_valid_from for state in states])
        held = tuple([row.length for row in self.rows])
        copies: list[tuple[int, int]] = []
        whole_pages = self.window_step == self.page_size  # else the window moves with each token
        grew_only = True  # nothing has changed but lengths, and windows that move with them
        for state, count in zip(states, counts, strict=True):
            old = state.length
            new = state.length = old + count
            if not count:
                continue
            read = whole_pages and state.ring_read_from, state.sink_count
            if self._pages_for(new) > max(old - self.lag, 0) // self.page_size:
                copies += self._prepare_pages(state, old)
                grew_only = False
            state.ring_valid_from = max(state.ring_valid_from, new - self.ring_tokens)
            # A few tokens at once (speculative decoding) see the window of the first.
            self._set_window(state, at=old if count <= RING_SLACK else new - 1)
            if max(0, old - state.left_pad) <= state.sink_count < self.sinks:  # no gap before
                wanted = min(new - state.left_pad, self.sinks)
                state.sink_count = max(state.sink_count, wanted)
            now = whole_pages and state.ring_read_from, state.sink_count
            grew_only = grew_only and read == now
        if grew_only:
            self._longer.update(self._tensors)
        else:
            self.changes += 1
            self._tensors.clear()
        return AppendPlan(
            rows, counts, ring_valid_from, tuple(copies), held, *self._exact_sizes(),
            grew_only and counts == (1,) * len(rows),
        )  # fmt: skip

    def written_pages(self, plan: AppendPlan) -> list[int]:
        """The pages that layers write in the append just planned."""
        pages = [target for _, target in plan.copies]
        for row, count in zip(plan.rows, plan.counts, strict=True):
            state = self.rows[row]
            pages += state.pages[max(state.length - count - self.lag, 0) // self.page_size :]
        return pages

    def _set_window(self, state: SequenceState, at: int | None = None) -> None:
        """Set the window: what ends with the page (with 8 bits, the token) `at`, the newest."""
        window = self._window(state.length - 1 if at is None else at)
        state.ring_read_from = max(state.ring_valid_from, window)

    def _window(self, newest: int) -> int:
        """Where the window of a token begins; before the first token of a short sequence."""
        end = (newest // self.window_step + 1) * self.window_step
        return end - self.exact_pages * self.page_size

    def _exact_sizes(self) -> tuple[int, int]:
        """Tokens that rings must hold, and sinks."""
        longest = max([row.length for row in self.rows], default=0)
        return max(1, min(longest, self.ring_tokens)), self.sinks if longest else 0

    def _pages_for(self, length: int) -> int:
        if self.encode_partial_page:
            return -(-length // self.page_size)
        return max(length - self.lag, 0) // self.page_size

    def _check_room(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        assert self.max_pages is not None
        needed = 0
        for row, count in zip(rows, counts, strict=True):
            state = self.rows[row]
            new = state.length + count
            needed += max(0, self._pages_for(new) - len(state.pages))
            needed += len(self._shared_page_to_write(state, state.length, new))
        free = self.max_pages - self.used_pages
        if needed > free:
            raise MemoryError(
                f"append needs {needed} pages of {self.page_size} tokens; {free} of "
                f"{self.max_pages} are free; free sequences or make the pool larger"
            )

    def _shared_page_to_write(self, state: SequenceState, old: int, new: int) -> list[int]:
        """The number of the page of whose codes this changes some, if other rows read it."""
        index = len(state.pages) - 1
        first = max(old - self.lag, 0) // self.page_size
        writes = new > old and first <= index < self._pages_for(new)
        return [index] if writes and self._references[state.pages[index]] > 1 else []

    def _prepare_pages(self, state: SequenceState, old: int) -> list[tuple[int, int]]:
        """Give a sequence pages for all its tokens; it had codes of the first `old`."""
        copies: list[tuple[int, int]] = []
        for index in self._shared_page_to_write(state, old, state.length):
            shared = state.pages[index]
            state.pages[index] = self._take()
            copies.append((shared, state.pages[index]))
            self._release([shared])
        missing = self._pages_for(state.length) - len(state.pages)
        state.pages += [self._take() for _ in range(missing)]
        if copies or missing > 0:
            self._blocks.clear()
        return copies

    def _take(self) -> int:
        page = self._free.pop() if self._free else self.num_pages
        self.num_pages = max(self.num_pages, page + 1)
        self._references[page] = 1
        return page

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                self._free.append(page)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.rows):
            raise ValueError(f"row={row}; this table has rows 0 to {len(self.rows) - 1}")

    # --- tensors ---
    def snapshot(self) -> list[SequenceState]:
        """A copy of the rows, for `row_tensors` after the table has moved on."""
        return [replace(row, pages=list(row.pages)) for row in self.rows]

    def tensors(self, device: torch.device) -> RowTensors:
        """The rows as device tensors; made once for each change."""
        made = self._tensors.get(device)
        if made is None:
            if device not in self._blocks:
                self._blocks[device] = _block_table(self.rows, device)
            made = RowTensors(self._blocks[device], *_counters(self.rows, device))
        elif device in self._longer:
            both = [row.length for row in self.rows], [row.ring_read_from for row in self.rows]
            lengths, read_from = _int32([*both[0], *both[1]], device).view(2, -1)
            made = made._replace(lengths=lengths, ring_read_from=read_from)
        else:
            return made
        self._tensors[device] = made
        self._plans[device] = {}
        self._longer.discard(device)
        return made

    def plans(self, device: torch.device) -> dict[object, Tensor]:
        """The plans that kernels keep for `tensors(device)`, for all layers (`CacheView.plans`)."""
        self.tensors(device)
        return self._plans[device]

    def _forget_tensors(self) -> None:
        self.changes += 1
        self._tensors.clear()
        self._blocks.clear()


def _count_pages(rows: Sequence[SequenceState]) -> dict[int, int]:
    """The number of rows that have each page; rows may share a page at the same place alone."""
    counts: dict[int, int] = {}
    places: dict[int, int] = {}
    for row in rows:
        for place, page in enumerate(row.pages):
            counts[page] = counts.get(page, 0) + 1
            places.setdefault(page, place)
    for i, row in enumerate(rows):
        for place, page in enumerate(row.pages):
            _check_range(f"rows[{i}].pages[{place}]", page, 0, len(counts) - 1)
            if places[page] != place:
                raise ValueError(
                    f"rows[{i}].pages[{place}]={page}, which is also a page {places[page]}; rows "
                    "may share a page at the same place alone"
                )
    return counts


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{what}={value}; allowed: {low} to {high}")


class RowTensors(NamedTuple):
    """Rows of a table on a device, int32."""

    block_table: Tensor  # [B, max_pages], -1 past a row's last page
    lengths: Tensor  # [B]
    left_pad: Tensor
    ring_read_from: Tensor
    sink_counts: Tensor
    ring_rows: Tensor

    def pick(self, rows: Sequence[int]) -> RowTensors:
        """The given rows, in their order."""
        if tuple(rows) == tuple(range(self.lengths.shape[0])):
            return self
        index = torch.tensor(list(rows), dtype=torch.long, device=self.lengths.device)
        return RowTensors(*(x[index] for x in self))


def common_length(rows: Sequence[SequenceState]) -> int | None:
    """The length of every row, if all have the same and none is padded."""
    lengths = {row.length if not row.left_pad else None for row in rows}
    return lengths.pop() if len(lengths) == 1 else None


def row_tensors(rows: Sequence[SequenceState], device: torch.device) -> RowTensors:
    return RowTensors(_block_table(rows, device), *_counters(rows, device))


def _block_table(rows: Sequence[SequenceState], device: torch.device) -> Tensor:
    width = max([len(row.pages) for row in rows], default=0)
    pages: list[int] = []
    for row in rows:
        pages += row.pages
        pages += [-1] * (width - len(row.pages))
    return _int32(pages, device).view(len(rows), width)


def _counters(rows: Sequence[SequenceState], device: torch.device) -> Sequence[Tensor]:
    """int32 [5, B]: the columns of RowTensors but the first."""
    names = ("length", "left_pad", "ring_read_from", "sink_count")
    numbers = [getattr(row, name) for name in names for row in rows]
    return _int32([*numbers, *range(len(rows))], device).view(5, len(rows)).unbind()


def _int32(numbers: Sequence[int], device: torch.device) -> Tensor:
    """An int32 tensor, made on the CPU whatever torch's default device, and sent in one copy."""
    if not numbers:
        return torch.empty(0, dtype=torch.int32, device=device)
    made = torch.frombuffer(array("i", numbers), dtype=torch.int32)
    return made if made.device == device else made.to(device)
