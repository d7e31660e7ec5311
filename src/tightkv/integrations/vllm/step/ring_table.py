"""RingTable: which exact ring and sinks of the side pool each sequence of a batch owns.

vLLM says for each step which blocks and how many tokens its sequences have, not which sequence
it was that wrote them. So a row is tagged with what it was written for: the block of the newest
token and the length. A sequence that goes on from there finds the row through its block. Whoever
writes a block takes it over, so a freed and reused block never leads to an old row. A sequence
that finds no row is read from the codes in its blocks, which are always right; the sinks of a
cached prefix it takes over from a row that has them for the same first block, or from the saved
sinks of rows that were given to another sequence.

Everything is device tensors of fixed shape, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.pages.layout import RING_SLACK, ring_tokens

STEP = 1 << 20  # more than any batch: step and sequence in one number
NEVER = 1 << 62
NAMED = 1 << 62  # and above: a content that has a name, other than step and sequence
SAVED_SINKS = 4  # places for sinks alone, per row of the pool


class BatchRings(NamedTuple):
    """Ring and sinks of each sequence of a batch, int32 [B]."""

    lengths: Tensor  # with the new tokens; 0 for a sequence that is only a stand-in
    before: Tensor  # without them
    ring_rows: Tensor  # the last row of the pool where a sequence has none of its own
    ring_valid_from: Tensor  # from where the ring held copies before the new tokens
    ring_read_from: Tensor  # what attention reads from the ring when the new tokens are cached
    sink_counts: Tensor
    context_ring_read_from: Tensor  # the same of the tokens before the new ones
    context_sink_counts: Tensor
    sink_sources: Tensor  # whose sinks are to be copied to `ring_rows` first
    saved_at: Tensor  # where those that `ring_rows` had go at the same time; last row: nowhere


def sink_rows(rows: int) -> int:
    """Places for sinks: of each row, of the row that is nobody's, and saved ones."""
    return rows + 1 + SAVED_SINKS * rows


class RingTable:
    """Tags of a pool of `rows` rings; one more row takes the writes of sequences without one."""

    def __init__(
        self,
        cfg: KVQuantConfig,
        rows: int,
        num_blocks: int,
        taken_back: int,
        device: torch.device | str,
        pages_per_block: int = 1,
        window: int | None = None,
    ) -> None:
        """`taken_back`: how many of its newest tokens a sequence may lose between two steps.

        `num_blocks` and the blocks of `step` are pages; `name` and `load` take vLLM's blocks.
        `window`: blocks before a sliding window of so many tokens may belong to others.
        """
        if taken_back > RING_SLACK:
            raise ValueError(f"{taken_back} speculative tokens; supported: up to {RING_SLACK}")
        self.page_size, self.exact_pages, self.sinks = cfg.page_size, cfg.exact_pages, cfg.sinks
        self.ring, self.rows, self.taken_back = ring_tokens(cfg), rows, taken_back
        self.pages, self.pages_per_block, self.window = num_blocks, pages_per_block, window
        self.steps = torch.zeros((), dtype=torch.long, device=device)

        def tensor(size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.long, device=device)

        self.row_of_block = tensor(num_blocks, rows)  # whose tokens a block holds
        self.written_at = tensor(num_blocks, -1)  # step and sequence that wrote it last
        self.content = tensor(num_blocks, -1)  # step and sequence that began it
        self.sink_row = tensor(num_blocks, rows)  # who has the sinks of a first block
        self.sink_content = tensor(sink_rows(rows), -2)  # and of which content of it
        self.block = tensor(rows + 1, -1)  # block of a row's newest token
        self.block_before = tensor(rows + 1, -1)  # and the sequence's block before that one
        self.length = tensor(rows + 1, 0)
        self.ring_valid_from = tensor(rows + 1, 0)
        self.sink_count = tensor(sink_rows(rows), 0)
        self.first_block = tensor(rows + 1, 0)
        self.saved = torch.zeros((), dtype=torch.long, device=device)  # how many ever were
        self.used_at = tensor(rows + 1, -1)
        self.used_at[rows] = NEVER
        # what `ring_kernel` writes to and reads back
        self.claims: Tensor | None = None
        self.order: Tensor | None = None

    def decode_step(
        self,
        block_table: Tensor,
        lengths: Tensor,
        query_start_loc: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> BatchRings:
        """`step` without copies, of at most `taken_back` + 1 tokens each; one kernel on GPUs."""
        if out.device.type == "cpu":
            return self.step(block_table, lengths, query_start_loc, slots, out)
        from tightkv.integrations.vllm.step import ring_kernel

        numbers = STEP, NEVER
        ring_kernel.decode_step(self, block_table, lengths, query_start_loc, slots, out, numbers)
        return BatchRings(*out[:, : len(lengths)].unbind())

    def step(
        self,
        block_table: Tensor,
        lengths: Tensor,
        query_start_loc: Tensor,
        slots: Tensor,
        out: Tensor,
        copies: bool = False,
    ) -> BatchRings:
        """Give the sequences of a batch their rows and tag those with what this step writes.

        `lengths` [B] count the new tokens, row b's being query_start_loc[b] to
        query_start_loc[b + 1] of the batch,
        written at `slots` [N] = block * page_size + offset; a negative slot is not written.
        Block 0 is nobody's. (A block here is one page.) The answer is put into `out`
        int32 [len(BatchRings._fields), at least B]: the same memory at every step. With `copies`
        the layers copy sinks as `sink_sources` and `saved_at` say before anything else.
        """
        size, batch = self.page_size, len(lengths)
        starts = query_start_loc.long()
        counts = starts.diff()
        here = torch.arange(batch, device=lengths.device)
        live = self._live(starts, counts, slots)
        lengths = lengths.long().masked_fill(~live, 0)
        before = (lengths - counts).masked_fill(~live, 0)
        blocks, writers = self._mark_written(starts, slots)

        own, matched = self._find(block_table, before, live, here)
        rows = self._assign(own, matched, live)
        without_row = rows == self.rows

        exact_before = torch.where(matched, self.ring_valid_from[own], before)
        gone = before + self.taken_back >= (self.window or NEVER)  # vLLM may have freed the first
        begun = block_table[:, 0].long().masked_fill(~live | gone, 0)  # first blocks
        keeps_name = gone & matched
        source = self.sink_row[begun]
        had = self.sink_count[own].masked_fill(~matched, 0)
        # A prefix hit may begin with a step that copies nothing: it asks again later.
        lacking = (had < self.sinks) & (had < before) & ~without_row & (begun != 0) & copies
        inherits = lacking & (self.sink_content[source] == self.content[begun])
        source = torch.where(inherits, source, rows)
        had = torch.where(inherits, self.sink_count[source], had)
        sinks_before = torch.minimum(had, before)
        exact_after = torch.maximum(exact_before, lengths - self.ring)
        sinks_after = torch.where(
            before <= sinks_before, lengths.clamp_max(self.sinks), sinks_before
        )
        sinks_after = sinks_after.masked_fill(without_row, 0)
        saved_at = (
            self._save_sinks(rows, matched | without_row)
            if copies
            else rows.new_full(rows.shape, self.rows)
        )

        self.block[rows] = _block_at(block_table, lengths - 1, size)
        self.block_before[rows] = _block_at(block_table, lengths - 1 - size, size)
        self.length[rows] = lengths
        self.ring_valid_from[rows] = exact_after
        self.sink_count[rows] = sinks_after
        named = self.content[begun].masked_fill((sinks_after == 0) | gone, -2)
        self.sink_content[rows] = torch.where(keeps_name, self.sink_content[own], named)
        self.sink_row[begun.masked_fill(sinks_after == 0, 0)] = rows
        self.first_block[rows] = torch.where(keeps_name, self.first_block[own], begun)
        self.used_at[rows] = self.steps
        self.block[self.rows :].fill_(-1)
        self.used_at[self.rows :].fill_(NEVER)
        self.row_of_block[blocks] = torch.cat([rows, rows.new_full((1,), self.rows)])[writers]
        self.steps += 1

        # A few tokens at once (speculative decoding) see the window of the first of them.
        newest = torch.where(counts <= RING_SLACK, before, lengths - 1)
        ring_read_from = torch.maximum(exact_after, self._window(newest))
        # The new tokens have by then overwritten the oldest of the ring.
        context = torch.maximum(exact_after, self._window(before - 1))
        answer = (
            lengths,
            before,
            rows,
            exact_before,
            torch.where(without_row, lengths, torch.minimum(ring_read_from, lengths)),
            sinks_after,
            torch.where(matched, torch.minimum(context, before), before),
            sinks_before,
            source,
            saved_at,
        )
        return BatchRings(*out[:, :batch].copy_(torch.stack(answer)).unbind())

    def name(self, firsts: Mapping[int, int]) -> None:
        """Call the content of sequences' first blocks by name: block -> number of NAMED or more.

        Sinks of a named content are found again (`load`) when its block was given to another.
        """
        pages, names = self._first_pages(firsts)
        source = self.sink_row[pages]
        same = self.sink_content[source] == self.content[pages]
        self.sink_content[source] = torch.where(same, names, self.sink_content[source])
        self.content[pages] = names

    def load(self, blocks: Sequence[int], firsts: Mapping[int, int]) -> None:
        """Blocks were filled from elsewhere: no ring belongs to them, and sinks by name alone.

        `firsts`: names of those that are sequences' first.
        """
        begin = _on_device(blocks, self.steps.device) * self.pages_per_block
        inside = torch.arange(self.pages_per_block, device=self.steps.device)
        filled = (begin[:, None] + inside).flatten()
        for table, number in (  # an assignment of a number would wait for the device
            (self.row_of_block, self.rows),
            (self.sink_row, self.rows),
            (self.content, -1),
        ):
            table.index_fill_(0, filled, number)
        if firsts:
            pages, names = self._first_pages(firsts)
            known = self.sink_content == names[:, None]
            self.sink_row[pages] = torch.where(known.any(1), known.int().argmax(1), self.rows)
            self.content[pages] = names

    def forget_names(self) -> None:
        """No sinks are found again by name: what is stored from now on has other contents."""
        self.sink_content.masked_fill_(self.sink_content >= NAMED, -2)

    def _first_pages(self, firsts: Mapping[int, int]) -> tuple[Tensor, Tensor]:
        both = _on_device([list(firsts), list(firsts.values())], self.steps.device)
        return both[0] * self.pages_per_block, both[1]

    def _live(self, starts: Tensor, counts: Tensor, slots: Tensor) -> Tensor:
        """bool [B]: sequences whose tokens are really written."""
        if not len(slots):
            return counts > 0
        return (counts > 0) & (slots[starts[:-1].clamp_max(len(slots) - 1)] >= 0)

    def _mark_written(self, starts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The block of each token and the sequence that writes it (B: none)."""
        token = torch.arange(len(slots), device=slots.device)
        writers = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        real = (writers < len(starts) - 1) & (slots >= 0)
        writers = writers.masked_fill(~real, len(starts) - 1)
        blocks = (slots.long() // self.page_size).masked_fill(~real, 0)
        stamps = self.steps * STEP + writers
        self.written_at[blocks] = stamps
        self.content[blocks.masked_fill(slots % self.page_size != 0, 0)] = stamps
        return blocks, writers

    def _find(
        self, block_table: Tensor, before: Tensor, live: Tensor, here: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The row that each sequence's last block leads to, and whether it is that sequence's."""
        last = _block_at(block_table, before - 1, self.page_size)
        own = self.row_of_block[last]
        matched = live & (before > 0) & (last > 0) & self._is_ours(last, here)
        block = last
        if self.taken_back:  # the row's newest token may have been in a block after this one
            block = _block_at(block_table, self.length[own] - 1, self.page_size)
            matched &= (self.row_of_block[block] == own) & self._is_ours(block, here)
            # Whoever wrote the last block may have lost the row to another sequence.
            matched &= (block == last) | (self.block_before[own] == last)
        lost = self.length[own] - before
        matched &= self.block[own] == block
        matched &= (lost >= 0) & (lost <= self.taken_back) & (before > self.ring_valid_from[own])
        # Two sequences may share their last full block and so the row: the first keeps it.
        claims = own.masked_fill(~matched, self.rows)
        claimed_by = torch.full_like(self.length, len(here)).scatter_reduce(
            0, claims, here, "amin", include_self=True
        )
        matched &= claimed_by[own] == here
        return own, matched

    def _is_ours(self, block: Tensor, here: Tensor) -> Tensor:
        """A block that another sequence writes in this very step holds no tokens of ours."""
        written, now = self.written_at[block], self.steps * STEP
        return (written < now) | (written == now + here)

    def _assign(self, own: Tensor, matched: Tensor, live: Tensor) -> Tensor:
        """Matched sequences keep their rows; the others get those that were not used longest."""
        kept = own.masked_fill(~matched, self.rows)
        used_at = self.used_at.index_fill(0, kept, NEVER)
        oldest_first = torch.argsort(used_at, stable=True)
        free = (used_at < NEVER).sum()
        wanting = live & ~matched
        rank = (wanting.cumsum(0) - 1).clamp_min(0)
        fresh = oldest_first[rank.clamp_max(self.rows)]
        return torch.where(wanting & (rank < free), fresh, kept)

    def _save_sinks(self, rows: Tensor, keeps: Tensor) -> Tensor:
        """Where the sinks go that these rows had for sequences that are gone; the oldest goes.

        Sinks that another row has too, or whose first block was written again, go nowhere; but
        those of a named content go where there are none of it.
        """
        nowhere = self.rows
        if not self.rows or not self.sinks:
            return rows.new_full(rows.shape, nowhere)
        block, content = self.first_block[rows], self.sink_content[rows]
        there = content == self.content[block]
        named = content >= NAMED
        saved = (self.sink_content[nowhere + 1 :] == content[:, None]).any(1)
        leaves = torch.where(named, ~saved, there & (self.sink_row[block] == rows))
        leaves &= ~keeps & (self.sink_count[rows] > 0)
        place = (self.saved + leaves.cumsum(0) - 1) % (SAVED_SINKS * self.rows) + self.rows + 1
        place = place.masked_fill(~leaves, nowhere)
        self.sink_row[block.masked_fill(~(leaves & there), 0)] = place
        self.sink_content[place] = content.masked_fill(~leaves, -2)
        self.sink_count[place] = self.sink_count[rows]
        self.saved += leaves.sum()
        return place

    def _window(self, newest: Tensor) -> Tensor:
        """Where the exact window of token `newest` begins."""
        page = torch.div(newest, self.page_size, rounding_mode="floor")
        return (page - self.exact_pages + 1) * self.page_size


class GroupRings:
    """What layers that run with the same metadata share."""

    table: RingTable | None = None
    """Made with the first step, when vLLM has said how many blocks there are."""


def _on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """From pinned memory: of any other, a copy would wait for all that the device has to do."""
    host = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda", device="cpu")
    return host.to(device, non_blocking=True)


def _block_at(block_table: Tensor, position: Tensor, size: int) -> Tensor:
    """The block that holds a sequence's token `position` (that of token 0 for -1)."""
    index = (position.clamp_min(0) // size).clamp_max(block_table.shape[1] - 1)
    return block_table.gather(1, index[:, None]).squeeze(1).long()
