"""Write new tokens into pages, ring and sinks: rotate, center, quantize, pack, in one launch.

A program owns one page of one head of one sequence, for keys or for values, so no two programs
write the same word. Pages that complete are encoded whole from the new tokens and the ring;
an open page gets the codes of its new tokens. Further programs copy the tokens themselves.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.triton.constants import constants_of
from tightkv.kernels.triton.device import device_guard, last_contiguous
from tightkv.kernels.triton.encode import (
    finite,
    quantize,
    quantize_keys_with_feedback,
    store_keys,
    store_values,
)
from tightkv.kernels.triton.ring import load_exact, rotate_exact, round_exact, store_codes
from tightkv.kernels.triton.rotate import rotate
from tightkv.kernels.view import AppendOptions, CacheView
from tightkv.math.feedback import gain
from tightkv.math.quantize import finite as finite_or_raise
from tightkv.pages.codec import Codec
from tightkv.pages.layout import RING_SLACK


@triton.jit
def _copy(source, source_n, token, target, place, there, L: tl.constexpr):
    d = tl.arange(0, L.DP)
    mask = there[:, None] & (d < L.D)[None, :]
    x = tl.load(source + token[:, None].to(tl.int64) * source_n + d[None, :], mask=mask, other=0.0)
    where = target + place[:, None] * (L.HKV * L.D) + d[None, :]
    tl.store(where, x.to(target.dtype.element_ty), mask=mask)


# What changes from step to step, and tables that are cut anywhere, must not ask for other binaries.
@triton.jit(
    do_not_specialize=[
        "block_table", "lengths", "left_pad", "ring_rows", "ring_valid_from", "cu_seqlens",
        "table_b", "touched", "copies", "ring_tokens", "lag",
    ]
)  # fmt: skip
def _append_kernel(
    key, value, pages, block_table, lengths, left_pad, ring_rows, ring_valid_from, cu_seqlens,
    ring_key, ring_value, ring_scales, sink_key, sink_value, key_table, value_table, feedback,
    key_n, key_h, value_n, value_h, table_b, page_b, touched, copies, ring_tokens, lag,
    SINKS: tl.constexpr, SINKS_P: tl.constexpr, ENCODE_PARTIAL_PAGE: tl.constexpr,
    GAIN: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Keys of pages that complete take `feedback`, unless GAIN is 0.

    Programs [B * (touched pages, then copies of 32 tokens), HKV, key or value].
    """
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    HKV: tl.constexpr = L.HKV
    PAGE: tl.constexpr = L.PAGE
    row = tl.program_id(0) // (touched + copies)
    part = tl.program_id(0) % (touched + copies)
    head = tl.program_id(1).to(tl.int64)  # its stride may be that of all tokens
    begin = tl.load(cu_seqlens + row)
    count = tl.load(cu_seqlens + row + 1) - begin
    length = tl.load(lengths + row)
    if (count == 0) | (length < count):
        return
    before = length - count
    start = tl.load(left_pad + row)
    owner = tl.load(ring_rows + row).to(tl.int64)
    d = tl.arange(0, DP)
    t = tl.arange(0, 32)
    is_key = tl.program_id(2) == 0
    scales = ring_scales + tl.program_id(2)
    if is_key:
        source, source_n, source_h, ring, sink = key, key_n, key_h, ring_key, sink_key
        table = key_table
    else:
        source, source_n, source_h, ring, sink = value, value_n, value_h, ring_value, sink_value
        table = value_table

    if part >= touched:
        token = tl.maximum(count - ring_tokens, 0) + (part - touched) * 32 + t
        slot = owner * ring_tokens + (before + token) % ring_tokens
        if L.RING_CODES:
            new = token < count
            codes, scale = _round_new(
                source + head * source_h, source_n, begin + token, new, is_key, table, L
            )
            store_codes(ring, scales, slot * HKV + head, codes, scale, new, is_key, L)
        else:
            _copy(source + head * source_h, source_n, begin + token, ring + head * D, slot,
                  token < count, L)  # fmt: skip
        if (SINKS > 0) & (part == touched) & (before < start + SINKS):
            n = tl.arange(0, SINKS_P)
            place = start + n - before
            there = (n < SINKS) & (place >= 0) & (place < count)
            _copy(source + head * source_h, source_n, begin + place, sink + head * D,
                  owner * SINKS + n, there, L)  # fmt: skip
        return

    index = tl.maximum(before - lag, 0) // PAGE + part
    if index * PAGE >= length - lag:
        return
    complete = (index + 1) * PAGE <= length - lag
    if (not ENCODE_PARTIAL_PAGE) & (not complete):
        return
    page = tl.load(block_table + row * table_b + index).to(tl.int64)
    record = pages + page * page_b + head * L.RECORD
    exact_from = tl.load(ring_valid_from + row)
    # tokens to encode: those with an exact copy, or the new ones of an open page
    lowest = tl.maximum(tl.where(complete, exact_from, before), index * PAGE)
    highest = tl.minimum(length, (index + 1) * PAGE)
    ring_item = owner * (ring_tokens * HKV) + head
    source_base = source + head * source_h

    mean = tl.zeros([1, DP], tl.float32)
    center = is_key & complete & (L.MEAN_BITS > 0)
    if center:
        numbers = record.to(tl.pointer_type(tl.float16)) + L.MEAN_AT // 2
        levels = (record + L.MEAN_AT).to(tl.pointer_type(tl.int8))
        if exact_from <= index * PAGE:
            total = tl.zeros([DP], tl.float32)
            for b in range(0, PAGE // 32):
                at = index * PAGE + b * 32 + t
                x = _load_tokens(
                    source_base, source_n, ring, scales, ring_item, ring_tokens, at, before, begin,
                    at >= start, is_key, table, L,
                )  # fmt: skip
                total += tl.sum(x, axis=0)
            real = tl.maximum((index + 1) * PAGE - tl.maximum(start, index * PAGE), 1)
            fresh = total / real
            if not L.RING_CODES:
                rows = tl.where(tl.arange(0, 16)[:, None] == 0, fresh[None, :], 0.0)
                fresh = tl.sum(rotate(rows, table, 16, L), axis=0)
            if L.MEAN_BITS == 16:
                tl.store(numbers + d, fresh.to(tl.float16), mask=d < D)
                mean = fresh.to(tl.float16).to(tl.float32)[None, :]
            else:
                half_step = tl.div_rn(tl.max(tl.abs(fresh), axis=0), 127.0).to(tl.float16)
                step = half_step.to(tl.float32)
                size = tl.maximum(step, 6.103515625e-05)
                level = tl.div_rn(fresh, tl.broadcast_to(size, fresh.shape))
                level = (level + 12582912.0) - 12582912.0
                level = tl.minimum(tl.maximum(level, -127.0), 127.0)
                tl.store(levels + d, level.to(tl.int8), mask=d < D)
                tl.store(numbers + D // 2, half_step)
                mean = (level * step)[None, :]
        elif L.MEAN_BITS == 16:
            mean = tl.load(numbers + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        else:
            step = tl.load(numbers + D // 2).to(tl.float32)
            mean = (tl.load(levels + d, mask=d < D, other=0).to(tl.float32) * step)[None, :]

    for b in range((lowest - index * PAGE) // 32, tl.cdiv(highest - index * PAGE, 32)):
        at = index * PAGE + b * 32 + t
        live = (at >= lowest) & (at < highest)
        y = _load_tokens(
            source_base, source_n, ring, scales, ring_item, ring_tokens, at, before, begin, live,
            is_key, table, L,
        )  # fmt: skip
        if not L.RING_CODES:
            y = rotate(y, table, 32, L)
        # scales: [blk][r][i]
        scale_at = b * 32 + (t % 8) * 4 + t // 8
        if is_key:
            centered = tl.zeros([32], tl.int1)
            if center:
                rest = y - mean
                plain64 = y.to(tl.float64)
                rest64 = rest.to(tl.float64)
                centered = tl.sum(rest64 * rest64, axis=1) < tl.sum(plain64 * plain64, axis=1)
                y = tl.where(centered[:, None], rest, y)
            if GAIN > 0:
                if complete:
                    factors = feedback + head * (D * D)
                    code, scale = quantize_keys_with_feedback(y, factors, GAIN, L)
                else:
                    code, scale = quantize(y, L.KEY_BITS, L.KEY_BOOK, L.KEY_MODE, L)
            else:
                code, scale = quantize(y, L.KEY_BITS, L.KEY_BOOK, L.KEY_MODE, L)
            scale = tl.where(centered, -scale, scale)
            numbers = record.to(tl.pointer_type(tl.float16)) + L.KEY_SCALE_AT // 2
            tl.store(numbers + scale_at, scale.to(tl.float16), mask=live)
            store_keys(record, b, code, live, L)
        else:
            code, scale = quantize(y, L.VALUE_BITS, L.VALUE_BOOK, L.VALUE_MODE, L)
            numbers = record.to(tl.pointer_type(tl.float16)) + L.VALUE_SCALE_AT // 2
            tl.store(numbers + scale_at, scale.to(tl.float16), mask=live)
            whole = (index * PAGE + b * 32 >= lowest) & (index * PAGE + b * 32 + 32 <= highest)
            store_values(record, b, code, live, whole, L)


@triton.jit
def _load_tokens(
    source, source_n, ring, scales, ring_item, ring_tokens, at, before, begin, live, is_key, table,
    L: tl.constexpr,
):  # fmt: skip
    """Finite tokens at positions `at`: new ones from the input, older ones from the ring.

    With RING_CODES they are rotated, as the ring has them or would have them.
    """
    d = tl.arange(0, L.DP)
    new = at >= before
    item = ring_item + (at % ring_tokens) * L.HKV
    if L.RING_CODES:
        x, step = _round_new(source, source_n, begin + at - before, live & new, is_key, table, L)
        old = load_exact(ring, scales, item, live & (at < before), is_key, L)
        x = tl.where(new[:, None], x * step.to(tl.float32)[:, None], old)
    else:
        mask = (live & (at < before))[:, None] & (d < L.D)[None, :]
        x = _load_new(source, source_n, begin + at - before, live & new, L)
        x += finite(tl.load(ring + item[:, None] * L.D + d[None, :], mask=mask, other=0.0))
    return x


@triton.jit
def _load_new(source, source_n, token, there, L: tl.constexpr):
    """New tokens of the batch, finite."""
    d = tl.arange(0, L.DP)
    mask = there[:, None] & (d < L.D)[None, :]
    offset = token[:, None].to(tl.int64) * source_n + d[None, :]
    return finite(tl.load(source + offset, mask=mask, other=0.0))


@triton.jit
def _round_new(source, source_n, token, there, is_key, table, L: tl.constexpr):
    """New tokens rounded as for a ring of codes, and their scales."""
    x = _load_new(source, source_n, token, there, L)
    return round_exact(rotate_exact(x, table, 32, L), is_key)


@device_guard
def append(
    codec: Codec, view: CacheView, key: Tensor, value: Tensor, options: AppendOptions
) -> None:
    """See `reference.append`."""
    cu_seqlens, ring_valid_from, max_new, encode_partial_page, lag = options
    layout = codec.layout
    if codec.cfg.check_finite:
        finite_or_raise(key, True), finite_or_raise(value, True)
    key, value = last_contiguous(key), last_contiguous(value)
    size, ring = layout.page_size, view.ring_key.shape[1]
    touched = (max_new - 2) // size + 2
    copies = triton.cdiv(min(max_new, ring), 32)
    # Only a short append may overwrite the ring while pages are sealed from it.
    launches = [(touched, copies)] if max_new <= RING_SLACK else [(touched, 0), (0, copies)]
    sinks = view.sink_key.shape[1]
    ring_scales = view.ring_key if view.ring_scales is None else view.ring_scales
    coding: dict[str, Any] = {"GAIN": 0.0, "num_warps": 4}
    if view.feedback is not None:
        # Codes are those of the reference only if no product is fused with a sum.
        coding = {"GAIN": gain(codec.cfg.key_bits), "num_warps": 8, "enable_fp_fusion": False}
    for pages, copied in launches:
        _append_kernel[(view.batch * (pages + copied), layout.num_kv_heads, 2)](
            key, value, view.pages, view.block_table, view.lengths, view.left_pad, view.ring_rows,
            ring_valid_from, cu_seqlens,
            view.ring_key, view.ring_value, ring_scales, view.sink_key, view.sink_value,
            codec.key.rotation.table(key.device), codec.value.rotation.table(key.device),
            view.feedback, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            view.block_table.stride(0), view.pages.stride(0), pages, copied, ring, lag,
            SINKS=sinks, SINKS_P=triton.next_power_of_2(max(sinks, 1)),
            ENCODE_PARTIAL_PAGE=encode_partial_page, L=constants_of(layout, key.device), **coding,
        )  # fmt: skip
