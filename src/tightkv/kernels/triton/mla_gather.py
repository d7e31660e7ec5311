"""Stored tokens of latent attention back to the model's dtype, for prompts that continue them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.constants import DENSE_ROTATION
from tightkv.kernels.device_guard import device_guard
from tightkv.kernels.triton.device import has_ptx
from tightkv.kernels.triton.mla_tile import (
    by_channel,
    decode_constants,
    layout_constants,
    load_levels,
    rope_type,
    rotation_kind,
    scale_values,
)
from tightkv.kernels.triton.rotate import rotate_back
from tightkv.pages.latent import LatentCodec


@triton.jit(do_not_specialize=["block_table", "cu_seqlens", "starts", "rows", "table_b", "count"])
def _gather_kernel(
    pages, block_table, cu_seqlens, starts, rows, out, table, page_b, table_b, out_n, count,
    D: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, CODE_BYTES: tl.constexpr,
    ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, ROPE_TYPE: tl.constexpr,
    ROTATION: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = t < count
    row = tl.load(rows + t, mask=live, other=0)
    at = t - tl.load(cu_seqlens + row, mask=live, other=0)
    at += tl.load(starts + row, mask=live, other=0)
    index = tl.load(block_table + row * table_b + at // PAGE, mask=live, other=0)
    page = pages + index.to(tl.int64) * page_b
    place = at % PAGE
    levels = load_levels(page + place * CODE_BYTES, live, D, DP, ROWS, BITS, TABLE, PTX)
    levels = by_channel(levels, ROWS, DP)
    d = tl.arange(0, DP)[None, :]
    scale = scale_values(tl.load(page + SCALE_AT + place, mask=live, other=0)) * UNIT
    y = tl.where(d < D, levels.to(tl.float32) * scale[:, None], 0.0)
    x = rotate_back(y, table, ROWS, D, DP, ROTATION)
    where = out + t[:, None].to(tl.int64) * out_n
    tl.store(where + d, x.to(out.dtype.element_ty), mask=live[:, None] & (d < D))
    r = tl.arange(0, ROPE)[None, :]
    keys = (page + ROPE_AT).to(tl.pointer_type(ROPE_TYPE))[:, None] + place[:, None] * ROPE + r
    k = tl.load(keys, mask=live[:, None], other=0.0)
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
    layout, kind = codec.layout, rotation_kind(codec)
    each = 16 if kind == DENSE_ROTATION else 4
    _gather_kernel[(triton.cdiv(len(out), each),)](
        pages, block_table, cu_seqlens, starts, rows, out, codec.rotation.table(out.device),
        pages.stride(0), block_table.stride(0), out.stride(0), len(out),
        **layout_constants(layout), **decode_constants(layout),
        ROPE_TYPE=rope_type(layout.dtype), ROTATION=kind, PTX=has_ptx(out.device), ROWS=each,
        num_warps=4,
    )  # fmt: skip
