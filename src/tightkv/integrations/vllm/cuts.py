"""Into which parts a batch is cut, so that the sequences of each are treated alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tightkv.kernels.staged import LEAST_QUERIES


class Cut(NamedTuple):
    """Sequences [begin, end) of a batch."""

    begin: int
    end: int
    fresh: bool
    """The new tokens are a prompt's: they attend to each other exactly."""
    most: int
    """New tokens of one sequence."""
    length: int | None = None
    """Tokens before the new ones, of a long prompt alone in its part."""


def cut_batch(first: Sequence[int], lengths: Sequence[int] | None, most_decoding: int) -> list[Cut]:
    """Decodes (at most `most_decoding` new tokens, in front), long prompts one by one, others.

    Sequence b's new tokens are first[b] to first[b + 1] of the batch and the last of its
    lengths[b]. Lengths need to be right for long prompts only; None where the host has none.
    """
    counts = [end - begin for begin, end in itertools.pairwise(first)]
    total = len(counts)
    decodes = next((i for i, count in enumerate(counts) if count > most_decoding), total)
    cuts = [Cut(0, decodes, False, max(counts[:decodes]))] if decodes else []
    begin = decodes
    while begin < total:
        end = begin + 1
        length = None
        if _is_long(counts[begin], lengths):
            assert lengths is not None
            length = lengths[begin] - counts[begin]
        else:
            while end < total and not _is_long(counts[end], lengths):
                end += 1
        cuts.append(Cut(begin, end, True, max(counts[begin:end]), length))
        begin = end
    return cuts


def _is_long(count: int, lengths: Sequence[int] | None) -> bool:
    return lengths is not None and count >= LEAST_QUERIES
