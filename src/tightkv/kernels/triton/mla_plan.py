"""How decoding of latent attention is cut into programs."""

from typing import NamedTuple

from tightkv.pages.latent import LatentLayout

_MOST_SPLITS = 64


class DecodePlan(NamedTuple):
    """Sizes of a program, and into how many splits the tokens of a sequence are cut."""

    heads: int
    tile: int
    """Tokens; they divide a page."""
    splits: int
    warps: int
    stages: int


def decode_plan(
    layout: LatentLayout, rows: int, heads: int, pages: int, processors: int, large: bool
) -> DecodePlan:
    """For `rows` queries of `heads` heads over block tables of `pages` pages.

    `large`: a program can have 172 KiB of shared memory, not only 96.
    """
    few = heads <= 16 or not large
    block, tile = (16, 32) if few else (64, min(64, layout.page_size))
    at_once = 2 * processors if few else processors
    splits = best_splits(rows * -(-heads // block), at_once, pages * layout.page_size // tile)
    return DecodePlan(block, tile, splits, warps=4 if few else 8, stages=1 if few else 2)


def best_splits(programs: int, at_once: int, most: int) -> int:
    """Splits whose programs take the least time: full waves, and each split costs a merge."""

    def time(splits: int) -> float:
        return -(-programs * splits // at_once) / splits * (1 + 0.01 * splits)

    return min(range(1, max(1, min(most, _MOST_SPLITS)) + 1), key=time)
