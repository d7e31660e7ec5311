"""The work around torch's attention in a prefill, fused: what `kernels.prefill.extend` calls.

Tensors of attention are [B, H, L, D] with any strides but a contiguous last dimension; LSEs are
contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.prefill import exact_ranges
from tightkv.kernels.sdpa import AttentionState
from tightkv.kernels.triton.constants import frame_of
from tightkv.kernels.triton.dequantize import dequantize_pages
from tightkv.kernels.triton.ring import load_exact
from tightkv.kernels.triton.rotate import rotate, rotate_back
from tightkv.kernels.view import CacheView
from tightkv.math.rotation import Rotation, make_rotation
from tightkv.pages.codec import Codec


@triton.jit
def _row_offsets(b, h, at, stride_b, stride_h, stride_l):
    """Where rows `at` of head h of sequence b begin."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + at.to(tl.int64) * stride_l


@triton.jit
def _rows_and_head(count, ROWS: tl.constexpr):
    """Which of `count` rows this program has, and which (sequence, head).

    One dimension of programs, since the others end at 65,535.
    """
    blocks = tl.cdiv(count, ROWS)
    return tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.program_id(0) // blocks


@triton.jit
def load_rotated(x, offsets, live, table, BACK: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr):
    """Rows of D elements at x + offsets -> [ROWS, DP] in float32, rotated or rotated back."""
    D: tl.constexpr = L.D
    d = tl.arange(0, L.DP)
    if L.ROTATION == 2:  # a matrix of any size, 16 of its rows at a time
        y = tl.zeros([ROWS, L.DP], tl.float32)
        for k0 in range(0, D, 16):
            k = k0 + tl.arange(0, 16)
            part = tl.load(x + offsets[:, None] + k[None, :], mask=live[:, None], other=0.0)
            at = k[:, None] + d[None, :] * D if BACK else k[:, None] * D + d[None, :]
            m = tl.load(table + at, mask=(d < D)[None, :], other=0.0)
            y = tl.dot(part.to(tl.float32), m, y, input_precision="ieee")
        return y
    there = live[:, None] & (d < D)[None, :]
    y = tl.load(x + offsets[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    if BACK:
        return rotate_back(y, table, ROWS, L)
    return rotate(y, table, ROWS, L)


@triton.jit(do_not_specialize=["tokens"])  # one binary for all lengths
def _rotate_rows_kernel(
    x, out, table, tokens, x_b, x_h, x_l, out_b, out_h, out_l,
    H: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Rows of x to those of out, rotated or rotated back."""
    at, bh = _rows_and_head(tokens, ROWS)
    b = bh // H
    h = bh % H
    d = tl.arange(0, L.DP)
    live = at < tokens
    y = load_rotated(x, _row_offsets(b, h, at, x_b, x_h, x_l), live, table, BACK, ROWS, L)
    where = out + _row_offsets(b, h, at, out_b, out_h, out_l)[:, None] + d[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=live[:, None] & (d < L.D)[None, :])


# one binary for all lengths
@triton.jit(
    do_not_specialize=[
        "ring_read_from", "sink_counts", "ring_rows", "start", "low", "high", "slots",
    ]
)  # fmt: skip
def _load_exact_kernel(
    key, value, source_key, source_value, scales, key_table, value_table,
    ring_read_from, sink_counts, ring_rows, out_b, out_h, start, low, high, slots,
    HKV: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Exact tokens among positions [low, high) over their codes in key and value, rotated.

    Position p of the source (the sinks, or the ring) is in slot p % slots; key and value begin
    with position `start`.
    """
    D: tl.constexpr = L.D
    at, bh = _rows_and_head(high - low, ROWS)
    at += low
    row = bh // HKV
    head = bh % HKV
    read_from = tl.load(ring_read_from + row)
    chosen = at < high
    if SINKS:
        chosen &= at < tl.minimum(tl.load(sink_counts + row), read_from)
    else:
        chosen &= at >= read_from
    d = tl.arange(0, L.DP)
    there = chosen[:, None] & (d < D)[None, :]
    owner = tl.load(ring_rows + row).to(tl.int64)
    item = (owner * slots + at % slots) * HKV + head
    offsets = item * D
    target = _row_offsets(row, head, at - start, out_b, out_h, D)[:, None] + d[None, :]
    if tl.program_id(1) == 0:
        if CODES:
            x = load_exact(source_key, scales, item, chosen, True, L)
        else:
            x = load_rotated(source_key, offsets, chosen, key_table, False, ROWS, L)
        tl.store(key + target, x.to(key.dtype.element_ty), mask=there)
    else:
        if CODES:
            x = load_exact(source_value, scales + 1, item, chosen, False, L)
        else:
            x = load_rotated(source_value, offsets, chosen, value_table, False, ROWS, L)
        tl.store(value + target, x.to(value.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])  # one binary for all lengths
def _merge_states_kernel(
    one, one_lse, two, two_lse, out, lse, table, tokens,
    one_b, one_h, one_l, two_b, two_h, two_l, out_b, out_h, out_l,
    H: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Rotate the state `one` back and merge it with `two`; the result may be in place of either.

    In `one` the G heads of a group are further rows of one head.
    """
    at, bh = _rows_and_head(tokens, ROWS)
    b = bh // H
    h = bh % H
    d = tl.arange(0, L.DP)
    live = at < tokens
    there = live[:, None] & (d < L.D)[None, :]
    offsets = _row_offsets(b, h // G, (h % G) * tokens + at, one_b, one_h, one_l)
    x = load_rotated(one, offsets, live, table, True, ROWS, L)
    flat = bh.to(tl.int64) * tokens + at
    a = tl.load(one_lse + flat, mask=live, other=0.0)
    c = tl.load(two_lse + flat, mask=live, other=0.0)
    peak = tl.maximum(a, c)  # no state is empty: both are finite
    wa = tl.exp(a - peak)
    wc = tl.exp(c - peak)
    total = wa + wc
    where = two + _row_offsets(b, h, at, two_b, two_h, two_l)[:, None] + d[None, :]
    y = tl.load(where, mask=there, other=0.0).to(tl.float32)
    x = x * (wa / total)[:, None] + y * (wc / total)[:, None]
    where = out + _row_offsets(b, h, at, out_b, out_h, out_l)[:, None] + d[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=there)
    tl.store(lse + flat, peak + tl.log(total), mask=live)


def rotate_queries(codec: Codec, query: Tensor) -> Tensor:
    """Queries [B, H, T, D] in the frame of the pages' keys; contiguous, same dtype."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotate_rows(codec.key.rotation, query, out, back=False)
    return out


def rotate_rows(rotation: Rotation, x: Tensor, out: Tensor, back: bool) -> None:
    """Write x [B, H, T, D], rotated or rotated back, to `out`, which has any strides."""
    b, h, tokens, _ = x.shape
    rows = rows_at_once(rotation)
    _rotate_rows_kernel[(triton.cdiv(tokens, rows) * b * h,)](
        x, out, rotation.table(x.device), tokens, *x.stride()[:3], *out.stride()[:3],
        H=h, BACK=back, ROWS=rows, L=frame_of(rotation), num_warps=4,
    )  # fmt: skip


def load_prefix(
    codec: Codec, view: CacheView, start: int, count: int, key: Tensor, value: Tensor
) -> None:
    """Write positions [start, start + count) to the start of key and value [B, Hkv, tokens, D].

    Exact tokens, too, are in the frame of the pages. `start` begins a page, and the buffers
    hold whole pages. The view's `same_length` is known.
    """
    page = codec.layout.page_size
    dequantize_pages(codec, view, start // page, -(-(start + count) // page), key, value)
    heads, rotation = codec.layout.num_kv_heads, codec.key.rotation
    rows = rows_at_once(rotation)
    for ring, low, high in exact_ranges(view, start, count):
        sources = (view.ring_key, view.ring_value) if ring else (view.sink_key, view.sink_value)
        codes = ring and view.ring_scales is not None
        _load_exact_kernel[(triton.cdiv(high - low, rows) * view.batch * heads, 2)](
            key, value, *sources, view.ring_scales if codes else sources[0],
            rotation.table(key.device), codec.value.rotation.table(key.device),
            view.ring_read_from, view.sink_counts, view.ring_rows,
            key.stride(0), key.stride(1), start, low, high, sources[0].shape[1],
            HKV=heads, SINKS=not ring, ROWS=rows, CODES=codes, L=frame_of(rotation), num_warps=4,
        )  # fmt: skip


def merge_states(old: AttentionState, new: AttentionState) -> AttentionState:
    """Attention over the tokens of both, `out` in float32; `old` may be changed."""
    out = old.out
    if out.dtype != torch.float32 or not out.is_contiguous():
        out = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    merged = AttentionState(out, old.lse)
    _merge(make_rotation("none", out.shape[-1]), old, new, merged)
    return merged


def merge_and_unrotate(codec: Codec | None, prefix: AttentionState, exact: AttentionState) -> None:
    """Rotate the prefix's output back and merge it into `exact` [B, Hq, T, D], in place.

    prefix is [B, Hkv, group * T, D]; without a codec it is not rotated.
    """
    none = make_rotation("none", exact.out.shape[-1])
    _merge(none if codec is None else codec.value.rotation, prefix, exact, exact)


def _merge(
    rotation: Rotation, one: AttentionState, two: AttentionState, merged: AttentionState
) -> None:
    b, h, tokens, _ = two.out.shape
    rows = rows_at_once(rotation)
    strides = [step for state in (one, two, merged) for step in state.out.stride()[:3]]
    _merge_states_kernel[(triton.cdiv(tokens, rows) * b * h,)](
        *one, *two, *merged, rotation.table(two.out.device), tokens, *strides,
        H=h, G=h // one.out.shape[1], ROWS=rows, L=frame_of(rotation), num_warps=4,
    )  # fmt: skip


def rows_at_once(rotation: Rotation) -> int:
    """How many rows a program takes: a matrix is worth loading for more."""
    return 32 if rotation.kind == "haar" else 16
