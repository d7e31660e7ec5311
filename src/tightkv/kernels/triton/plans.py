"""How the attention kernels are cut into tiles and splits."""

from typing import Any, NamedTuple

import torch
import triton

from tightkv.kernels.triton.device import processor_count
from tightkv.kernels.view import CacheView
from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import PageLayout

EXACT_TILE = 64  # exact tokens of a split
_MOST_SPLITS = 64  # of latent attention


def attend_plan(
    layout: PageLayout,
    view: CacheView,
    group: int,
    max_queries: int,
    new: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Tile sizes, and into how many splits the tokens of a sequence are cut."""
    columns = max_queries * group
    tile = 64 if layout.page_size % 64 == 0 else 32
    eight = 8 in (layout.cfg.key_bits, layout.cfg.value_bits)
    if layout.head_dim > (128 if eight else 256):
        tile = 32  # those of 64 do not fit sm_89's shared memory
    # At least 16 columns: with 8, Triton 3.6 gives wrong products (seen on sm_90).
    widest = 64 if layout.head_dim <= 256 else 16
    cols = min(max(16, triton.next_power_of_2(columns)), 32 if columns <= 32 else 64, widest)
    plan: dict[str, Any] = {"COLS": cols, "TILE": tile}
    programs = view.batch * layout.num_kv_heads * triton.cdiv(columns, cols)
    wide = triton.cdiv(layout.head_dim, 128)  # more warps, else registers spill
    wide = triton.next_power_of_2(wide)
    if max_queries > 16:
        return {**plan, "num_splits": 1, "num_exact_splits": 0, "num_warps": 4 * wide}
    wanted = triton.cdiv(processor_count(device) * 8, programs)
    num_splits = max(1, min(wanted, max(1, view.block_table.shape[1]), 256))
    exact_tokens = view.ring_key.shape[1] + view.sink_key.shape[1] + (max_queries if new else 0)
    exact = triton.cdiv(exact_tokens, EXACT_TILE)
    warps = wide if cols <= 16 else 2 * wide
    return {**plan, "num_splits": num_splits, "num_exact_splits": exact, "num_warps": warps}


class DecodePlan(NamedTuple):
    """Of latent attention: sizes of a program, and into how many splits a sequence is cut."""

    heads: int
    tile: int  # tokens; they divide a page
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
