"""What `kernels.ragged` calls. A workspace for many sequences is filled by one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.ragged_plan import BLOCK, RaggedGroup
from tightkv.kernels.triton.constants import constants_of
from tightkv.kernels.triton.device import last_contiguous
from tightkv.kernels.triton.ring import load_exact
from tightkv.kernels.triton.rotate import load_rotated, rotate_rows
from tightkv.kernels.triton.unpack import (
    dequantized_keys,
    dequantized_values,
    even_tokens,
    token_order,
)
from tightkv.kernels.view import CacheView
from tightkv.pages.codec import Codec

TAIL = 256  # rows after the last token that a tile of attention may read


@triton.jit
def _fitting(x, where, FINITE: tl.constexpr):
    """float32 in the dtype of `where`; with FINITE, too large a number is the largest one."""
    if FINITE and where.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(where.dtype.element_ty)


@triton.jit
def _any_number(x, where, FINITE: tl.constexpr):
    """As `_fitting`; with FINITE, NaN and infinity are 0."""
    if FINITE:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        if where.dtype.element_ty == tl.bfloat16:
            x = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38)
    return _fitting(x, where, FINITE)


@triton.jit
def _store_rows(target, x, at, seen, shift, head, L: tl.constexpr):
    """x [tokens, DP] of positions `at` that are `seen` to rows shift + at of the workspace."""
    d = tl.arange(0, L.DP)
    where = target + ((shift + at).to(tl.int64) * L.HKV + head)[:, None] * L.D + d[None, :]
    tl.store(where, x, mask=seen[:, None] & (d < L.D)[None, :])


# What changes from step to step, and tables that are cut anywhere, must not ask for other binaries.
@triton.jit(
    do_not_specialize=[
        "block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows",
        "cu_seqlens_q", "cu_seqlens_k", "cu_blocks", "table_b", "first_row", "first_at", "batch",
        "ring_tokens", "tokens",
    ]
)  # fmt: skip
def _load_workspace_kernel(
    pages, block_table, lengths, left_pad, ring_read_from, sink_counts, ring_rows,
    cu_seqlens_q, cu_seqlens_k, cu_blocks, ring_key, ring_value, ring_scales, sink_key, sink_value,
    new_key, new_value, key_table, value_table, key, value,
    table_b, page_b, new_key_n, new_key_h, new_value_n, new_value_h, first_row, first_at, batch,
    ring_tokens, tokens,
    SINKS: tl.constexpr, TAIL: tl.constexpr, FINITE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """32 positions of one sequence and head to their rows of key and value [tokens, HKV, D].

    Positions with codes and exact ones (sinks, ring, new tokens) are written apart, so that each
    row is written once. The tables of the sequences begin with row `first_row` of the batch, and
    what is written of each with position `first_at`.
    """
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    HKV: tl.constexpr = L.HKV
    head = tl.program_id(0) % HKV
    place = tl.load(cu_blocks) + tl.program_id(0) // HKV
    d = tl.arange(0, DP)
    if tl.program_id(0) < HKV:  # attention multiplies what follows the last token by zero
        end = tl.load(cu_seqlens_k + batch)
        for n0 in range(end, tl.minimum(end + TAIL, tokens), 32):
            n = n0 + tl.arange(0, 32)
            where = (n.to(tl.int64) * HKV + head)[:, None] * D + d[None, :]
            there = (n < tokens)[:, None] & (d < D)[None, :]
            nothing = tl.zeros([32, DP], key.dtype.element_ty)
            tl.store(key + where, nothing, mask=there)
            tl.store(value + where, nothing, mask=there)
    row = 0
    for i in range(0, batch, 128):
        n = i + tl.arange(0, 128)
        ends = tl.load(cu_blocks + 1 + n, mask=n < batch, other=2147483647)
        row += tl.sum((ends <= place).to(tl.int32), axis=0)
    if row >= batch:  # the host expected more tokens
        return
    first = (place - tl.load(cu_blocks + row)) * 32 + first_at
    begin = tl.load(cu_seqlens_q + row)
    count = tl.load(cu_seqlens_q + row + 1) - begin
    shift = tl.load(cu_seqlens_k + row)
    row_end = tl.load(cu_seqlens_k + row + 1)
    row += first_row
    length = tl.load(lengths + row)
    start = tl.load(left_pad + row)
    read_from = tl.load(ring_read_from + row)
    sinks_end = tl.minimum(start + tl.load(sink_counts + row), read_from)
    coded_from = tl.maximum(start, sinks_end)
    shift -= start + first_at  # from a position to its row of the workspace
    # Nothing is written beyond the sequence's rows, or beyond the workspace.
    stop = tl.minimum(length + count, tl.minimum(row_end, tokens) - shift)
    coded_to = tl.minimum(read_from, stop)

    # Where no token has codes, there may be no page.
    if tl.maximum(first, coded_from) < tl.minimum(first + 32, coded_to):
        page = tl.load(block_table + row.to(tl.int64) * table_b + first // L.PAGE).to(tl.int64)
        record = pages + page * page_b + head * L.RECORD
        block = first % L.PAGE // 32
        x = dequantized_keys(record, block, L, FINITE)
        at = first + token_order(1)
        seen = (at >= coded_from) & (at < coded_to)
        _store_rows(key, _fitting(x, key, FINITE), at, seen, shift, head, L)
        even, odd = dequantized_values(record, block, L, FINITE)
        at = first + even_tokens()
        seen = (at >= coded_from) & (at < coded_to)
        _store_rows(value, _fitting(even, value, FINITE), at, seen, shift, head, L)
        seen = (at + 1 >= coded_from) & (at + 1 < coded_to)
        _store_rows(value + HKV * D, _fitting(odd, value, FINITE), at, seen, shift, head, L)

    if (first + 32 > start) & ((first < coded_from) | (first + 32 > read_from)):
        at = first + tl.arange(0, 32)
        is_sink = at < sinks_end
        is_new = at >= length
        exact = (at >= start) & (at < stop) & (is_sink | (at >= read_from))
        owner = tl.load(ring_rows + row).to(tl.int64)
        sink_at = (owner * SINKS + at - start) * (HKV * D) + head * D
        ring_item = (owner * ring_tokens + at % ring_tokens) * HKV + head
        n = (begin + at - length).to(tl.int64)
        head64 = head.to(tl.int64)
        if L.RING_CODES:
            coded = exact & (at < length) & (at >= read_from)
            x = load_exact(ring_key, ring_scales, ring_item, coded, True, L)
            _store_rows(key, _any_number(x, key, FINITE), at, coded, shift, head, L)
            x = load_exact(ring_value, ring_scales + 1, ring_item, coded, False, L)
            _store_rows(value, _any_number(x, value, FINITE), at, coded, shift, head, L)
            exact = exact & (is_sink | is_new)
        none = tl.zeros([32], tl.int64)
        source = sink_key + sink_at
        if not L.RING_CODES:
            source = tl.where(is_sink, source, ring_key + ring_item * D)
        source = tl.where(is_new, new_key + n * new_key_n + head64 * new_key_h, source)
        x = load_rotated(source[:, None], none, exact, key_table, False, 32, L)
        _store_rows(key, _any_number(x, key, FINITE), at, exact, shift, head, L)
        source = sink_value + sink_at
        if not L.RING_CODES:
            source = tl.where(is_sink, source, ring_value + ring_item * D)
        source = tl.where(is_new, new_value + n * new_value_n + head64 * new_value_h, source)
        x = load_rotated(source[:, None], none, exact, value_table, False, 32, L)
        _store_rows(value, _any_number(x, value, FINITE), at, exact, shift, head, L)


def rotate_queries(codec: Codec, query: Tensor) -> Tensor:
    """Queries [N, H, D] in the frame of the pages' keys; contiguous, same dtype."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotate_rows(codec.key.rotation, _one_batch(last_contiguous(query)), _one_batch(out), back=False)
    return out


def unrotate(codec: Codec, mixed: Tensor, out: Tensor) -> None:
    """Write mixed values [N, H, D], rotated back, to `out`, which has any strides."""
    rotate_rows(codec.value.rotation, _one_batch(mixed), _one_batch(out), back=True)


def _one_batch(x: Tensor) -> Tensor:
    """[N, H, D] -> [1, H, N, D]."""
    return x.transpose(0, 1)[None]


def load_workspace(
    codec: Codec,
    view: CacheView,
    group: RaggedGroup,
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first_at: int = 0,
    apart: bool = False,
) -> None:
    """Write all tokens of a group's sequences to key and value [group.tokens, Hkv, D].

    Exact tokens, too, are in the frame of the pages. `view` is the batch's; the new tokens are
    the group's. Positions before `first_at` are left out. Rows after the last token are zeros as
    far as a tile of attention may reach.

    Numbers that are not finite become 0. A tile may reach into the next sequence, with weights
    of 0, and 0 times NaN is NaN: one request's numbers would be in another's output. Where
    attention reads sequences `apart`, numbers and rows after the last token stay what they are.
    """
    layout, rows, device = codec.layout, group.rows, key.device
    new_key, new_value = last_contiguous(new_key), last_contiguous(new_value)
    ring_scales = view.ring_key if view.ring_scales is None else view.ring_scales
    _load_workspace_kernel[(group.blocks * layout.num_kv_heads,)](
        view.pages, view.block_table, view.lengths, view.left_pad,
        view.ring_read_from, view.sink_counts, view.ring_rows,
        group.cu_seqlens_q, group.cu_seqlens_k, group.cu_blocks,
        view.ring_key, view.ring_value, ring_scales, view.sink_key, view.sink_value,
        new_key, new_value,
        codec.key.rotation.table(device), codec.value.rotation.table(device), key, value,
        view.block_table.stride(0), view.pages.stride(0),
        new_key.stride(0), new_key.stride(1), new_value.stride(0), new_value.stride(1),
        rows.start, first_at, rows.stop - rows.start, view.ring_key.shape[1], group.tokens,
        SINKS=view.sink_key.shape[1], TAIL=0 if apart else TAIL, FINITE=not apart,
        L=constants_of(layout, device), num_warps=4,
    )  # fmt: skip


assert BLOCK == 32  # positions of a program, as a block of codes has
