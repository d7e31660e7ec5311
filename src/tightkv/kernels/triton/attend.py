"""Attention over pages, ring, sinks and new tokens: one kernel for decoding and for prefill.

Keys are the left operand, so a tile is [tokens, columns] where a column is one query head of one
query token. A program takes COLS columns of one sequence and KV head, and a split of the pages
(split-KV) or of the exact tokens. Its result lies in the frame of the pages; `merge_splits`
merges the splits and rotates back.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.prefill import can_extend, extend
from tightkv.kernels.ragged import try_extend_ragged
from tightkv.kernels.triton import prefill as prefill_ops
from tightkv.kernels.triton import ragged as ragged_ops
from tightkv.kernels.triton.attend_tile import (
    accumulate_values,
    mask_scores,
    mean_scores,
    no_values,
    query_operands,
    score_tile,
    softmax_step,
    value_accumulators,
    write_partials,
)
from tightkv.kernels.triton.constants import constants_of
from tightkv.kernels.triton.device import (
    device_guard,
    interpreted,
    last_contiguous,
    processor_count,
)
from tightkv.kernels.triton.merge_splits import merge_splits
from tightkv.kernels.triton.ring import load_codes, load_exact
from tightkv.kernels.triton.rotate import rotate
from tightkv.kernels.triton.unpack import load_key_words, load_value_words, scale_order, token_order
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

EXACT_TILE = 64  # exact tokens of a split
_EXACT_TILE = tl.constexpr(EXACT_TILE)


# What changes from step to step, and tables that are cut anywhere, must not ask for other binaries.
@triton.jit(
    do_not_specialize=[
        "block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows",
        "cu_seqlens", "table_b", "mask_tokens", "total_rows", "batch", "num_splits",
        "num_exact_splits", "ring_tokens",
    ]
)  # fmt: skip
def _attend_kernel(
    query, pages, block_table, lengths, left_pad, ring_read_from, sink_counts, ring_rows,
    cu_seqlens, ring_key, ring_value, ring_scales, sink_key, sink_value, new_key, new_value, mask,
    key_table, value_table, partial, partial_lse,
    query_n, query_h, table_b, page_b, new_key_n, new_key_h, new_value_n, new_value_h,
    mask_b, mask_h, mask_q, mask_n, mask_tokens, total_rows, scale, batch, num_splits,
    num_exact_splits, ring_tokens,
    HQ: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr,
    NEW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASK: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    HKV: tl.constexpr = L.HKV
    G: tl.constexpr = HQ // HKV
    PAGE: tl.constexpr = L.PAGE

    # One dimension of programs, since the others end at 65,535: split, head, row, tile.
    num_partials = num_splits + num_exact_splits
    split = tl.program_id(0) % num_partials
    place = tl.program_id(0) // num_partials
    tile = place // (batch * HKV)
    row = place % (batch * HKV) // HKV
    kv_head = place % HKV
    begin = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - begin
    col = tile * COLS + tl.arange(0, COLS)
    if tile * COLS >= count * G:
        return
    token = col // G
    head = kv_head * G + col % G
    live = token < count

    length = tl.load(lengths + row)
    start = tl.load(left_pad + row)
    read_from = tl.load(ring_read_from + row)
    sink_count = tl.load(sink_counts + row)
    sinks_end = tl.minimum(start + sink_count, read_from)
    total = length + count if NEW else length
    query_at = total - count + token
    live = live & (query_at >= 0)
    last_at = tl.minimum(total - count + (tile * COLS + COLS - 1) // G, total - 1)
    low = start  # tokens before are seen by no column, and may be another sequence's
    if WINDOW > 0:
        low = tl.maximum(low, total - count + (tile * COLS) // G - WINDOW + 1)

    # this program's split of pages and of exact tokens (sinks, ring, new)
    page_from = low // PAGE
    page_to = tl.cdiv(read_from, PAGE)
    each = tl.cdiv(tl.maximum(page_to - page_from, 0), num_splits)
    page_from = page_from + split * each
    page_to = tl.minimum(page_to, page_from + each)
    coded_from = tl.maximum(sinks_end, low)
    n_sinks = tl.maximum(sinks_end - low, 0)
    ring_from = tl.maximum(read_from, low)
    n_old = n_sinks + tl.maximum(length - ring_from, 0)
    exact_from = 0
    exact_to = n_old
    if NEW:
        exact_to += count
        if WINDOW > 0:  # where it begins among the new tokens
            exact_from = tl.where(low > length, n_old + low - length, 0)
        if CAUSAL:
            exact_to = tl.minimum(exact_to, n_old + tl.maximum(last_at + 1 - length, 0))
    if num_exact_splits > 0:
        exact_from += (split - num_splits) * _EXACT_TILE
        exact_from = tl.where(split >= num_splits, exact_from, exact_to)
        exact_to = tl.minimum(exact_to, exact_from + _EXACT_TILE)
        page_to = tl.where(split >= num_splits, page_from, page_to)

    d = tl.arange(0, DP)
    query_from = (begin + token).to(tl.int64) * query_n + head.to(tl.int64) * query_h
    q = tl.load(
        query + query_from[:, None] + d[None, :],
        mask=live[:, None] & (d[None, :] < D), other=0.0,
    )  # [COLS, DP]  # fmt: skip

    if MASK > 0:  # in 64 bits: a mask may have more than 2**31 elements
        mask += row.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h + token.to(tl.int64) * mask_q

    peak = tl.full([COLS], float("-inf"), tl.float32)
    weight = tl.zeros([COLS], tl.float32)
    coded = no_values(COLS, L)

    if exact_to > exact_from:
        acc = tl.zeros([DP, COLS], tl.float32)
        owner = tl.load(ring_rows + row).to(tl.int64)
        q_columns = tl.trans(q)
        if q_columns.dtype != tl.float32:  # float32 queries keep their precision and range
            q_columns = q_columns.to(sink_key.dtype.element_ty)
        rotated = tl.zeros([DP, COLS], tl.float32)  # in the frame of the pages
        if L.RING_CODES:
            qr = rotate(q.to(tl.float32), key_table, COLS, L)
            largest = tl.max(tl.abs(qr), axis=1)
            largest = tl.where(largest > 0.0, largest, 1.0)
            qr = tl.trans((qr / largest[:, None]).to(tl.float16))
            ring_end = tl.minimum(exact_to, n_old)
            for e0 in tl.range(tl.maximum(exact_from, n_sinks), ring_end, 16, num_stages=1):
                e = e0 + tl.arange(0, 16)
                at = ring_from + e - n_sinks
                valid = e < ring_end
                item = (owner * ring_tokens + at % ring_tokens) * HKV + kv_head
                k, ks = load_codes(ring_key, ring_scales, item, valid, True, L)
                s = tl.dot(k.to(tl.float16), qr) * ks[:, None] * (largest * scale)[None, :]
                s = mask_scores(
                    s, at, valid, query_at, live, mask, mask_n, mask_tokens, CAUSAL, WINDOW, CAP,
                    MASK,
                )  # fmt: skip
                p, shrink, peak, weight = softmax_step(s, peak, weight)
                v = load_exact(ring_value, ring_scales + 1, item, valid, False, L)
                v = v.to(q_columns.dtype)
                rotated = rotated * shrink[None, :]
                rotated += tl.dot(tl.trans(v), p.to(v.dtype), input_precision="ieee")
            # the other exact tokens: sinks, then new ones
            exact_from = tl.minimum(exact_from, n_sinks) + tl.maximum(exact_from - n_old, 0)
            exact_to = tl.minimum(exact_to, n_sinks) + tl.maximum(exact_to - n_old, 0)
            n_old = n_sinks
        ring_peak = peak
        for e0 in tl.range(exact_from, exact_to, 16, num_stages=1):
            e = e0 + tl.arange(0, 16)
            is_sink = e < n_sinks
            at = tl.where(is_sink, low + e, ring_from + e - n_sinks)
            valid = e < exact_to
            sink_at = (owner * SINKS + low - start + e) * (HKV * D) + kv_head * D
            key_at = sink_key + sink_at
            value_at = sink_value + sink_at
            if not L.RING_CODES:
                ring_at = (owner * ring_tokens + at % ring_tokens) * (HKV * D) + kv_head * D
                key_at = tl.where(is_sink, key_at, ring_key + ring_at)
                value_at = tl.where(is_sink, value_at, ring_value + ring_at)
            if NEW:
                fresh = e >= n_old
                n = (begin + e - n_old).to(tl.int64)
                head64 = kv_head.to(tl.int64)
                at = tl.where(fresh, length + e - n_old, at)
                key_at = tl.where(fresh, new_key + n * new_key_n + head64 * new_key_h, key_at)
                value_at = tl.where(
                    fresh, new_value + n * new_value_n + head64 * new_value_h, value_at
                )
            there = valid[:, None] & (d[None, :] < D)
            k = tl.load(key_at[:, None] + d[None, :], mask=there, other=0.0)
            s = tl.dot(k.to(q_columns.dtype), q_columns, input_precision="ieee") * scale
            s = mask_scores(
                s, at, valid, query_at, live, mask, mask_n, mask_tokens, CAUSAL, WINDOW, CAP, MASK
            )
            p, shrink, peak, weight = softmax_step(s, peak, weight)
            v = tl.load(value_at[:, None] + d[None, :], mask=there, other=0.0)
            v = v.to(q_columns.dtype)
            acc = acc * shrink[None, :]
            acc += tl.dot(tl.trans(v), p.to(v.dtype), input_precision="ieee")
        acc = rotate(tl.trans(acc), value_table, COLS, L)
        if L.RING_CODES:
            shrink = tl.where(ring_peak == float("-inf"), 0.0, tl.exp2(ring_peak - peak))
            acc += tl.trans(rotated) * shrink[:, None]
        coded = value_accumulators(acc * (1.0 / L.VALUE_UNIT), COLS, L)

    if page_to > page_from:
        NB: tl.constexpr = TILE // 32
        TILES: tl.constexpr = PAGE // TILE
        operands, q_mean, top = query_operands(q, key_table, COLS, L)
        factor = top * scale
        offset = token_order(NB)
        scale_at = scale_order(NB)
        for t in tl.range(page_from * TILES, page_to * TILES, num_stages=2):
            index = t // TILES
            page = tl.load(block_table + row * table_b + index).to(tl.int64)
            record = pages + (page * page_b + kv_head * L.RECORD)
            block = (t % TILES) * NB
            kw = load_key_words(record, block, NB, L)
            numbers = record.to(tl.pointer_type(tl.float16)) + block * 32 + scale_at
            ks = tl.load(numbers + L.KEY_SCALE_AT // 2).to(tl.float32)
            vs = tl.load(numbers + L.VALUE_SCALE_AT // 2).to(tl.float32)
            vw = load_value_words(record, block, NB, L)

            s = score_tile(kw, operands, TILE, L)
            s = s * (tl.abs(ks) * L.KEY_UNIT)[:, None]
            if L.MEAN_BITS > 0:
                bias = mean_scores(record, q_mean, L)
                centered = ks.to(tl.int32, bitcast=True) < 0
                s += tl.where(centered[:, None], bias[None, :], 0.0)
            s = s * factor[None, :]
            at = index * PAGE + block * 32 + offset
            valid = (at >= coded_from) & (at < read_from)
            s = mask_scores(
                s, at, valid, query_at, live, mask, mask_n, mask_tokens, CAUSAL, WINDOW, CAP, MASK
            )
            p, shrink, peak, weight = softmax_step(s, peak, weight)
            # A token that is not valid may have a NaN scale: its product must be 0 too.
            p = (p * tl.where(valid, vs, 0.0)[:, None]).to(tl.float16)
            coded = accumulate_values(vw, p, shrink, coded, L)

    at = (split * total_rows + begin + token).to(tl.int64) * HQ + head
    write_partials(partial, partial_lse, at, token < count, peak, weight, coded, L)


@device_guard
def attend(
    codec: Codec, query: Tensor, view: CacheView, cu_seqlens: Tensor, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """See `reference.attend`."""
    max_queries, scale, causal, window, softcap, mask, new_key, new_value, out = options
    layout, device = codec.layout, query.device
    rows, hq, d = query.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    plain = causal and window is None and softcap is None and mask is None
    many = plain and not interpreted() and can_extend(codec, query, view, max_queries)
    if many and rows and new_key is not None and new_value is not None:
        answer, lse = extend(
            codec, last_contiguous(query), view, prefill_ops, scale=scale,
            new_key=last_contiguous(new_key), new_value=last_contiguous(new_value),
        )  # fmt: skip
        return answer if out is None else out.copy_(answer), lse
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(rows, hq, dtype=torch.float32, device=device)
    if not rows or not view.batch:
        return out.zero_(), lse.fill_(-math.inf)
    if plain and view.ragged:
        found = try_extend_ragged(
            codec, query, view, ragged_ops, scale=scale, new_key=new_key, new_value=new_value,
            out=out,
        )  # fmt: skip
        if found is not None:
            return out, found
    query = last_contiguous(query)
    hkv = layout.num_kv_heads
    new = new_key is not None
    plan = _plan(layout, view, hq // hkv, max_queries, new, device)
    if new_key is None or new_value is None:
        new_key = new_value = query  # not read
    exact_dtype = view.sink_key.dtype  # one load reads sinks, rings and new tokens
    ring_scales = view.ring_key if view.ring_scales is None else view.ring_scales
    new_key, new_value = (last_contiguous(x.to(exact_dtype)) for x in (new_key, new_value))
    num_splits, num_exact_splits = plan.pop("num_splits"), plan.pop("num_exact_splits")
    num_partials = num_splits + num_exact_splits
    partial = torch.empty(num_partials, rows, hq, d, dtype=torch.float32, device=device)
    partial_lse = torch.empty(num_partials, rows, hq, dtype=torch.float32, device=device)
    mask_kind, mask, mask_strides = _mask(mask, query)
    tiles = triton.cdiv(max_queries * (hq // hkv), plan["COLS"])
    _attend_kernel[(num_partials * view.batch * hkv * tiles,)](
        query, view.pages, view.block_table, view.lengths, view.left_pad,
        view.ring_read_from, view.sink_counts, view.ring_rows, cu_seqlens,
        view.ring_key, view.ring_value, ring_scales, view.sink_key, view.sink_value,
        new_key, new_value, mask,
        codec.key.rotation.table(device), codec.value.rotation.table(device),
        partial, partial_lse,
        query.stride(0), query.stride(1), view.block_table.stride(0), view.pages.stride(0),
        new_key.stride(0), new_key.stride(1), new_value.stride(0), new_value.stride(1),
        *mask_strides, mask.shape[-1], rows, scale,
        view.batch, num_splits, num_exact_splits, view.ring_key.shape[1],
        HQ=hq, SINKS=view.sink_key.shape[1], NEW=new, CAUSAL=causal, WINDOW=window or 0,
        CAP=softcap or 0.0, MASK=mask_kind, L=constants_of(layout, device), **plan,
    )  # fmt: skip
    rotation = codec.value.rotation
    merge_splits(rotation, partial, partial_lse, out, lse, cu_seqlens, view.batch)
    return out, lse


def _mask(mask: Tensor | None, like: Tensor) -> tuple[int, Tensor, tuple[int, int, int, int]]:
    """Kind (0 none, 1 bool, 2 float), tensor, strides with 0 for broadcast dimensions."""
    if mask is None:
        return 0, like, (0, 0, 0, 0)
    steps = [0 if n == 1 else s for n, s in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
    kind = 1 if mask.dtype == torch.bool else 2
    mask = mask.view(torch.uint8) if kind == 1 else mask
    return kind, mask, (steps[0], steps[1], steps[2], mask.stride(3))


def _plan(
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
