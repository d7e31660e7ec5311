"""Parts of a batch whose sequences are treated alike: decodes, short prompts, long prompts."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tightkv.kernels.prefill import MIN_QUERIES
from tightkv.kernels.ragged_plan import is_worth

# Most new tokens of a prompt that is decoded with the decodes, which are then planned for as many.
# They must be in the ring: no more than RING_SLACK.
SHORT_PROMPT = 16
# New tokens from which a prompt is attended to by itself, piece by piece of its prefix. On an H200
# the workspace was faster for 512 (2.7 to 28 times), 1,024 (3.1) and 2,048 (1.9); more was not
# measured. It takes more memory: 290 MiB in place of 80 for 4 x 2,048 after 8k, which
# `most_bytes` counts, since it follows from the tokens of a step and not from those of a prompt.
ALONE_FROM = 4096


class Limits(NamedTuple):
    """Limits of an engine's batches."""

    sequences: int
    rows: int  # sequences that can have a ring at a time
    decoding: int  # new tokens of a sequence that decodes: more than one with speculation

    def most_as_decoding(self, sequences: int, short_prompt: int) -> int:
        """New tokens up to which a sequence of a batch is treated like one that decodes.

        Its new tokens are then read from the cache, exactly as long as it has a ring. That is
        certain where there are as many rings as sequences; elsewhere prompts stay prompts.
        """
        return max(self.decoding, short_prompt) if sequences <= self.rows else self.decoding


class PartRange(NamedTuple):
    """Sequences [begin, end) of a batch."""

    begin: int
    end: int
    is_prefill: bool  # the new tokens are a prompt's, read from the batch and not from the cache
    max_query_len: int  # new tokens of one sequence
    context_len: int | None = None  # tokens before the new ones, of a long prompt alone in its part
    most_before: tuple[int, ...] | None = None
    """Upper bounds of the tokens before the new ones, of prompts that share a workspace."""


def split_batch(
    query_start_loc: Sequence[int],
    lengths: Sequence[int] | None,
    most_decoding: int,
    workspace_tokens: int | None = None,
    exact: bool = True,
) -> list[PartRange]:
    """Parts of a batch: each long prompt alone, and between them decodes and short prompts.

    A sequence decodes that has at most `most_decoding` new tokens. The new tokens of sequence b
    are query_start_loc[b] to query_start_loc[b + 1] of the batch, and the last of its lengths[b].
    Lengths need to be exact for long prompts only, else they are upper bounds; None if the host
    has none. Without `exact` all are upper bounds, and parts have no `context_len`. With a
    workspace, prompts that fit it share it if that is faster.
    """
    counts = [end - begin for begin, end in itertools.pairwise(query_start_loc)]
    batch = range(len(counts))
    if lengths is None:
        return _without_long(counts, batch, most_decoding)
    before = [length - count for length, count in zip(lengths, counts, strict=True)]
    known: Sequence[int | None] = before if exact else [None] * len(before)
    if workspace_tokens is None:
        return _long_apart(counts, known, batch, most_decoding)
    parts = []
    decodes = _first_fresh(counts, batch, most_decoding)  # these may have any length
    is_alone = [
        i >= decodes and ((exact and counts[i] >= ALONE_FROM) or lengths[i] > workspace_tokens)
        for i in batch
    ]
    for alone, group in itertools.groupby(batch, is_alone.__getitem__):
        same = list(group)
        run = range(same[0], same[-1] + 1)
        fresh = _first_fresh(counts, run, most_decoding)
        inside = [x[fresh : run.stop] for x in (counts, before)]
        if alone or not is_worth(*inside):
            parts += _long_apart(counts, known, run, most_decoding)
            continue
        parts += _without_long(counts, range(run.start, fresh), most_decoding)
        most, bounds = max(inside[0]), tuple(inside[1])
        parts.append(PartRange(fresh, run.stop, True, most, most_before=bounds))
    return parts


def _long_apart(
    counts: Sequence[int], before: Sequence[int | None], run: range, most_decoding: int
) -> list[PartRange]:
    """Each long prompt alone, with the number of tokens before it if that is known."""
    parts = []
    for is_long, group in itertools.groupby(run, lambda i: counts[i] >= MIN_QUERIES):
        same = list(group)
        if is_long:
            parts += [PartRange(i, i + 1, True, counts[i], before[i]) for i in same]
        else:
            parts += _without_long(counts, range(same[0], same[-1] + 1), most_decoding)
    return parts


def _without_long(counts: Sequence[int], run: range, most_decoding: int) -> list[PartRange]:
    """Two parts: the sequences in front that decode, and the others."""
    fresh = _first_fresh(counts, run, most_decoding)
    parts = []
    for begin, end, is_prefill in ((run.start, fresh, False), (fresh, run.stop, True)):
        if begin < end:
            parts.append(PartRange(begin, end, is_prefill, max(counts[begin:end])))
    return parts


def _first_fresh(counts: Sequence[int], run: range, most_decoding: int) -> int:
    return next((i for i in run if counts[i] > most_decoding), run.stop)
