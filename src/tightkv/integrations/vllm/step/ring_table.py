"""RingTable: which ring and sinks of the side pool each sequence of a batch owns.

vLLM says for each step which blocks and how many tokens its sequences have, not which sequence
it was that wrote them. So a row is tagged with what it was written for: the block of the newest
token and the length. A sequence that goes on from there finds the row through its block. Whoever
writes a block takes it over, so a freed and reused block never leads to an old row. A sequence
that finds no row is read from the codes in its blocks, which are always right; the sinks of a
cached prefix it takes over from a row that has them for the same first block, or from the saved
sinks of rows that were given to another sequence.

Everything is device tensors of fixed shape, and no step waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.step.step_sealing import SealQueue
from tightkv.pages.layout import RING_SLACK, ring_tokens, window_step

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
    """The number of places for sinks: one per row, one for no row, and those of saved sinks."""
    return rows + 1 + SAVED_SINKS * rows


def ring_size(cfg: KVQuantConfig, taken_back: int) -> int:
    """Tokens of a ring. Spare ones are for those that may be taken back.

    With one exact page they are also for new tokens beside a page that is sealed meanwhile.
    """
    return ring_tokens(cfg, spare=taken_back > 0 or cfg.exact_pages == 1)


class RingTable:
    """Tags of a pool of `rows` rings; a last row takes the writes of sequences without a ring."""

    def __init__(
        self,
        cfg: KVQuantConfig,
        rows: int,
        num_blocks: int,
        taken_back: int,
        device: torch.device | str,
        pages_per_block: int = 1,
        window: int | None = None,
        seals_later: bool = False,
    ) -> None:
        """`taken_back`: how many of its newest tokens a sequence may lose between two steps.

        `num_blocks` and the blocks of `step` are pages; `name` and `load` take vLLM's blocks.
        `window`: blocks before a sliding window of so many tokens may belong to others.
        `seals_later`: layers leave the sealing of pages to later steps (`SealQueue`).
        """
        if taken_back > RING_SLACK:
            raise ValueError(f"{taken_back} speculative tokens; supported: up to {RING_SLACK}")
        self.page_size, self.exact_pages, self.sinks = cfg.page_size, cfg.exact_pages, cfg.sinks
        self.ring, self.rows, self.taken_back = ring_size(cfg, taken_back), rows, taken_back
        self.window_step = window_step(cfg)
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
        self.queue = SealQueue(cfg, rows, taken_back, device) if seals_later else None
        # what `ring_kernel` writes to and reads back
        self.claims: Tensor | None = None
        self.order: Tensor | None = None

    def step(
        self,
        block_table: Tensor,
        lengths: Tensor,
        query_start_loc: Tensor,
        slots: Tensor,
        out: Tensor,
        copies: bool = False,
        drafting: bool = False,
    ) -> BatchRings:
        """Give the sequences of a batch their rows and tag those with what this step writes.

        `lengths` [B] count the new tokens. Those of sequence b are query_start_loc[b] to
        query_start_loc[b + 1] of the batch, written at `slots` [N] = block * page_size + offset,
        or not written if that is negative. Block 0 has no owner. (A block here is one page.)
        The answer is put into `out` int32 [len(BatchRings._fields), at least B]: the same memory
        at every step. With `copies` sinks are to be copied first, as `sink_sources` and `saved_at`
        say, and appends seal pages at once. On a GPU `ring_kernel` does all this. `drafting`: the
        model's layers do not run, nor does what they seal first.
        """
        if out.is_cuda:
            from tightkv.integrations.vllm.step import ring_kernel

            given = block_table, lengths, query_start_loc, slots
            return ring_kernel.step(self, *given, out, copies, drafting)
        batch = len(lengths)
        starts = query_start_loc.long()
        counts = starts.diff()
        here = torch.arange(batch, device=lengths.device)
        live = counts > 0  # sequences whose tokens are really written
        if len(slots):
            live &= slots[starts[:-1].clamp_max(len(slots) - 1)] >= 0
        lengths = lengths.long().masked_fill(~live, 0)
        before = (lengths - counts).masked_fill(~live, 0)
        blocks, writers = self._mark_written(starts, slots)

        own, matched = self._find(block_table, before, live, here)
        if self.queue is not None and not drafting:
            self.queue.choose(self, own, matched, before, live, copies)
        rows = self._assign(own, matched, live)
        without_row = rows == self.rows

        exact_before = torch.where(matched, self.ring_valid_from[own], before)
        exact_after = torch.maximum(exact_before, lengths - self.ring)
        gone = before + self.taken_back >= (self.window or NEVER)  # vLLM may have freed the first
        begun = block_table[:, 0].long().masked_fill(~live | gone, 0)  # first blocks
        source, had = rows, self.sink_count[own].masked_fill(~matched, 0)
        if copies:
            source, had = self._inherit_sinks(rows, had, before, begun)
        sinks_before = torch.minimum(had, before)
        sinks_after = torch.where(
            before <= sinks_before, lengths.clamp_max(self.sinks), sinks_before
        ).masked_fill(without_row, 0)
        saved_at = rows.new_full(rows.shape, self.rows)
        if copies:
            saved_at = self._save_sinks(rows, matched | without_row)

        if self.queue is not None and copies:
            self.queue.note_sealed(rows, lengths)
        elif self.queue is not None:
            first, last = (_block_at(block_table, x, self.page_size) for x in (before, lengths - 1))
            self.queue.note_pages(rows, matched, before, lengths, first, last)
        self._tag(rows, block_table, lengths, exact_after)
        self._tag_sinks(rows, own, begun, sinks_after, gone, gone & matched)
        self.row_of_block[blocks] = torch.cat([rows, rows.new_full((1,), self.rows)])[writers]
        self.steps += 1

        # A few tokens at once (drafts and one before them) see the window of the first of them.
        newest = torch.where(counts <= RING_SLACK + 1, before, lengths - 1)
        read_from = torch.maximum(exact_after, self._window(newest))
        # The new tokens have by then overwritten the oldest of the ring.
        context = torch.maximum(exact_after, self._window(before - 1))
        answer = (
            lengths,
            before,
            rows,
            exact_before,
            torch.where(without_row, lengths, torch.minimum(read_from, lengths)),
            sinks_after,
            torch.where(matched, torch.minimum(context, before), before),
            sinks_before,
            source,
            saved_at,
        )
        return BatchRings(*out[:, :batch].copy_(torch.stack(answer)).unbind())

    def name(self, firsts: Mapping[int, int]) -> None:
        """Name the contents of sequences' first blocks: block -> a number from NAMED on.

        Sinks of a named content are found again (`load`) after its block was given away.
        """
        pages, names = self._first_pages(firsts)
        source = self.sink_row[pages]
        same = self.sink_content[source] == self.content[pages]
        self.sink_content[source] = torch.where(same, names, self.sink_content[source])
        self.content[pages] = names

    def load(self, blocks: Sequence[int], firsts: Mapping[int, int]) -> None:
        """Note blocks that a connector has filled: they have no ring, and sinks by name alone.

        `firsts`: first blocks of sequences -> name of their content.
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
        """Find no sinks by their old names: contents that are stored from now on are others."""
        self.sink_content.masked_fill_(self.sink_content >= NAMED, -2)

    def _first_pages(self, firsts: Mapping[int, int]) -> tuple[Tensor, Tensor]:
        both = _on_device([list(firsts), list(firsts.values())], self.steps.device)
        return both[0] * self.pages_per_block, both[1]

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
        """The row that each sequence's last block leads to, and whether the sequence owns it."""
        last = _block_at(block_table, before - 1, self.page_size)
        own = self.row_of_block[last]
        matched = live & (before > 0) & (last > 0) & self._is_ours(last, here)
        block = last
        if self.taken_back:  # the row's newest token may have been in a block after this one
            block = _block_at(block_table, self.length[own] - 1, self.page_size)
            matched &= (self.row_of_block[block] == own) & self._is_ours(block, here)
            # The writer of the last block may have lost the row to another sequence.
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
        """Whether a block holds the sequence's tokens: no other sequence writes it in this step."""
        written, now = self.written_at[block], self.steps * STEP
        return (written < now) | (written == now + here)

    def _assign(self, own: Tensor, matched: Tensor, live: Tensor) -> Tensor:
        """The rows of all sequences: matched ones keep theirs, others get the least recent ones."""
        kept = own.masked_fill(~matched, self.rows)
        used_at = self.used_at.index_fill(0, kept, NEVER)
        oldest_first = torch.argsort(used_at, stable=True)
        free = (used_at < NEVER).sum()
        wanting = live & ~matched
        rank = (wanting.cumsum(0) - 1).clamp_min(0)
        fresh = oldest_first[rank.clamp_max(self.rows)]
        return torch.where(wanting & (rank < free), fresh, kept)

    def _inherit_sinks(
        self, rows: Tensor, had: Tensor, before: Tensor, begun: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The row whose sinks each sequence takes over, its own if it lacks none, and how many."""
        source = self.sink_row[begun]
        # A prefix hit may begin with a step that copies nothing: it asks again later.
        lacking = (had < self.sinks) & (had < before) & (rows != self.rows) & (begun != 0)
        inherits = lacking & (self.sink_content[source] == self.content[begun])
        source = torch.where(inherits, source, rows)
        return source, torch.where(inherits, self.sink_count[source], had)

    def _save_sinks(self, rows: Tensor, keeps: Tensor) -> Tensor:
        """The places where sinks of former sequences of these rows are saved, oldest ones replaced.

        Sinks that another row has too, or whose first block was written again, are not saved.
        Sinks of a named content are, unless some of it are saved already.
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

    def _tag_sinks(
        self,
        rows: Tensor,
        own: Tensor,
        begun: Tensor,
        sinks: Tensor,
        gone: Tensor,
        keeps_name: Tensor,
    ) -> None:
        """Tag rows with how many sinks they hold, and of which first block and content of it.

        `gone`: the first block may be another's by now. `keeps_name`: the row has the tag already.
        """
        self.sink_count[rows] = sinks
        named = self.content[begun].masked_fill((sinks == 0) | gone, -2)
        self.sink_content[rows] = torch.where(keeps_name, self.sink_content[own], named)
        self.sink_row[begun.masked_fill(sinks == 0, 0)] = rows
        self.first_block[rows] = torch.where(keeps_name, self.first_block[own], begun)

    def _tag(
        self, rows: Tensor, block_table: Tensor, lengths: Tensor, ring_valid_from: Tensor
    ) -> None:
        """Tag rows with the sequences that own them after this step; none owns the last row."""
        size = self.page_size
        self.block[rows] = _block_at(block_table, lengths - 1, size)
        self.block_before[rows] = _block_at(block_table, lengths - 1 - size, size)
        self.length[rows] = lengths
        self.ring_valid_from[rows] = ring_valid_from
        self.used_at[rows] = self.steps
        self.block[self.rows :].fill_(-1)
        self.used_at[self.rows :].fill_(NEVER)

    def _window(self, newest: Tensor) -> Tensor:
        """Where the window of token `newest` begins."""
        end = torch.div(newest, self.window_step, rounding_mode="floor") + 1
        return end * self.window_step - self.exact_pages * self.page_size


def _on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers as int64 on a device. A copy from memory that is not pinned would wait for it."""
    host = torch.tensor(numbers, dtype=torch.long, pin_memory=device.type == "cuda", device="cpu")
    return host.to(device, non_blocking=True)


def _block_at(block_table: Tensor, position: Tensor, size: int) -> Tensor:
    """The block that holds a sequence's token `position` (that of token 0 for -1)."""
    index = (position.clamp_min(0) // size).clamp_max(block_table.shape[1] - 1)
    return block_table.gather(1, index[:, None]).squeeze(1).long()
