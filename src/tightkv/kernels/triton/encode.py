"""Rotated tokens to codes and scales, and codes to the words of a page."""

import triton
import triton.language as tl

from tightkv.math.feedback import MOST_SCALE as _MOST_SCALE

FP16_MAX = tl.constexpr(65504.0)
TINY = tl.constexpr(1.1754943508222875e-38)
MOST_SCALE = tl.constexpr(_MOST_SCALE)


@triton.jit
def finite(x):
    """NaN as 0, Inf as the largest float16."""
    x = x.to(tl.float32)
    x = tl.where(x != x, 0.0, x)
    x = tl.where(x == float("inf"), FP16_MAX, x)
    return tl.where(x == float("-inf"), -FP16_MAX, x)


@triton.jit
def nearest(z, BITS: tl.constexpr, BOOK: tl.constexpr):
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
def quantize(y, BITS: tl.constexpr, BOOK: tl.constexpr, MODE: tl.constexpr, L: tl.constexpr):
    """Rotated rows [T, DP] -> codes (int32) and float32 scales [T].

    BOOK is (thresholds, magnitudes), or (1 / unit, unit) for 8 bits. MODE: 0 norm, 1 corrected,
    2 least squares, 3 unbiased.
    """
    y64 = y.to(tl.float64)
    square = tl.sum(y64 * y64, axis=1).to(tl.float32)
    norm = tl.sqrt_rn(square)
    unit = tl.div_rn(y, tl.broadcast_to(tl.maximum(norm, TINY)[:, None], y.shape))
    z = unit * (L.D**0.5)
    if BITS == 8:
        # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
        level = (z * BOOK[0] + 12582912.0) - 12582912.0
        level = tl.minimum(tl.maximum(level, -127.0), 127.0)
        code = level.to(tl.int32) & 0xFF
        c = level * BOOK[1]
    else:
        code, c = nearest(z, BITS, BOOK)
    c = tl.where(tl.arange(0, L.DP)[None, :] < L.D, c * (1.0 / L.D**0.5), 0.0).to(tl.float64)
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
def quantize_keys_with_feedback(y, factors, GAIN: tl.constexpr, L: tl.constexpr):
    """As `quantize`, in the metric of `factors` [D, D]. No product may be fused with a sum."""
    D: tl.constexpr = L.D
    d = tl.arange(0, L.DP)[None, :]
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
        target = now + tl.sum(tl.where(d == i, missed, 0.0), axis=1)
        _, c = nearest(target, L.KEY_BITS, L.KEY_BOOK)
        missed += (now - c)[:, None] * row
        projected += now[:, None] * row
    targets = x + missed
    code, c = nearest(targets, L.KEY_BITS, L.KEY_BOOK)
    weights = tl.load(factors + d * (D + 1), mask=d < D, other=0.0).to(tl.float64)
    size = (x + projected).to(tl.float64)
    whole = tl.sum(weights * size * size, axis=1).to(tl.float32)
    along = tl.sum(weights * size * (size - (targets - c).to(tl.float64)), axis=1).to(tl.float32)
    ratio = tl.div_rn(whole, tl.maximum(along, TINY))
    ratio = tl.minimum(tl.maximum(ratio, 1.0 / MOST_SCALE), MOST_SCALE)
    return code, tl.minimum(norm * (1.0 / GAIN) * ratio, FP16_MAX)


@triton.jit
def pack_words(codes, ROWS: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
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
def pack_words3(codes, J: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
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
def store_keys(record, block, codes, live, L: tl.constexpr):
    """Codes [32 tokens, DP] of one block of a record's keys."""
    BITS: tl.constexpr = L.KEY_BITS
    CHUNK: tl.constexpr = L.KEY_CHUNK
    C: tl.constexpr = L.D // CHUNK
    CP: tl.constexpr = L.DP // CHUNK
    plane = record.to(tl.pointer_type(tl.int32 if CHUNK == 32 else tl.int16))
    t = tl.arange(0, 32)
    row = ((t % 8) * (C * 4) + t // 8)[:, None]
    if BITS == 3:
        for j in tl.static_range(3):
            w = pack_words3(codes, j, 32, L.DP, CHUNK)  # [32, CP]
            c = tl.arange(0, CP)
            at = (block * 3 + j) * (32 * C) + row + c[None, :] * 4
            there = live[:, None] & (c < C)[None, :]
            tl.store(plane + at, w.to(plane.dtype.element_ty), mask=there)
    else:
        w = pack_words(codes, 32, L.DP, BITS)  # [32, DP * BITS / 32]
        PER: tl.constexpr = BITS * CHUNK // 32  # 32-bit words of a chunk
        n = tl.arange(0, CP * PER)
        c = (n // PER)[None, :]
        j = (n % PER)[None, :]
        there = live[:, None] & (c < C)
        if CHUNK == 32:
            at = (block * BITS + j) * (32 * C) + row + c * 4
            tl.store(plane + at, w, mask=there)
        else:
            at = (block * BITS + 2 * j) * (32 * C) + row + c * 4
            tl.store(plane + at, w.to(tl.int16), mask=there)
            tl.store(plane + at + 32 * C, (w >> 16).to(tl.int16), mask=there)


@triton.jit
def _merge_words(where, new, own, there, WHOLE):
    """Replace the bits `own` of the words at `where`."""
    if not WHOLE:
        old = tl.load(where, mask=there, other=0)
        new = (old & ~own) | new
    tl.store(where, new, mask=there)


@triton.jit
def store_values(record, block, codes, live, WHOLE, L: tl.constexpr):
    """Codes [32 tokens, DP] of one block of a record's values; mates that are not live stay."""
    BITS: tl.constexpr = L.VALUE_BITS
    DP: tl.constexpr = L.DP
    C: tl.constexpr = L.D // 16
    ones = tl.where(live[:, None], (1 << BITS) - 1, 0) + tl.zeros([32, DP], tl.int32)
    codes = tl.where(live[:, None], codes, 0)
    codes = tl.reshape(tl.permute(tl.reshape(codes, [16, 2, DP]), [0, 2, 1]), [16, 2 * DP])
    ones = tl.reshape(tl.permute(tl.reshape(ones, [16, 2, DP]), [0, 2, 1]), [16, 2 * DP])
    pair = tl.arange(0, 16)
    row = ((pair % 4) * 4 + pair // 4)[:, None]
    words = (record + L.VALUE_AT).to(tl.pointer_type(tl.int32))
    if BITS == 3:
        c = tl.arange(0, DP // 16)[None, :]
        for j in tl.static_range(3):
            new = pack_words3(codes, j, 16, 2 * DP, 32)
            own = pack_words3(ones, j, 16, 2 * DP, 32)
            where = words + ((block * 3 + j) * C + c) * 16 + row
            _merge_words(where, new, own, (c < C) & (row >= 0), WHOLE)
    else:
        new = pack_words(codes, 16, 2 * DP, BITS)
        own = pack_words(ones, 16, 2 * DP, BITS)
        n = tl.arange(0, DP // 16 * BITS)
        c = (n // BITS)[None, :]
        j = (n % BITS)[None, :]
        where = words + ((block * BITS + j) * C + c) * 16 + row
        _merge_words(where, new, own, (c < C) & (row >= 0), WHOLE)
