"""Stored tokens of latent attention back to the model's dtype, for prompts that continue them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.device_guard import device_guard
from tightkv.kernels.triton.constants import latent_constants
from tightkv.kernels.triton.mla_tile import (
    by_channel,
    load_levels,
    rope_rows,
    rows_at_once,
    scale_values,
)
from tightkv.kernels.triton.rotate import rotate_back
from tightkv.pages.latent import LatentCodec


@triton.jit(do_not_specialize=["block_table", "cu_seqlens", "starts", "rows", "table_b", "count"])
def _gather_kernel(
    pages, block_table, cu_seqlens, starts, rows, out, table, page_b, table_b, out_n, count,
    ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = t < count
    row = tl.load(rows + t, mask=live, other=0)
    at = t - tl.load(cu_seqlens + row, mask=live, other=0)
    at += tl.load(starts + row, mask=live, other=0)
    index = tl.load(block_table + row * table_b + at // L.PAGE, mask=live, other=0)
    page = pages + index.to(tl.int64) * page_b
    place = at % L.PAGE
    levels = load_levels(page + place * L.CODE_BYTES, live, ROWS, L)
    levels = by_channel(levels, ROWS, DP)
    d = tl.arange(0, DP)[None, :]
    scale = scale_values(tl.load(page + L.SCALE_AT + place, mask=live, other=0)) * L.UNIT
    y = tl.where(d < D, levels.to(tl.float32) * scale[:, None], 0.0)
    x = rotate_back(y, table, ROWS, L)
    where = out + t[:, None].to(tl.int64) * out_n
    tl.store(where + d, x.to(out.dtype.element_ty), mask=live[:, None] & (d < D))
    r = tl.arange(0, L.ROPE)[None, :]
    k = tl.load(rope_rows(page, place, L) + r, mask=live[:, None], other=0.0)
    tl.store(where + D + r, k.to(out.dtype.element_ty), mask=live[:, None])


@device_guard
def gather(
    codec: LatentCodec,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    rows: Tensor,
    out: Tensor,
) -> None:
    """See `mla_reference.gather`."""
    if not len(out):
        return
    each = rows_at_once(codec.rotation)
    _gather_kernel[(triton.cdiv(len(out), each),)](
        pages, block_table, cu_seqlens, starts, rows, out, codec.rotation.table(out.device),
        pages.stride(0), block_table.stride(0), out.stride(0), len(out),
        ROWS=each, L=latent_constants(codec.layout, out.device), num_warps=4,
    )  # fmt: skip
