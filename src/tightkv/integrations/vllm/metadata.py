"""TightMetadata: one step's batch as the layers see it, made once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tightkv.integrations.vllm.batch_split import PartRange
from tightkv.integrations.vllm.ring_table import BatchRings


@dataclass(frozen=True)
class BatchPart:
    """Neighbouring sequences of a batch that are treated alike."""

    tokens: slice  # of the batch
    query_start_loc: Tensor  # int32 [B + 1], where each sequence's tokens begin among these
    max_query_len: int  # new tokens of one sequence
    is_prefill: bool  # the new tokens are read from the batch, not from the cache (prefill)
    block_table: Tensor  # int32 [B, max_pages]
    starts: Tensor  # int32 [B], zeros
    rows: BatchRings
    context_len: int | None = None  # tokens before the new ones, of a single sequence


@dataclass(frozen=True)
class TightMetadata:
    parts: tuple[BatchPart, ...]
    num_actual_tokens: int
    inherited: tuple[Tensor, Tensor] | None = None  # rows of sinks [2 B]: copied to, copied from
    built_from: tuple[Tensor, ...] = ()  # vLLM's block table, lengths, query_start_loc and slots


def make_part(
    part: PartRange,
    query_start_loc_cpu: Sequence[int],
    query_start_loc: Tensor,
    pages: Tensor,
    rows: BatchRings,
    zeros: Tensor,
) -> BatchPart:
    """Those sequences of the batch; where tokens of each begin is known on the host too."""
    begin, end = part.begin, part.end
    mine = query_start_loc[begin : end + 1]
    return BatchPart(
        tokens=slice(query_start_loc_cpu[begin], query_start_loc_cpu[end]),
        query_start_loc=mine - query_start_loc_cpu[begin] if query_start_loc_cpu[begin] else mine,
        max_query_len=part.max_query_len,
        is_prefill=part.is_prefill,
        block_table=pages[begin:end],
        starts=zeros[: end - begin],
        rows=BatchRings(*(column[begin:end] for column in rows)),
        context_len=part.context_len,
    )
