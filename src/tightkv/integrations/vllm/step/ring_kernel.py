"""A step of `RingTable` as one kernel, in torch a hundred small ones in a row; `SinkCopies.copy`.

One program of a step has all sequences of the batch. Its warps see each other's writes after a
barrier.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.integrations.vllm.step.ring_table import NAMED, NEVER, STEP, BatchRings, RingTable
from tightkv.pages.layout import RING_SLACK

NOBODY = 1 << 30  # more than any batch
_SINKS_TILE = 8192  # words of sinks that a program holds, twice


@triton.jit
def _block_at(block_table, position, columns, stride, here, there, PAGE: tl.constexpr):
    """The block that holds each sequence's token `position` (that of token 0 for -1)."""
    index = tl.minimum(tl.maximum(position, 0) // PAGE, columns - 1)
    return tl.load(block_table + here * stride + index, mask=there, other=0).to(tl.int64)


@triton.jit
def _window(newest, STEP: tl.constexpr, TOKENS: tl.constexpr):
    """Where the exact window of token `newest` >= -1 begins."""
    return (newest + STEP) // STEP * STEP - TOKENS


@triton.jit
def _slot(slots, page, start, before, after, live, tokens, PAGE: tl.constexpr):
    """The slot of the first new token in each sequence's page; -1 if none is written there."""
    at = tl.maximum(before, page * PAGE)
    token = start + at - before
    return tl.load(slots + token, mask=live & (at < after) & (token < tokens), other=-1)


@triton.jit
def _is_saved(sink_content, content, rows, sink_rows):
    """Whether saved sinks have each content."""
    count = (content < 0).to(tl.int32) * 0
    for place in range(rows + 1, sink_rows, 16):
        saved = place + tl.arange(0, 16)
        theirs = tl.load(sink_content + saved, mask=saved < sink_rows, other=-3)
        count += tl.sum((theirs[None, :] == content[:, None]).to(tl.int32), 1)
    return count > 0


@triton.jit
def _longest_unused(used_at, order, rank, wanting, rows, ROWS: tl.constexpr):
    """The row at place `rank` in the order of last use, oldest first."""
    row = tl.arange(0, ROWS)
    mine = tl.load(used_at + row, mask=row < rows, other=0)
    place = tl.zeros([ROWS], tl.int32)
    for first in range(0, rows, 16):
        other = first + tl.arange(0, 16)
        theirs = tl.load(used_at + other, mask=other < rows, other=0)
        sooner = theirs[None, :] < mine[:, None]
        sooner |= (theirs[None, :] == mine[:, None]) & (other[None, :] < row[:, None])
        place += tl.sum((sooner & (other < rows)[None, :]).to(tl.int32), 1)
    tl.store(order + place, row.to(tl.int64), mask=row < rows)
    tl.debug_barrier()
    return tl.load(order + rank, mask=wanting & (rank < rows), other=0)


@triton.jit
def _choose_pages(
    table_length, row_of_block, ring_valid_from, sealed_to, pages, chosen, budget, rows,
    ROWS: tl.constexpr, KEPT: tl.constexpr, PAGE: tl.constexpr, EXACT_PAGES: tl.constexpr,
):  # fmt: skip
    """See `SealQueue.choose`; `table_length` has what is left of each row's sequence."""
    row = tl.arange(0, ROWS)
    known = row < rows
    end = tl.load(table_length + row, mask=known, other=0) // PAGE * PAGE
    sealed = tl.minimum(tl.load(sealed_to + row, mask=known, other=0), end)
    exact_from = tl.load(ring_valid_from + row, mask=known, other=0)
    count = tl.zeros([ROWS], tl.int32)
    late = tl.zeros([ROWS], tl.int32)
    for j in tl.static_range(KEPT):
        at = sealed + j * PAGE
        page = tl.load(pages + row * KEPT + at // PAGE % KEPT, mask=known, other=0)
        owner = tl.load(row_of_block + page, mask=known, other=-1)
        due = (at < end) & (owner == row) & (exact_from < at + PAGE)
        count += due.to(tl.int32)
        late += (due & (at + (EXACT_PAGES - 1) * PAGE <= end)).to(tl.int32)
    budget = tl.where(tl.sum(late) > 0, ROWS * KEPT, budget)
    place = tl.cumsum(count, 0) - count
    passed = sealed
    for j in tl.static_range(KEPT):
        at = sealed + j * PAGE
        page = tl.load(pages + row * KEPT + at // PAGE % KEPT, mask=known, other=0)
        owner = tl.load(row_of_block + page, mask=known, other=-1)
        due = (at < end) & (owner == row) & (exact_from < at + PAGE)
        take = due & (place < budget)
        to = chosen + 4 * (place + 1)
        tl.store(to, row, mask=take)
        tl.store(to + 1, at.to(tl.int32), mask=take)
        tl.store(to + 2, page.to(tl.int32), mask=take)
        tl.store(to + 3, exact_from.to(tl.int32), mask=take)
        goes_on = (passed == at) & (at < end) & (take | (due == 0))
        passed = tl.where(goes_on, at + PAGE, passed)
        place += due.to(tl.int32)
    tl.store(chosen, tl.minimum(tl.sum(count), budget))
    tl.store(sealed_to + row, passed, mask=known)


# one binary for all batches
@triton.jit(
    do_not_specialize=[
        "block_table", "lengths", "query_start_loc", "slots", "batch", "budget", "tokens",
        "columns", "table_stride",
    ]
)  # fmt: skip
def _step_kernel(
    block_table, lengths, query_start_loc, slots, out,
    steps, row_of_block, written_at, content, sink_row, sink_content,
    block, block_before, length, ring_valid_from, sink_count, first_block, used_at, claims, order,
    saved, sealed_to, pages, hurries, chosen, budget,
    batch, tokens, columns, table_stride, out_stride, rows, sink_rows,
    BATCH: tl.constexpr, ROWS: tl.constexpr, TAKEN_BACK: tl.constexpr, COPIES: tl.constexpr,
    PAGE: tl.constexpr, EXACT_PAGES: tl.constexpr, RING: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, SLACK: tl.constexpr, STEP: tl.constexpr, NEVER: tl.constexpr,
    NAMED: tl.constexpr, NOBODY: tl.constexpr, KEPT: tl.constexpr,
    WINDOW_STEP: tl.constexpr,
):  # fmt: skip
    """See `RingTable.step`; the names are the same. `KEPT` is 0 where nothing is sealed later, and
    `budget` is negative where no pages are chosen."""
    here = tl.arange(0, BATCH)
    there = here < batch
    start = tl.load(query_start_loc + here, mask=there, other=0).to(tl.int64)
    counts = tl.load(query_start_loc + here + 1, mask=there, other=0).to(tl.int64) - start
    written = there & (counts > 0) & (tokens > 0)
    slot = tl.load(slots + tl.minimum(start, tokens - 1), mask=written, other=0)
    live = there & (counts > 0) & (slot >= 0)
    after = tl.where(live, tl.load(lengths + here, mask=there, other=0).to(tl.int64), 0)
    before = tl.where(live, after - counts, 0)
    now = tl.load(steps)
    stamp = now * STEP + here
    first_page = before // PAGE
    if COPIES:  # else a sequence has at most TAKEN_BACK + 1 new tokens
        most_pages = tl.max(tl.where(live, (after - 1) // PAGE - first_page + 1, 0), 0)
    else:
        most_pages = 1 + (TAKEN_BACK + PAGE - 1) // PAGE
    for j in range(most_pages):
        slot = _slot(slots, first_page + j, start, before, after, live, tokens, PAGE)
        tl.store(written_at + slot // PAGE, stamp, mask=slot >= 0)
        tl.store(content + slot // PAGE, stamp, mask=(slot >= 0) & (slot % PAGE == 0))
    tl.debug_barrier()

    # the row that each sequence's last block leads to, and whether it is that sequence's
    last = _block_at(block_table, before - 1, columns, table_stride, here, there, PAGE)
    own = tl.load(row_of_block + last)
    matched = live & (before > 0) & (last > 0)
    by = tl.load(written_at + last)
    matched &= (by < now * STEP) | (by == stamp)
    had = tl.load(length + own)
    if TAKEN_BACK > 0:  # the row's newest token may have been in a block after this one
        newest = _block_at(block_table, had - 1, columns, table_stride, here, there, PAGE)
        matched &= tl.load(row_of_block + newest) == own
        matched &= (newest == last) | (tl.load(block_before + own) == last)
        last = newest
        by = tl.load(written_at + last)
        matched &= (by < now * STEP) | (by == stamp)
    lost = had - before
    started = tl.load(ring_valid_from + own)
    matched &= tl.load(block + own) == last
    matched &= (lost >= 0) & (lost <= TAKEN_BACK) & (before > started)
    claimed = matched
    tl.atomic_min(claims + own, here, mask=claimed)
    tl.debug_barrier()
    matched &= tl.load(claims + own, cache_modifier=".cg") == here
    kept = tl.where(matched, own, rows)
    tl.store(used_at + own, NEVER, mask=matched)
    tl.debug_barrier()
    tl.store(claims + own, NOBODY, mask=claimed)

    wanting = live & (matched == 0)
    if KEPT > 0:  # noqa: SIM102 - one is known when this is compiled
        if budget >= 0:  # pages to seal before this step's tokens are appended
            tl.store(length + own, before, mask=matched)
            newcomers = tl.minimum(tl.sum(wanting.to(tl.int32)), 1)
            most = tl.where((newcomers > 0) | (tl.load(hurries) > 0), NOBODY, budget)
            tl.debug_barrier()
            _choose_pages(
                length, row_of_block, ring_valid_from, sealed_to, pages, chosen, most, rows,
                ROWS, KEPT, PAGE, EXACT_PAGES,
            )  # fmt: skip
            tl.store(hurries, newcomers.to(tl.int64))

    # the others get the rows that were not used longest
    mine = kept
    if tl.sum(wanting.to(tl.int32)) > 0:
        row = tl.arange(0, ROWS)
        unused = tl.load(used_at + row, mask=row < rows, other=NEVER) < NEVER
        free = tl.sum(unused.to(tl.int32))
        rank = tl.maximum(tl.cumsum(wanting.to(tl.int32), 0) - 1, 0)
        fresh = _longest_unused(used_at, order, rank, wanting, rows, ROWS)
        mine = tl.where(wanting & (rank < free), fresh, kept)
    has_row = mine < rows

    gone = before + TAKEN_BACK >= WINDOW
    keeps_name = gone & matched
    first = live & (gone == 0)
    begun = tl.load(block_table + here * table_stride, mask=first, other=0).to(tl.int64)
    exact_before = tl.where(matched, started, before)
    sinks_before = tl.where(matched, tl.load(sink_count + own), 0)
    source = mine
    saved_at = tl.zeros([BATCH], tl.int64) + rows
    if COPIES:  # sinks that are taken over, and those of former sequences that are saved
        named_so = tl.load(content + begun)
        other = tl.load(sink_row + begun)
        inherits = (sinks_before < SINKS) & (sinks_before < before) & has_row & (begun != 0)
        inherits &= tl.load(sink_content + other) == named_so
        source = tl.where(inherits, other, mine)
        sinks_before = tl.where(inherits, tl.load(sink_count + other), sinks_before)
        old_count = tl.load(sink_count + mine)
        old_block = tl.load(first_block + mine)
        old = tl.load(sink_content + mine)
        is_there = old == tl.load(content + old_block)
        leaves = is_there & (tl.load(sink_row + old_block) == mine)
        left = has_row & (matched == 0) & (old_count > 0)
        named = left & (old >= NAMED)
        if tl.sum(named.to(tl.int32)) > 0:
            leaves = tl.where(named, _is_saved(sink_content, old, rows, sink_rows) == 0, leaves)
        leaves &= left
        ever = tl.load(saved)
        rank = ever + tl.cumsum(leaves.to(tl.int64), 0) - 1
        place = rank % tl.maximum(sink_rows - rows - 1, 1) + rows + 1
        saved_at = tl.where(leaves, place, rows)
        tl.debug_barrier()
        tl.store(sink_row + old_block, place, mask=leaves & is_there)
        tl.store(sink_content + place, old, mask=leaves)
        tl.store(sink_count + place, old_count, mask=leaves)
        tl.store(saved, ever + tl.sum(leaves.to(tl.int64)))
    sinks_before = tl.minimum(sinks_before, before)
    exact_after = tl.maximum(exact_before, after - RING)
    sinks_after = tl.where(before <= sinks_before, tl.minimum(after, SINKS), sinks_before)
    sinks_after = tl.where(has_row, sinks_after, 0)
    newest = _block_at(block_table, after - 1, columns, table_stride, here, there, PAGE)
    older = _block_at(block_table, after - 1 - PAGE, columns, table_stride, here, there, PAGE)
    name = tl.where((sinks_after == 0) | gone, -2, tl.load(content + begun))
    name = tl.where(keeps_name, tl.load(sink_content + own), name)
    begun_at = tl.where(keeps_name, tl.load(first_block + own), begun)
    tl.debug_barrier()

    if KEPT > 0:
        if COPIES:  # the append seals all
            tl.store(sealed_to + mine, after // PAGE * PAGE, mask=has_row)
        else:
            entered = _block_at(block_table, before, columns, table_stride, here, there, PAGE)
            tl.store(sealed_to + mine, first_page * PAGE, mask=has_row & (matched == 0))
            tl.store(pages + mine * KEPT + first_page % KEPT, entered, mask=has_row)
            tl.store(pages + mine * KEPT + (after - 1) // PAGE % KEPT, newest, mask=has_row)

    tl.store(block + mine, newest, mask=has_row)
    tl.store(block_before + mine, older, mask=has_row)
    tl.store(length + mine, after, mask=has_row)
    tl.store(ring_valid_from + mine, exact_after, mask=has_row)
    tl.store(sink_count + mine, sinks_after, mask=has_row)
    tl.store(sink_content + mine, name, mask=has_row)
    tl.store(sink_row + begun, mine, mask=(sinks_after > 0) & (gone == 0))
    tl.store(first_block + mine, begun_at, mask=has_row)
    tl.store(used_at + mine, now, mask=has_row)
    for j in range(most_pages):
        slot = _slot(slots, first_page + j, start, before, after, live, tokens, PAGE)
        tl.store(row_of_block + slot // PAGE, mine, mask=slot >= 0)
    tl.store(steps, now + 1)

    seen = tl.where(counts <= SLACK + 1, before, after - 1)
    ring_read_from = tl.maximum(exact_after, _window(seen, WINDOW_STEP, EXACT_PAGES * PAGE))
    ring_read_from = tl.minimum(ring_read_from, after)
    context = tl.maximum(exact_after, _window(before - 1, WINDOW_STEP, EXACT_PAGES * PAGE))
    context = tl.minimum(context, before)
    to = out + here
    tl.store(to, after.to(tl.int32), mask=there)
    tl.store(to + out_stride, before.to(tl.int32), mask=there)
    tl.store(to + 2 * out_stride, mine.to(tl.int32), mask=there)
    tl.store(to + 3 * out_stride, exact_before.to(tl.int32), mask=there)
    tl.store(to + 4 * out_stride, tl.where(has_row, ring_read_from, after).to(tl.int32), mask=there)
    tl.store(to + 5 * out_stride, sinks_after.to(tl.int32), mask=there)
    tl.store(to + 6 * out_stride, tl.where(matched, context, before).to(tl.int32), mask=there)
    tl.store(to + 7 * out_stride, sinks_before.to(tl.int32), mask=there)
    tl.store(to + 8 * out_stride, source.to(tl.int32), mask=there)
    tl.store(to + 9 * out_stride, saved_at.to(tl.int32), mask=there)


def step(
    table: RingTable,
    block_table: Tensor,
    lengths: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    out: Tensor,
    copies: bool = False,
    drafting: bool = False,
) -> BatchRings:
    """`RingTable.step`; without copies a sequence has at most `taken_back` + 1 new tokens.

    The new tokens of a sequence that lie in one page are all written or none is.
    """
    if table.claims is None:
        device = lengths.device
        table.claims = torch.full((table.rows + 1,), NOBODY, dtype=torch.int32, device=device)
        table.order = torch.zeros(table.rows + 1, dtype=torch.long, device=device)
    size = triton.next_power_of_2(max(16, out.shape[1]))
    queue, kept = table.queue, 0
    waiting: tuple[Tensor, ...] = (table.length,) * 4  # of no use
    budget = 0
    if queue is not None:
        waiting = (queue.sealed_to, queue.pages, queue.hurries, queue.chosen)
        budget, kept = NOBODY if copies else queue.budget(len(lengths)), queue.kept
        budget = -1 if drafting else budget
    _step_kernel[(1,)](
        block_table, lengths, query_start_loc, slots, out,
        table.steps, table.row_of_block, table.written_at, table.content, table.sink_row,
        table.sink_content, table.block, table.block_before, table.length, table.ring_valid_from,
        table.sink_count, table.first_block, table.used_at, table.claims, table.order,
        table.saved, *waiting, budget, len(lengths), len(slots), block_table.shape[1],
        block_table.stride(0), out.stride(0), table.rows, len(table.sink_count), BATCH=size,
        ROWS=triton.next_power_of_2(max(16, table.rows)), TAKEN_BACK=table.taken_back,
        COPIES=copies, PAGE=table.page_size, EXACT_PAGES=table.exact_pages, RING=table.ring,
        SINKS=table.sinks, WINDOW=table.window or NEVER, SLACK=RING_SLACK, STEP=STEP, NEVER=NEVER,
        NAMED=NAMED, NOBODY=NOBODY, KEPT=kept, WINDOW_STEP=table.window_step,
        num_warps=min(8, size // 32 or 1),
    )  # fmt: skip
    return BatchRings(*out[:, : len(lengths)].unbind())


# one binary for all batches
@triton.jit(do_not_specialize=["saved_at", "own", "sources", "batch", "nobody"])
def _copy_kernel(
    table, saved_at, own, sources, batch, nobody, BATCH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some columns of one tensor of sinks: no other program reads or writes them."""
    tensor = tl.program_id(0)
    i = tl.arange(0, BATCH)
    row = tl.load(own + i, mask=i < batch, other=0).to(tl.int64)
    place = tl.load(saved_at + i, mask=i < batch, other=0).to(tl.int64)
    source = tl.load(sources + i, mask=i < batch, other=0).to(tl.int64)
    saves = (i < batch) & (place != nobody)
    takes = (i < batch) & (source != row)
    if tl.sum((saves | takes).to(tl.int32)) == 0:
        return
    words = tl.load(table + 2 * tensor + 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    saves = saves[:, None] & (column < words)[None, :]
    takes = takes[:, None] & (column < words)[None, :]
    sinks = tl.load(table + 2 * tensor).to(tl.pointer_type(tl.int32))
    at = sinks + row[:, None] * words + column[None, :]
    leaving = tl.load(at, mask=saves)
    taken = tl.load(sinks + source[:, None] * words + column[None, :], mask=takes)
    tl.debug_barrier()
    tl.store(sinks + place[:, None] * words + column[None, :], leaving, mask=saves)
    tl.store(at, taken, mask=takes)


def copy_sinks(table: Tensor, rows: BatchRings, nobody: int, most_words: int, most: int) -> None:
    """`table` int64 [tensors, 2]: the address of each, and 4-byte words of one of its places."""
    sequences = triton.next_power_of_2(max(16, most))
    columns = max(_SINKS_TILE // sequences, 4)
    grid = (len(table), triton.cdiv(most_words, columns))
    _copy_kernel[grid](
        table, rows.saved_at, rows.ring_rows, rows.sink_sources, len(rows.saved_at), nobody,
        BATCH=sequences, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
