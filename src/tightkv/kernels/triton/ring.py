"""Rings of codes (a window of 8 bits, docs/layout.md): tokens rounded to them, written and read."""

import triton
import triton.language as tl

from tightkv.kernels.triton.rotate import rotate


@triton.jit
def rotate_exact(x, table, ROWS: tl.constexpr, L: tl.constexpr):
    """As `rotate`, but sums of a dense rotation are float64, as in the reference."""
    if L.ROTATION == 2:
        d = tl.arange(0, L.DP)
        y = tl.zeros([ROWS, L.DP], tl.float64)
        for i in range(0, L.D):
            row = tl.load(table + i * L.D + d, mask=d < L.D, other=0.0).to(tl.float64)
            now = tl.sum(tl.where(d[None, :] == i, x, 0.0), axis=1).to(tl.float64)
            y += now[:, None] * row[None, :]
        x = y.to(tl.float32)
    else:
        x = rotate(x, table, ROWS, L)
    return x


@triton.jit
def round_exact(y, is_key):
    """Rotated rows [T, DP] -> whole numbers in float32, and float16 scales [T]."""
    levels = tl.where(is_key, 2047.0, 127.0)
    bits = tl.abs(y).to(tl.int32, bitcast=True)  # those of NaN are larger than any number's
    top = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    wanted = top * tl.where(is_key, 1 / 2047, 1 / 127)
    scale = tl.where(wanted > 65504.0, 65504.0, wanted).to(tl.float16)
    step = scale.to(tl.float32)
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    # Limits stand between product and sum, which must not be fused; the sum rounds half to even.
    z = tl.minimum(tl.maximum(y * inverse[:, None], -levels), levels)
    z = (z + 12582912.0) - 12582912.0
    return tl.where((step > 0.0)[:, None], z, 0.0), scale


@triton.jit
def store_codes(ring, scales, item, codes, scale, there, is_key, L: tl.constexpr):
    """Rounded tokens [T, DP] to items (token, head) of a ring. `scales` are of the tokens' side."""
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    d = tl.arange(0, DP)
    place = ring + item[:, None] * tl.where(is_key, D * 3 // 2, D)
    code = codes.to(tl.int32)
    high = tl.where(is_key, code >> 4, code)
    tl.store(place + d[None, :], high.to(tl.int8), mask=there[:, None] & (d < D)[None, :])
    halves = tl.permute(tl.reshape(code & 15, [code.shape[0], DP // 8, 2, 4]), [0, 1, 3, 2])
    first, second = tl.split(halves)
    nibbles = tl.reshape(first | second << 4, [code.shape[0], DP // 2])
    n = tl.arange(0, DP // 2)
    mask = (there & is_key)[:, None] & (n < D // 2)[None, :]
    tl.store(place + D + n[None, :], nibbles.to(tl.int8), mask=mask)
    tl.store(scales + 2 * item, scale, mask=there)


@triton.jit
def load_codes(ring, scales, item, there, is_key, L: tl.constexpr):
    """Codes [T, DP] (int32) and scales [T] (float32) of items of a ring; 0 where nothing is."""
    D: tl.constexpr = L.D
    d = tl.arange(0, L.DP)
    mask = there[:, None] & (d < D)[None, :]
    place = ring + item[:, None] * tl.where(is_key, D * 3 // 2, D)
    code = tl.load(place + d[None, :], mask=mask, other=0).to(tl.int32)
    low = tl.load(place + D + (d // 8 * 4 + d % 4)[None, :], mask=mask & is_key, other=0)
    low = low.to(tl.int32) >> (d & 4)[None, :] & 15
    scale = tl.load(scales + 2 * item, mask=there, other=0.0).to(tl.float32)
    return tl.where(is_key, code * 16 + low, code), scale


@triton.jit
def load_exact(ring, scales, item, there, is_key, L: tl.constexpr):
    """Tokens as numbers, rotated, float32 [T, DP]; 0 where nothing is."""
    codes, scale = load_codes(ring, scales, item, there, is_key, L)
    return codes.to(tl.float32) * scale[:, None]
