"""Write new tokens into pages, ring and sinks: rotate, center, quantize, pack, in one launch.

A program owns one page of one head of one sequence, for keys or for values, so no two programs
write the same word. Pages that complete are encoded whole from the new tokens and the ring;
an open page gets the codes of its new tokens. Further programs copy the tokens themselves.
"""

import triton
import triton.language as tl

from tightkv.kernels.triton.rotate import rotate
from tightkv.math.feedback import MOST_SCALE as _MOST_SCALE

FP16_MAX = tl.constexpr(65504.0)
TINY = tl.constexpr(1.1754943508222875e-38)
MOST_SCALE = tl.constexpr(_MOST_SCALE)


@triton.jit
def _finite(x):
    """NaN as 0, Inf as the largest float16."""
    x = x.to(tl.float32)
    x = tl.where(x != x, 0.0, x)
    x = tl.where(x == float("inf"), FP16_MAX, x)
    return tl.where(x == float("-inf"), -FP16_MAX, x)


@triton.jit
def _nearest(z, BITS: tl.constexpr, BOOK: tl.constexpr):
    """Codes (int32) of the nearest centroids, and those."""
    size = tl.abs(z)
    index = tl.zeros(z.shape, tl.int32)
    c = tl.full(z.shape, BOOK[1][0], tl.float32)
    for i in tl.static_range(0, (1 << (BITS - 1)) - 1):
        above = size > BOOK[0][i]
        index += above.to(tl.int32)
        c = tl.where(above, BOOK[1][i + 1], c)
    code = tl.where(z < 0.0, index + (1 << (BITS - 1)), index)
    return code, tl.where(z < 0.0, -c, c)


@triton.jit
def _quantize(y, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, BOOK: tl.constexpr,
              MODE: tl.constexpr):  # fmt: skip
    """Rotated rows [T, DP] -> codes (int32) and float32 scales [T].

    BOOK is (thresholds, magnitudes), or (1 / unit, unit) for 8 bits. MODE: 0 norm, 1 corrected,
    2 least squares, 3 unbiased.
    """
    y64 = y.to(tl.float64)
    square = tl.sum(y64 * y64, axis=1).to(tl.float32)
    norm = tl.sqrt_rn(square)
    unit = tl.div_rn(y, tl.broadcast_to(tl.maximum(norm, TINY)[:, None], y.shape))
    z = unit * (D**0.5)
    if BITS == 8:
        # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
        level = (z * BOOK[0] + 12582912.0) - 12582912.0
        level = tl.minimum(tl.maximum(level, -127.0), 127.0)
        code = level.to(tl.int32) & 0xFF
        c = level * BOOK[1]
    else:
        code, c = _nearest(z, BITS, BOOK)
    c = tl.where(tl.arange(0, DP)[None, :] < D, c * (1.0 / D**0.5), 0.0).to(tl.float64)
    if MODE == 0:
        scale = norm
    elif MODE == 1:
        direction = tl.sqrt_rn(tl.sum(c * c, axis=1).to(tl.float32))
        scale = tl.div_rn(norm, tl.maximum(direction, TINY))
    elif MODE == 2:
        direction = tl.maximum(tl.sum(c * c, axis=1).to(tl.float32), TINY)
        scale = tl.div_rn(tl.sum(y64 * c, axis=1).to(tl.float32), direction)
    else:
        product = tl.sum(y64 * c, axis=1).to(tl.float32)
        scale = tl.div_rn(norm * norm, tl.maximum(product, TINY))
    return code, tl.minimum(tl.maximum(scale, -FP16_MAX), FP16_MAX)


@triton.jit
def _quantize_with_feedback(
    y, factors, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, BOOK: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """As `_quantize`, in the metric of `factors` [D, D]. No product may be fused with a sum."""
    d = tl.arange(0, DP)[None, :]
    y64 = y.to(tl.float64)
    norm = tl.sqrt_rn(tl.sum(y64 * y64, axis=1).to(tl.float32))
    unit = tl.div_rn(y, tl.broadcast_to(tl.maximum(norm, TINY)[:, None], y.shape))
    x = unit * (GAIN * D**0.5)
    missed = tl.zeros(x.shape, tl.float32)
    projected = tl.zeros(x.shape, tl.float32)
    for step in range(0, D):
        i = D - 1 - step
        row = tl.load(factors + i * D + d, mask=d < i, other=0.0)
        now = tl.sum(tl.where(d == i, x, 0.0), axis=1)
        _, c = _nearest(now + tl.sum(tl.where(d == i, missed, 0.0), axis=1), BITS, BOOK)
        missed += (now - c)[:, None] * row
        projected += now[:, None] * row
    target = x + missed
    code, c = _nearest(target, BITS, BOOK)
    weights = tl.load(factors + d * (D + 1), mask=d < D, other=0.0).to(tl.float64)
    size = (x + projected).to(tl.float64)
    whole = tl.sum(weights * size * size, axis=1).to(tl.float32)
    along = tl.sum(weights * size * (size - (target - c).to(tl.float64)), axis=1).to(tl.float32)
    ratio = tl.div_rn(whole, tl.maximum(along, TINY))
    ratio = tl.minimum(tl.maximum(ratio, 1.0 / MOST_SCALE), MOST_SCALE)
    return code, tl.minimum(norm * (1.0 / GAIN) * ratio, FP16_MAX)


@triton.jit
def _pack_word(codes, ROWS: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """Codes [ROWS, N] -> 32-bit words [ROWS, N * BITS / 32], for 2, 4 and 8 bits."""
    PER: tl.constexpr = 32 // BITS
    k = tl.arange(0, PER)
    x = tl.reshape(codes, [ROWS, N // PER, PER])
    if BITS == 2:
        x = x << (4 * (k % 8) + 2 * (k // 8))[None, None, :]
    else:
        x = x << (BITS * k)[None, None, :]
    return tl.sum(x, axis=2)


@triton.jit
def _pack_word3(codes, J: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """Word J of each group of 3-bit codes: [ROWS, N] -> [ROWS, N / GROUP]."""
    QUARTER: tl.constexpr = GROUP // 4
    k = tl.arange(0, GROUP)
    x = tl.reshape(codes, [ROWS, N // GROUP, GROUP])
    shift = (4 * (k % QUARTER))[None, None, :]
    mine = (k // QUARTER == J)[None, None, :]
    spare = (k // QUARTER == 3)[None, None, :]
    x = tl.where(mine, x << shift, tl.where(spare, ((x >> J) & 1) << (shift + 3), 0))
    return tl.sum(x, axis=2)


@triton.jit
def _store_keys(plane, block, codes, live, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """Codes [32 tokens, DP] of one block into a key plane (pointer to bytes)."""
    C: tl.constexpr = D // CHUNK
    CP: tl.constexpr = DP // CHUNK
    t = tl.arange(0, 32)
    row = ((t % 8) * (C * 4) + t // 8)[:, None]
    if BITS == 3:
        for j in tl.static_range(3):
            w = _pack_word3(codes, j, 32, DP, CHUNK)  # [32, CP]
            c = tl.arange(0, CP)
            at = (block * 3 + j) * (32 * C) + row + c[None, :] * 4
            there = live[:, None] & (c < C)[None, :]
            if CHUNK == 32:
                tl.store(plane.to(tl.pointer_type(tl.int32)) + at, w, mask=there)
            else:
                tl.store(plane.to(tl.pointer_type(tl.int16)) + at, w.to(tl.int16), mask=there)
    else:
        w = _pack_word(codes, 32, DP, BITS)  # [32, DP * BITS / 32]
        PER: tl.constexpr = BITS * CHUNK // 32  # 32-bit words of a chunk
        n = tl.arange(0, CP * PER)
        c = (n // PER)[None, :]
        j = (n % PER)[None, :]
        there = live[:, None] & (c < C)
        if CHUNK == 32:
            at = (block * BITS + j) * (32 * C) + row + c * 4
            tl.store(plane.to(tl.pointer_type(tl.int32)) + at, w, mask=there)
        else:
            at = (block * BITS + 2 * j) * (32 * C) + row + c * 4
            half = plane.to(tl.pointer_type(tl.int16))
            tl.store(half + at, w.to(tl.int16), mask=there)
            tl.store(half + at + 32 * C, (w >> 16).to(tl.int16), mask=there)


@triton.jit
def _merge_words(where, new, own, there, WHOLE):
    """Replace the bits `own` of the words at `where`."""
    if not WHOLE:
        old = tl.load(where, mask=there, other=0)
        new = (old & ~own) | new
    tl.store(where, new, mask=there)


@triton.jit
def _store_values(plane, block, codes, live, WHOLE, BITS: tl.constexpr, D: tl.constexpr,
                  DP: tl.constexpr):  # fmt: skip
    """Codes [32 tokens, DP] of one block into a value plane; pair mates that are not live stay."""
    C: tl.constexpr = D // 16
    ones = tl.where(live[:, None], (1 << BITS) - 1, 0) + tl.zeros([32, DP], tl.int32)
    codes = tl.where(live[:, None], codes, 0)
    codes = tl.reshape(tl.permute(tl.reshape(codes, [16, 2, DP]), [0, 2, 1]), [16, 2 * DP])
    ones = tl.reshape(tl.permute(tl.reshape(ones, [16, 2, DP]), [0, 2, 1]), [16, 2 * DP])
    pair = tl.arange(0, 16)
    row = ((pair % 4) * 4 + pair // 4)[:, None]
    words = plane.to(tl.pointer_type(tl.int32))
    if BITS == 3:
        c = tl.arange(0, DP // 16)[None, :]
        for j in tl.static_range(3):
            new = _pack_word3(codes, j, 16, 2 * DP, 32)
            own = _pack_word3(ones, j, 16, 2 * DP, 32)
            where = words + ((block * 3 + j) * C + c) * 16 + row
            _merge_words(where, new, own, (c < C) & (row >= 0), WHOLE)
    else:
        new = _pack_word(codes, 16, 2 * DP, BITS)
        own = _pack_word(ones, 16, 2 * DP, BITS)
        n = tl.arange(0, DP // 16 * BITS)
        c = (n // BITS)[None, :]
        j = (n % BITS)[None, :]
        where = words + ((block * BITS + j) * C + c) * 16 + row
        _merge_words(where, new, own, (c < C) & (row >= 0), WHOLE)


@triton.jit
def _copy(source, source_n, token, target, place, there, HKV: tl.constexpr, D: tl.constexpr,
          DP: tl.constexpr):  # fmt: skip
    d = tl.arange(0, DP)
    mask = there[:, None] & (d < D)[None, :]
    x = tl.load(source + token[:, None].to(tl.int64) * source_n + d[None, :], mask=mask, other=0.0)
    where = target + place[:, None] * (HKV * D) + d[None, :]
    tl.store(where, x.to(target.dtype.element_ty), mask=mask)


# What changes from step to step, and tables that are cut anywhere, must not ask for other binaries.
@triton.jit(
    do_not_specialize=[
        "block_table", "lengths", "starts", "ring_rows", "exact_starts", "first",
        "table_b", "touched", "copies", "ring_tokens",
    ]
)  # fmt: skip
def _append_kernel(
    key, value, pages, block_table, lengths, starts, ring_rows, exact_starts, first,
    ring_key, ring_value, sink_key, sink_value, key_table, value_table, feedback,
    key_n, key_h, value_n, value_h, table_b, page_b, touched, copies, ring_tokens,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    RECORD: tl.constexpr, SINKS: tl.constexpr,
    SINKS_P: tl.constexpr, KEY_BITS: tl.constexpr, KEY_CHUNK: tl.constexpr, KEY_BOOK: tl.constexpr,
    KEY_MODE: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_BOOK: tl.constexpr,
    VALUE_MODE: tl.constexpr, VALUE_AT: tl.constexpr, KEY_SCALE_AT: tl.constexpr,
    VALUE_SCALE_AT: tl.constexpr, MEAN_AT: tl.constexpr, MEAN_BITS: tl.constexpr,
    KIND: tl.constexpr, OPEN: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Keys of pages that complete take `feedback`, unless GAIN is 0.

    Programs [B * (touched pages, then copies of 32 tokens), HKV, key or value].
    """
    row = tl.program_id(0) // (touched + copies)
    part = tl.program_id(0) % (touched + copies)
    head = tl.program_id(1).to(tl.int64)  # its stride may be that of all tokens
    begin = tl.load(first + row)
    count = tl.load(first + row + 1) - begin
    length = tl.load(lengths + row)
    if (count == 0) | (length < count):
        return
    before = length - count
    start = tl.load(starts + row)
    owner = tl.load(ring_rows + row).to(tl.int64)
    d = tl.arange(0, DP)
    t = tl.arange(0, 32)
    is_key = tl.program_id(2) == 0
    if is_key:
        source, source_n, source_h, ring, sink = key, key_n, key_h, ring_key, sink_key
    else:
        source, source_n, source_h, ring, sink = value, value_n, value_h, ring_value, sink_value

    if part >= touched:
        token = tl.maximum(count - ring_tokens, 0) + (part - touched) * 32 + t
        slot = owner * ring_tokens + (before + token) % ring_tokens
        _copy(source + head * source_h, source_n, begin + token, ring + head * D, slot,
              token < count, HKV, D, DP)  # fmt: skip
        if (SINKS > 0) & (part == touched) & (before < start + SINKS):
            n = tl.arange(0, SINKS_P)
            place = start + n - before
            there = (n < SINKS) & (place >= 0) & (place < count)
            _copy(source + head * source_h, source_n, begin + place, sink + head * D,
                  owner * SINKS + n, there, HKV, D, DP)  # fmt: skip
        return

    index = before // PAGE + part
    if index * PAGE >= length:
        return
    complete = (index + 1) * PAGE <= length
    if (not OPEN) & (not complete):
        return
    page = tl.load(block_table + row * table_b + index).to(tl.int64)
    record = pages + page * page_b + head * RECORD
    exact_from = tl.load(exact_starts + row)
    # tokens to encode: those with an exact copy, or the new ones of an open page
    lowest = tl.maximum(tl.where(complete, exact_from, before), index * PAGE)
    highest = tl.minimum(length, (index + 1) * PAGE)
    ring_base = ring + owner * (ring_tokens * HKV * D) + head * D
    source_base = source + head * source_h

    mean = tl.zeros([1, DP], tl.float32)
    center = is_key & complete & (MEAN_BITS > 0)
    if center:
        numbers = record.to(tl.pointer_type(tl.float16)) + MEAN_AT // 2
        levels = (record + MEAN_AT).to(tl.pointer_type(tl.int8))
        if exact_from <= index * PAGE:
            total = tl.zeros([DP], tl.float32)
            for b in range(0, PAGE // 32):
                at = index * PAGE + b * 32 + t
                x = _load_tokens(
                    source_base, source_n, ring_base, ring_tokens, at, before, begin, at >= start,
                    HKV, D, DP,
                )  # fmt: skip
                total += tl.sum(_finite(x), axis=0)
            real = tl.maximum((index + 1) * PAGE - tl.maximum(start, index * PAGE), 1)
            rows = tl.where(tl.arange(0, 16)[:, None] == 0, (total / real)[None, :], 0.0)
            fresh = tl.sum(rotate(rows, key_table, 16, D, DP, KIND), axis=0)
            if MEAN_BITS == 16:
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
        elif MEAN_BITS == 16:
            mean = tl.load(numbers + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        else:
            step = tl.load(numbers + D // 2).to(tl.float32)
            mean = (tl.load(levels + d, mask=d < D, other=0).to(tl.float32) * step)[None, :]

    for b in range((lowest - index * PAGE) // 32, tl.cdiv(highest - index * PAGE, 32)):
        at = index * PAGE + b * 32 + t
        live = (at >= lowest) & (at < highest)
        x = _load_tokens(
            source_base, source_n, ring_base, ring_tokens, at, before, begin, live, HKV, D, DP
        )
        x = _finite(x)
        # scales: [blk][r][i]
        scale_at = b * 32 + (t % 8) * 4 + t // 8
        if is_key:
            y = rotate(x, key_table, 32, D, DP, KIND)
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
                    code, scale = _quantize_with_feedback(
                        y, factors, D, DP, KEY_BITS, KEY_BOOK, GAIN
                    )
                else:
                    code, scale = _quantize(y, D, DP, KEY_BITS, KEY_BOOK, KEY_MODE)
            else:
                code, scale = _quantize(y, D, DP, KEY_BITS, KEY_BOOK, KEY_MODE)
            scale = tl.where(centered, -scale, scale)
            numbers = record.to(tl.pointer_type(tl.float16)) + KEY_SCALE_AT // 2
            tl.store(numbers + scale_at, scale.to(tl.float16), mask=live)
            _store_keys(record, b, code, live, KEY_BITS, D, DP, KEY_CHUNK)
        else:
            y = rotate(x, value_table, 32, D, DP, KIND)
            code, scale = _quantize(y, D, DP, VALUE_BITS, VALUE_BOOK, VALUE_MODE)
            numbers = record.to(tl.pointer_type(tl.float16)) + VALUE_SCALE_AT // 2
            tl.store(numbers + scale_at, scale.to(tl.float16), mask=live)
            whole = (index * PAGE + b * 32 >= lowest) & (index * PAGE + b * 32 + 32 <= highest)
            _store_values(record + VALUE_AT, b, code, live, whole, VALUE_BITS, D, DP)


@triton.jit
def _load_tokens(
    source, source_n, ring, ring_tokens, at, before, begin, live, HKV: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Exact tokens at positions `at`: new ones from the input, older ones from the ring."""
    d = tl.arange(0, DP)
    new = (at >= before)[:, None]
    there = live[:, None] & (d < D)[None, :]
    offset = (begin + at - before)[:, None].to(tl.int64) * source_n + d[None, :]
    x = tl.load(source + offset, mask=there & new, other=0.0).to(tl.float32)
    old = tl.load(
        ring + ((at % ring_tokens) * (HKV * D))[:, None] + d[None, :], mask=there & ~new, other=0.0
    )
    return x + old.to(tl.float32)
