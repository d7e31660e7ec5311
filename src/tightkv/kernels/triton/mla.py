"""Latent attention in Triton, as `kernels.mla_reference`: append and gather here, and decode.

Append rotates, quantizes, packs and stores in one kernel; gather brings tokens back to the model's
dtype, for prompts that continue them.
"""

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.triton.constants import latent_constants
from tightkv.kernels.triton.device import device_guard, last_contiguous
from tightkv.kernels.triton.encode import TINY, finite, nearest, pack_words, pack_words3
from tightkv.kernels.triton.mla_decode import decode
from tightkv.kernels.triton.mla_tile import (
    by_channel,
    load_levels,
    rope_rows,
    rows_at_once,
    scale_codes,
    scale_values,
)
from tightkv.kernels.triton.rotate import rotate, rotate_back
from tightkv.math.quantize import finite as finite_or_raise
from tightkv.pages.latent import LatentCodec

__all__ = ["NAME", "append", "decode", "gather"]

NAME = "triton"


@triton.jit(do_not_specialize=["count", "slots"])
def _append_kernel(
    latent, rope, slots, pages, table, count, latent_n, rope_n, page_b,
    ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    BITS: tl.constexpr = L.BITS
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + t, mask=t < count, other=-1)
    live = slot >= 0
    page = pages + (slot // L.PAGE).to(tl.int64) * page_b
    place = (slot % L.PAGE).to(tl.int32)
    d = tl.arange(0, DP)[None, :]
    there = live[:, None] & (d < D)
    x = tl.load(latent + t[:, None].to(tl.int64) * latent_n + d, mask=there, other=0.0)
    y = rotate(finite(x), table, ROWS, L)

    y64 = y.to(tl.float64)
    norm = tl.sqrt_rn(tl.sum(y64 * y64, axis=1).to(tl.float32))
    scale = scale_codes(norm)
    size = tl.maximum(scale_values(scale), TINY)
    z = tl.div_rn(y, tl.broadcast_to(size[:, None], y.shape)) * (D**0.5)
    code, _ = nearest(z, BITS, L.BOOK)

    tl.store(page + L.SCALE_AT + place, scale.to(tl.uint8), mask=live)
    row = (page + place * L.CODE_BYTES).to(tl.pointer_type(tl.int32))[:, None]
    if BITS == 3:
        group = tl.arange(0, DP // 32)[None, :]
        for j in tl.static_range(3):
            w = pack_words3(code, j, ROWS, DP, 32)
            tl.store(row + 3 * group + j, w, mask=live[:, None] & (group < D // 32))
    else:
        n = tl.arange(0, DP * BITS // 32)[None, :]
        w = pack_words(code, ROWS, DP, BITS)
        tl.store(row + n, w, mask=live[:, None] & (n < D * BITS // 32))
    r = tl.arange(0, L.ROPE)[None, :]
    k = tl.load(rope + t[:, None].to(tl.int64) * rope_n + r, mask=live[:, None], other=0.0)
    tl.store(rope_rows(page, place, L) + r, k.to(L.ROPE_TYPE), mask=live[:, None])


@device_guard
def append(codec: LatentCodec, pages: Tensor, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    """See `mla_reference.append`."""
    layout, count = codec.layout, len(slots)
    if layout.cfg.check_finite:
        finite_or_raise(latent[slots >= 0], True)  # padding can be anything
    if not count:
        return
    latent, rope = last_contiguous(latent), last_contiguous(rope)
    rows = rows_at_once(codec.rotation, 1 if count < 1024 else 4)
    _append_kernel[(triton.cdiv(count, rows),)](
        latent, rope, slots, pages, codec.rotation.table(latent.device),
        count, latent.stride(0), rope.stride(0), pages.stride(0),
        ROWS=rows, L=latent_constants(layout, latent.device), num_warps=4,
    )  # fmt: skip


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
