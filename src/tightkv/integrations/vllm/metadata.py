"""TightMetadata: one step's batch as the layers see it, made once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tightkv.integrations.vllm.cuts import Cut
from tightkv.integrations.vllm.rows import BatchRows


@dataclass(frozen=True)
class Sequences:
    """Neighbouring sequences of a batch that are treated alike."""

    tokens: slice  # of the batch
    first: Tensor  # int32 [B + 1], where each sequence's tokens begin among these
    most: int  # tokens of one sequence
    fresh: bool  # the new tokens are read from the batch, not from the cache (prefill)
    block_table: Tensor  # int32 [B, max_pages]
    starts: Tensor  # int32 [B], zeros
    rows: BatchRows
    length: int | None = None  # tokens before the new ones, of a single sequence


@dataclass(frozen=True)
class TightMetadata:
    parts: tuple[Sequences, ...]
    num_actual_tokens: int
    inherited: tuple[Tensor, Tensor] | None = None  # rows of sinks [B]: copied to, copied from


def part_of(
    cut: Cut, first: Sequence[int], starts: Tensor, pages: Tensor, rows: BatchRows, zeros: Tensor
) -> Sequences:
    """The sequences of a cut; `first` is where each one's tokens begin, `starts` on the device."""
    begin, end = cut.begin, cut.end
    mine = starts[begin : end + 1]
    return Sequences(
        tokens=slice(first[begin], first[end]),
        first=mine - first[begin] if first[begin] else mine,
        most=cut.most,
        fresh=cut.fresh,
        block_table=pages[begin:end],
        starts=zeros[: end - begin],
        rows=BatchRows(*(column[begin:end] for column in rows)),
        length=cut.length,
    )
