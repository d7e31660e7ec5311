"""`SinkCopies.copy` as one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from tightkv.integrations.vllm.step.ring_table import BatchRings

_TILE = 8192  # words that a program holds, twice


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


def copy(table: Tensor, rows: BatchRings, nobody: int, most_words: int, most: int) -> None:
    """`table` int64 [tensors, 2]: the address of each, and 4-byte words of one of its places."""
    sequences = triton.next_power_of_2(max(16, most))
    columns = max(_TILE // sequences, 4)
    grid = (len(table), triton.cdiv(most_words, columns))
    _copy_kernel[grid](
        table, rows.saved_at, rows.ring_rows, rows.sink_sources, len(rows.saved_at), nobody,
        BATCH=sequences, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
