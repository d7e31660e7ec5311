"""Parts of a batch whose sequences are treated alike: decodes, short prompts, long prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tightkv.kernels.prefill import MIN_QUERIES

# New tokens of a prompt that goes with the decodes, whose queries are planned as many then. They
# have to be in the ring: no more than RING_SLACK.
SHORT_PROMPT = 16


class Limits(NamedTuple):
    """What the batches of an engine can be."""

    sequences: int
    rows: int
    """Sequences that can have an exact ring at a time."""
    decoding: int
    """New tokens of a sequence that decodes: more than one with speculation."""

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
    is_prefill: bool
    """The new tokens are a prompt's, read from the batch and not from the cache."""
    max_query_len: int
    """New tokens of one sequence."""
    context_len: int | None = None
    """Tokens before the new ones, of a long prompt alone in its part."""


def split_batch(
    query_start_loc: Sequence[int], lengths: Sequence[int] | None, most_decoding: int
) -> list[PartRange]:
    """Long prompts one by one; of the others between them, those in front that decode, the rest.

    A sequence decodes that has at most `most_decoding` new tokens. The new tokens of sequence b
    are query_start_loc[b] to query_start_loc[b + 1] of the batch, and the last of its lengths[b].
    Lengths need to be right for long prompts only; None where the host has none.
    """
    counts = [end - begin for begin, end in itertools.pairwise(query_start_loc)]
    is_long = [lengths is not None and count >= MIN_QUERIES for count in counts]
    parts = []
    for begin, end in _runs(is_long):
        if lengths is not None and is_long[begin]:
            length = lengths[begin] - counts[begin]
            parts.append(PartRange(begin, end, True, counts[begin], length))
            continue
        fresh = next((i for i in range(begin, end) if counts[i] > most_decoding), end)
        if fresh > begin:
            parts.append(PartRange(begin, fresh, False, max(counts[begin:fresh])))
        if fresh < end:
            parts.append(PartRange(fresh, end, True, max(counts[fresh:end])))
    return parts


def _runs(is_long: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Long prompts, and neighbours that are none."""
    begin = 0
    for i, alone in enumerate(is_long):
        if alone:
            if begin < i:
                yield begin, i
            yield i, i + 1
            begin = i + 1
    if begin < len(is_long):
        yield begin, len(is_long)
