"""How the attention kernel is cut into tiles and splits."""

from typing import Any

import torch
import triton

from tightkv.kernels.triton.device import processor_count
from tightkv.kernels.view import CacheView
from tightkv.pages.layout import PageLayout

EXACT_TILE = 64  # exact tokens of a split


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
