"""The work around torch's attention in a prefill, fused: `PrefillOps` as Triton kernels.

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


@triton.jit
def _merge_weights(a, b):
    """LSEs of two attention states -> the weight of each in the merged one, and its LSE."""
    peak = tl.maximum(a, b)  # no state is empty: both are finite
    wa = tl.exp(a - peak)
    wb = tl.exp(b - peak)
    total = wa + wb
    return wa / total, wb / total, peak + tl.log(total)


@triton.jit(do_not_specialize=["tokens"])  # one binary for all lengths
def _rotate_queries_kernel(
    query, out, table, tokens, query_b, query_h, query_l,
    H: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    at, bh = _rows_and_head(tokens, ROWS)
    b = bh // H
    h = bh % H
    d = tl.arange(0, L.DP)
    live = at < tokens
    offsets = _row_offsets(b, h, at, query_b, query_h, query_l)
    x = load_rotated(query, offsets, live, table, False, ROWS, L)
    flat = bh.to(tl.int64) * tokens + at
    where = out + flat[:, None] * L.D + d[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=live[:, None] & (d < L.D)[None, :])


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


@triton.jit(do_not_specialize=["rows"])  # one binary for all lengths
def _merge_states_kernel(
    old, old_lse, new, new_lse, out, lse, rows, old_b, old_h, old_l, new_b, new_h, new_l,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`out` is contiguous and may be `old`, `lse` may be `old_lse`."""
    at, bh = _rows_and_head(rows, ROWS)
    b = bh // H
    h = bh % H
    d = tl.arange(0, DP)
    live = at < rows
    there = live[:, None] & (d < D)[None, :]
    flat = bh.to(tl.int64) * rows + at
    a = tl.load(old_lse + flat, mask=live, other=0.0)
    c = tl.load(new_lse + flat, mask=live, other=0.0)
    wa, wc, both = _merge_weights(a, c)
    offsets = _row_offsets(b, h, at, old_b, old_h, old_l)
    x = tl.load(old + offsets[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    offsets = _row_offsets(b, h, at, new_b, new_h, new_l)
    y = tl.load(new + offsets[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out + flat[:, None] * D + d[None, :], x * wa[:, None] + y * wc[:, None], mask=there)
    tl.store(lse + flat, both, mask=live)


@triton.jit(do_not_specialize=["tokens"])  # one binary for all lengths
def _merge_and_unrotate_kernel(
    prefix, prefix_lse, exact, exact_lse, table, tokens,
    prefix_b, prefix_h, prefix_l, exact_b, exact_h, exact_l,
    HQ: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Rotate the prefix back and merge it into `exact` and `exact_lse`, in place."""
    at, bh = _rows_and_head(tokens, ROWS)
    b = bh // HQ
    h = bh % HQ
    d = tl.arange(0, L.DP)
    live = at < tokens
    there = live[:, None] & (d < L.D)[None, :]
    offsets = _row_offsets(b, h // G, (h % G) * tokens + at, prefix_b, prefix_h, prefix_l)
    x = load_rotated(prefix, offsets, live, table, True, ROWS, L)
    flat = bh.to(tl.int64) * tokens + at
    a = tl.load(prefix_lse + flat, mask=live, other=0.0)
    c = tl.load(exact_lse + flat, mask=live, other=0.0)
    wa, wc, both = _merge_weights(a, c)
    where = exact + _row_offsets(b, h, at, exact_b, exact_h, exact_l)[:, None] + d[None, :]
    y = tl.load(where, mask=there, other=0.0).to(tl.float32)
    x = x * wa[:, None] + y * wc[:, None]
    tl.store(where, x.to(exact.dtype.element_ty), mask=there)
    tl.store(exact_lse + flat, both, mask=live)


def rotate_queries(codec: Codec, query: Tensor) -> Tensor:
    """See `PrefillOps`."""
    b, h, tokens, _ = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotation = codec.key.rotation
    rows = rows_at_once(rotation)
    _rotate_queries_kernel[(triton.cdiv(tokens, rows) * b * h,)](
        query, out, rotation.table(query.device), tokens, *query.stride()[:3],
        H=h, ROWS=rows, L=frame_of(rotation), num_warps=4,
    )  # fmt: skip
    return out


def load_prefix(
    codec: Codec, view: CacheView, start: int, count: int, key: Tensor, value: Tensor
) -> None:
    """See `PrefillOps`."""
    page = codec.layout.page_size
    pages = start // page, -(-(start + count) // page)
    dequantize_pages(codec, view, *pages, out=(key, value))
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
    """See `PrefillOps`."""
    b, h, rows, d = new.out.shape
    out = old.out
    if out.dtype != torch.float32 or not out.is_contiguous():
        out = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    _merge_states_kernel[(triton.cdiv(rows, 16) * b * h,)](
        old.out, old.lse, new.out, new.lse, out, old.lse, rows,
        *old.out.stride()[:3], *new.out.stride()[:3],
        H=h, D=d, DP=triton.next_power_of_2(d), ROWS=16, num_warps=4,
    )  # fmt: skip
    return AttentionState(out, old.lse)


def merge_and_unrotate(codec: Codec | None, prefix: AttentionState, exact: AttentionState) -> None:
    """See `PrefillOps`."""
    b, hq, tokens, d = exact.out.shape
    rotation = make_rotation("none", d) if codec is None else codec.value.rotation
    rows = rows_at_once(rotation)
    _merge_and_unrotate_kernel[(triton.cdiv(tokens, rows) * b * hq,)](
        prefix.out, prefix.lse, exact.out, exact.lse, rotation.table(exact.out.device), tokens,
        *prefix.out.stride()[:3], *exact.out.stride()[:3],
        HQ=hq, G=hq // prefix.out.shape[1], ROWS=rows, L=frame_of(rotation), num_warps=4,
    )  # fmt: skip


def rows_at_once(rotation: Rotation) -> int:
    """How many rows a program takes: a matrix is worth loading for more."""
    return 32 if rotation.kind == "haar" else 16
