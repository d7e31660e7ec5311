"""Which prompts go through one workspace of plain keys and values, and where in it each lies."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tightkv.pages.layout import PageLayout

BLOCK = 32  # positions that one program brings to the workspace
WORKSPACE_BYTES = 256 << 20  # of keys and values at a time
# Decoding out of the pages costs by pairs of query and token, the workspace by tokens and launches.
# Measured over 34 shapes on an H200 (docs/log.md): these cost 5.3% more than the faster way of each
# shape would, 32 and 2^19 cost 10%.
MIN_READS = 64  # of a token of the workspace by queries, on average
MIN_PAIRS = 1 << 20
# Where queries are few, FlashAttention splits the keys and keeps a float32 output of each split:
# rows (query, head) times splits. Up to 64 MiB were measured with heads of 128.
SPLIT_ROWS = 1 << 17


class RaggedGroup(NamedTuple):
    """Neighboring sequences of a batch that fit the workspace together.

    Lengths on the host are upper bounds. Lengths on the device are exact, and say where a sequence
    begins in the workspace.
    """

    rows: slice  # of the batch
    queries: slice  # of its new tokens
    cu_seqlens_q: Tensor  # int32 [n + 1], among these queries
    cu_seqlens_k: Tensor  # int32 [n + 1], in the workspace: cached tokens, then new ones
    cu_blocks: Tensor  # int32 [n + 1], blocks of positions; the first number may be any
    tokens: int  # in the workspace, at most
    blocks: int  # at most
    max_queries: int
    max_keys: int
    is_fresh: bool  # no sequence has a prefix: new tokens are attended to without a rotation


def workspace_tokens(layout: PageLayout) -> int:
    """Tokens whose keys and values fit the workspace."""
    each = 2 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    return WORKSPACE_BYTES // each


def most_bytes(layout: PageLayout, queries: int, query_heads: int) -> int:
    """The most bytes that a call with so many queries takes, however long each prompt is.

    These are the workspace; queries and output in its frame; LSEs of the groups, of all, and of
    the caller; outputs of splits of the keys.
    """
    rows = queries * query_heads
    rotated = 2 * rows * layout.head_dim * layout.dtype.itemsize
    return WORKSPACE_BYTES + rotated + 3 * rows * 4 + SPLIT_ROWS * layout.head_dim * 4


def is_worth(counts: Sequence[int], before: Sequence[int]) -> bool:
    """Whether a workspace is faster for sequences with `counts` new tokens after `before` others.

    Without prefixes it is: there is nothing to dequantize, and one call for all.
    """
    if not any(before):
        return any(counts)
    lengths = [a + b for a, b in zip(counts, before, strict=True)]
    pairs = sum(a * b for a, b in zip(counts, lengths, strict=True))
    return pairs >= max(MIN_PAIRS, MIN_READS * sum(lengths))


def plan_groups(
    counts: Sequence[int],
    before: Sequence[int],
    most_tokens: int,
    cu_seqlens: Tensor,
    lengths: Tensor,
    left_pad: Tensor | None = None,
) -> tuple[RaggedGroup, ...]:
    """Groups of at most `most_tokens` tokens; no sequence has more.

    `counts` are exact. `before` are upper bounds of `lengths` [B], which are on the device, like
    cu_seqlens [B + 1] of the new tokens. The host does not wait for the device.
    """
    ends = lengths + cu_seqlens.diff()
    sizes = ends if left_pad is None else ends - left_pad
    both = torch.stack((sizes, (ends + (BLOCK - 1)) // BLOCK)).cumsum(1, dtype=torch.int32)
    cu_keys, cu_blocks = torch.nn.functional.pad(both, (1, 0))
    starts = [0, *accumulate(counts)]
    most = [a + b for a, b in zip(counts, before, strict=True)]
    cuts = list(_cuts(most, most_tokens))
    groups = []
    for low, high in cuts:
        first = starts[low]
        groups.append(
            RaggedGroup(
                rows=slice(low, high),
                queries=slice(first, starts[high]),
                cu_seqlens_q=cu_seqlens[low : high + 1] - first if low else cu_seqlens[: high + 1],
                cu_seqlens_k=cu_keys[low : high + 1] - cu_keys[low] if low else cu_keys[: high + 1],
                cu_blocks=cu_blocks[low : high + 1],
                tokens=sum(most[low:high]),
                blocks=sum(-(-n // BLOCK) for n in most[low:high]),
                max_queries=max(counts[low:high]),
                max_keys=max(most[low:high]),
                is_fresh=not any(before[low:high]),
            )
        )
    return tuple(groups)


def _cuts(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbors, as long as possible, whose lengths add up to at most `most`."""
    low = held = 0
    for i, length in enumerate(lengths):
        if low < i and held + length > most:
            yield low, i
            low, held = i, 0
        held += length
    if low < len(lengths):
        yield low, len(lengths)


@lru_cache(maxsize=256)
def uniform_cu_seqlens(rows: int, count: int, device: torch.device) -> Tensor:
    """int32 [rows + 1]: where each row's tokens begin when every row has `count`."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * count
