"""Attention states of the splits of a sequence to the output, rotated back."""

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.triton.constants import frame_of
from tightkv.kernels.triton.rotate import rotate_back
from tightkv.math.rotation import Rotation


@triton.jit(do_not_specialize=["cu_seqlens", "batch", "total_rows", "num_partials"])
def _merge_splits_kernel(
    partial, partial_lse, value_table, cu_seqlens, out, lse, batch, total_rows, out_n, out_h,
    num_partials, HQ: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Merge the states of HEADS consecutive (query, head) rows and rotate back."""
    row = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    inside = row < total_rows * HQ
    live = inside
    if cu_seqlens is not None:
        live = row < tl.load(cu_seqlens + batch) * HQ  # the others are nobody's queries
    d = tl.arange(0, L.DP)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    for s0 in range(0, num_partials, STEP):
        s = s0 + tl.arange(0, STEP)
        x = tl.load(
            partial_lse + s[:, None].to(tl.int64) * (total_rows * HQ) + row[None, :],
            mask=(s < num_partials)[:, None] & live[None, :], other=float("-inf"),
        )  # fmt: skip
        peak = tl.maximum(peak, tl.max(x, axis=0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, L.DP], tl.float32)
    for s0 in range(0, num_partials, STEP):
        s = s0 + tl.arange(0, STEP)
        at = s[:, None].to(tl.int64) * (total_rows * HQ) + row[None, :]  # [STEP, HEADS]
        x = tl.load(
            partial_lse + at, mask=(s < num_partials)[:, None] & live[None, :], other=float("-inf")
        )
        w = tl.exp2(x - base[None, :])
        weight += tl.sum(w, axis=0)
        o = tl.load(
            partial + at[:, :, None] * L.D + d[None, None, :],
            mask=(w > 0.0)[:, :, None] & (d < L.D)[None, None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(o * w[:, :, None], axis=0)
    acc = acc / tl.where(weight != 0.0, weight, 1.0)[:, None]
    acc = rotate_back(acc, value_table, HEADS, L)
    out_at = (row // HQ).to(tl.int64) * out_n + (row % HQ).to(tl.int64) * out_h
    where = out + out_at[:, None] + d[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=inside[:, None] & (d < L.D)[None, :])
    LN2: tl.constexpr = 0.6931471805599453
    result = tl.where(weight != 0.0, (peak + tl.log2(weight)) * LN2, float("-inf"))
    tl.store(lse + row, result, mask=inside)


def merge_splits(
    rotation: Rotation,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None = None,
    batch: int = 0,
) -> None:
    """States [num_partials, N, Hq, D], LSEs in log2 units -> out [N, Hq, D] and lse [N, Hq].

    Rows from cu_seqlens[batch] on, which nobody wrote, give zeros and -inf.
    """
    num_partials, rows, hq, _ = partial.shape
    heads = 16 if rotation.kind == "haar" else 1
    _merge_splits_kernel[(triton.cdiv(rows * hq, heads),)](
        partial, partial_lse, rotation.table(out.device), cu_seqlens, out, lse,
        batch, rows, out.stride(0), out.stride(1), num_partials,
        HQ=hq, HEADS=heads, STEP=16 if heads == 1 else 4,  # [STEP, heads, DP] is in registers
        L=frame_of(rotation), num_warps=4,
    )  # fmt: skip
