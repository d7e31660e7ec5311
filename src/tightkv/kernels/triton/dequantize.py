"""Blocks of a page to plain keys and values, for attention that wants them so."""

import triton
import triton.language as tl

from tightkv.kernels.triton.unpack import (
    byte_levels,
    load_key_words,
    load_value_words,
    nibble_levels,
    scale_order,
)


@triton.jit
def _side_by_side(a, b, c, d):
    """Four tensors [...] -> [..., 2, 2], in that order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _number(x, FINITE: tl.constexpr):
    """float32; with FINITE, NaN and infinity are 0."""
    x = x.to(tl.float32)
    if FINITE:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return x


@triton.jit
def dequantized_keys(record, block, L: tl.constexpr, FINITE: tl.constexpr):
    """Keys of 32 tokens of a record, rotated, float32 [32, DP]; row i is token_order(1)[i].

    With FINITE, scales and means that are not finite are 0.
    """
    numbers = record.to(tl.pointer_type(tl.float16))
    kw = load_key_words(record, block, 1, L)
    # [32, words] each; word = CP q + chunk, channel = KEY_CHUNK chunk + PER q + code
    CP: tl.constexpr = L.DP // L.KEY_CHUNK
    if L.KEY_BITS < 8:
        h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(kw, L.KEY_BITS, L.KEY_TABLE, L.PTX)
        x = tl.join(_side_by_side(h0, h2, h4, h6), _side_by_side(h1, h3, h5, h7))
        x = tl.reshape(x, [32, L.KEY_CHUNK // 8, CP, 8])
    else:
        h0, h1, h2, h3 = byte_levels(kw)
        x = tl.reshape(_side_by_side(h0, h1, h2, h3), [32, L.KEY_CHUNK // 4, CP, 4])
    x = tl.reshape(tl.permute(x, [0, 2, 1, 3]), [32, L.DP]).to(tl.float32)
    scale = tl.load(numbers + L.KEY_SCALE_AT // 2 + block * 32 + scale_order(1))
    scale = _number(scale, FINITE)
    x = x * (tl.abs(scale) * L.KEY_UNIT)[:, None]
    if L.MEAN_BITS > 0:
        d = tl.arange(0, L.DP)
        if L.MEAN_BITS == 16:
            mean = tl.load(numbers + L.MEAN_AT // 2 + d, mask=d < L.D, other=0.0)
            mean = _number(mean, FINITE)
        else:
            step = _number(tl.load(numbers + (L.MEAN_AT + L.D) // 2), FINITE)
            means = (record + L.MEAN_AT).to(tl.pointer_type(tl.int8))
            mean = tl.load(means + d, mask=d < L.D, other=0).to(tl.float32) * step
        centered = scale.to(tl.int32, bitcast=True) < 0
        x += tl.where(centered[:, None], mean[None, :], 0.0)
    return x


@triton.jit
def even_tokens():
    """Which tokens of 32 the rows of `dequantized_values` are; those of the odd ones come next."""
    pair = tl.arange(0, 16)
    return 8 * (pair % 4) + 2 * (pair // 4)  # the first of the pair, as in token_order


@triton.jit
def dequantized_values(record, block, L: tl.constexpr, FINITE: tl.constexpr):
    """Values of 32 tokens of a record, rotated, float32 [16, DP]: of even tokens, of odd ones.

    With FINITE, scales that are not finite are 0.
    """
    DP: tl.constexpr = L.DP
    VCP: tl.constexpr = DP // 16
    numbers = record.to(tl.pointer_type(tl.float16))
    vw = load_value_words(record, block, 1, L)
    # [words, 16 pairs] each; word = VCP q + chunk; codes 2 n and 2 n + 1: channel n of two tokens
    if L.VALUE_BITS < 8:
        h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(vw, L.VALUE_BITS, L.VALUE_TABLE, L.PTX)
        even = tl.reshape(_side_by_side(h0, h2, h4, h6), [4, VCP, 16, 4])
        odd = tl.reshape(_side_by_side(h1, h3, h5, h7), [4, VCP, 16, 4])
    else:
        h0, h1, h2, h3 = byte_levels(vw)
        even = tl.reshape(tl.join(h0, h2), [8, VCP, 16, 2])
        odd = tl.reshape(tl.join(h1, h3), [8, VCP, 16, 2])
    token = even_tokens()
    scale_at = numbers + L.VALUE_SCALE_AT // 2 + block * 32 + (token % 8) * 4 + token // 8
    even = tl.reshape(tl.permute(even, [2, 1, 0, 3]), [16, DP]).to(tl.float32)
    odd = tl.reshape(tl.permute(odd, [2, 1, 0, 3]), [16, DP]).to(tl.float32)
    even = even * (_number(tl.load(scale_at), FINITE) * L.VALUE_UNIT)[:, None]
    odd = odd * (_number(tl.load(scale_at + 4), FINITE) * L.VALUE_UNIT)[:, None]
    return even, odd
