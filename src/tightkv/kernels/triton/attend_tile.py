"""Parts of attention over a tile: query operands, scores, softmax, values, and what is stored."""

from __future__ import annotations

import triton
import triton.language as tl

from tightkv.kernels.triton.rotate import rotate
from tightkv.kernels.triton.unpack import byte_levels, nibble_levels


@triton.jit
def split4(x):
    """[..., 4] -> four tensors."""
    x = tl.reshape(x, x.shape[:-1] + [2, 2])  # noqa: RUF005 - not Triton
    low, high = tl.split(x)  # index bit 0
    a, c = tl.split(low)
    b, d = tl.split(high)
    return a, b, c, d


@triton.jit
def pair(a, b, ROWS: tl.constexpr, K: tl.constexpr):
    """[ROWS, K] twice -> [ROWS, 2 K], interleaved."""
    return tl.reshape(tl.join(a, b), [ROWS, 2 * K])


@triton.jit
def softmax_step(s, peak, total):
    """Scores [tokens, COLS] in log2 units -> weights, shrink factor, new peak and total."""
    new = tl.maximum(peak, tl.max(s, axis=0))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - base[None, :])
    shrink = tl.exp2(peak - base)
    return p, shrink, new, total * shrink + tl.sum(p, axis=0)


@triton.jit
def mask_scores(
    s, at, valid, query_at, live, mask, mask_b, mask_h, mask_q, mask_n, mask_tokens, row, head,
    token, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Cap, mask and bring scores [tokens, COLS] to log2 units; hidden ones are -inf."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if CAP > 0.0:
        # tanh by exp: 1 - 2 / (1 + e^2x)
        s = CAP * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E / CAP))))
    seen = valid[:, None] & live[None, :]
    if CAUSAL:
        seen = seen & (at[:, None] <= query_at[None, :])
    if WINDOW > 0:
        seen = seen & (at[:, None] > query_at[None, :] - WINDOW)
    if MASK > 0:
        # In 64 bits: a mask may have more than 2**31 elements.
        column = row.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h
        column += token.to(tl.int64) * mask_q
        where = mask + column[None, :] + at[:, None].to(tl.int64) * mask_n
        seen = seen & (at < mask_tokens)[:, None]
        if MASK == 1:
            seen = seen & (tl.load(where, mask=seen, other=0) != 0)
        else:
            s += tl.load(where, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, s * LOG2E, float("-inf"))


@triton.jit
def _one_row(x, DP: tl.constexpr):
    """[DP] -> [16, DP], zero below the first row."""
    return tl.where(tl.arange(0, 16)[:, None] == 0, x[None, :], 0.0).to(tl.float16)


@triton.jit
def query_operands(
    q, table, COLS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CP: tl.constexpr,
    KQ: tl.constexpr, BITS: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Queries [COLS, DP] -> rotated ones as right operands, and what scores are multiplied with.

    Four operands [words, COLS] for the codes of a word, two of 8 bits, and [DP, COLS] for means.
    The largest component of a query is 1 in them.
    """
    qr = rotate(q.to(tl.float32), table, COLS, D, DP, ROTATION)  # [COLS, DP]
    top = tl.max(tl.abs(qr), axis=1)
    top = tl.where(top > 0.0, top, 1.0)
    qr = qr / top[:, None]
    if BITS < 8:
        qx = tl.permute(tl.reshape(qr, [COLS, CP, KQ, 4, 2]), [2, 1, 4, 0, 3])
        q0, q1, q2, q3 = split4(qx)  # [q, c, p, COLS]
        q0 = tl.reshape(q0, [2 * KQ * CP, COLS]).to(tl.float16)
        q1 = tl.reshape(q1, [2 * KQ * CP, COLS]).to(tl.float16)
        q2 = tl.reshape(q2, [2 * KQ * CP, COLS]).to(tl.float16)
        q3 = tl.reshape(q3, [2 * KQ * CP, COLS]).to(tl.float16)
    else:
        qx = tl.permute(tl.reshape(qr, [COLS, CP, KQ, 2, 2]), [2, 1, 4, 0, 3])
        q0, q1 = tl.split(qx)
        q0 = tl.reshape(q0, [2 * KQ * CP, COLS]).to(tl.float16)
        q1 = tl.reshape(q1, [2 * KQ * CP, COLS]).to(tl.float16)
        q2, q3 = q0, q1  # not read
    return q0, q1, q2, q3, tl.trans(qr.to(tl.float16)), top


@triton.jit
def score_tile(
    words, q0, q1, q2, q3, TILE: tl.constexpr, KW: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words of a tile's keys times `query_operands` -> products of levels, [TILE, COLS]."""
    if BITS < 8:
        h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(words, BITS, TABLE, PTX)
        s = tl.dot(pair(h0, h1, TILE, KW), q0)
        s = tl.dot(pair(h2, h3, TILE, KW), q1, s)
        s = tl.dot(pair(h4, h5, TILE, KW), q2, s)
        s = tl.dot(pair(h6, h7, TILE, KW), q3, s)
    else:
        h0, h1, h2, h3 = byte_levels(words)
        s = tl.dot(pair(h0, h1, TILE, KW), q0)
        s = tl.dot(pair(h2, h3, TILE, KW), q1, s)
    return s


@triton.jit
def mean_scores(
    record, q_mean, d, D: tl.constexpr, DP: tl.constexpr, MEAN_AT: tl.constexpr,
    MEAN_BITS: tl.constexpr,
):  # fmt: skip
    """What the mean of a page adds to the scores of its centered keys, [COLS]."""
    numbers = record.to(tl.pointer_type(tl.float16))
    if MEAN_BITS == 16:
        mean = tl.load(numbers + MEAN_AT // 2 + d, mask=d < D, other=0.0)
        bias = tl.sum(tl.dot(_one_row(mean, DP), q_mean), axis=0)
    else:
        bytes_at = (record + MEAN_AT).to(tl.pointer_type(tl.int8))
        mean = tl.load(bytes_at + d, mask=d < D, other=0)
        step = tl.load(numbers + (MEAN_AT + D) // 2).to(tl.float32)
        bias = tl.sum(tl.dot(_one_row(mean.to(tl.float16), DP), q_mean), axis=0) * step
    return bias


@triton.jit
def value_accumulators(acc, COLS: tl.constexpr, VCP: tl.constexpr, BITS: tl.constexpr):
    """Values [COLS, DP] in the frame of the pages -> the accumulators of `accumulate_values`."""
    VW: tl.constexpr = VCP * (4 if BITS < 8 else 8)
    # channel = 16 chunk + X q + x
    if BITS < 8:
        x = tl.permute(tl.reshape(acc, [COLS, VCP, 4, 4]), [2, 1, 0, 3])
        x0, x1, x2, x3 = split4(x)
        a2 = tl.reshape(x2, [VW, COLS])
        a3 = tl.reshape(x3, [VW, COLS])
    else:
        x0, x1 = tl.split(tl.permute(tl.reshape(acc, [COLS, VCP, 8, 2]), [2, 1, 0, 3]))
        a2 = tl.zeros([VW, COLS], tl.float32)
        a3 = tl.zeros([VW, COLS], tl.float32)
    return tl.reshape(x0, [VW, COLS]), tl.reshape(x1, [VW, COLS]), a2, a3


@triton.jit
def accumulate_values(
    words, p, shrink, a0, a1, a2, a3, VW: tl.constexpr, PAIRS: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words of a tile's values times weights p [TILE, COLS], added to what shrinks.

    The accumulators are [VW, COLS], one for each code of a word; of 8 bits the first two.
    """
    a0 = a0 * shrink[None, :]
    a1 = a1 * shrink[None, :]
    if BITS < 8:
        a2 = a2 * shrink[None, :]
        a3 = a3 * shrink[None, :]
        h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(words, BITS, TABLE, PTX)
        a0 = tl.dot(pair(h0, h1, VW, PAIRS), p, a0)
        a1 = tl.dot(pair(h2, h3, VW, PAIRS), p, a1)
        a2 = tl.dot(pair(h4, h5, VW, PAIRS), p, a2)
        a3 = tl.dot(pair(h6, h7, VW, PAIRS), p, a3)
    else:
        h0, h1, h2, h3 = byte_levels(words)
        a0 = tl.dot(pair(h0, h1, VW, PAIRS), p, a0)
        a1 = tl.dot(pair(h2, h3, VW, PAIRS), p, a1)
    return a0, a1, a2, a3


@triton.jit
def write_partials(
    partial, partial_lse, at, there, peak, weight, a0, a1, a2, a3, D: tl.constexpr,
    VCP: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The state of a split, of the columns that are there."""
    X: tl.constexpr = 4 if BITS < 8 else 2
    w = tl.arange(0, VCP * (16 // X))
    channel = (w % VCP) * 16 + (w // VCP) * X
    split_lse = tl.where(weight > 0.0, peak + tl.log2(weight), float("-inf"))
    tl.store(partial_lse + at, split_lse, mask=there)
    factor = tl.where(weight > 0.0, UNIT / weight, 0.0)
    where = partial + at[None, :] * D + channel[:, None]
    mask = there[None, :] & (channel < D)[:, None]
    tl.store(where, a0 * factor[None, :], mask=mask)
    tl.store(where + 1, a1 * factor[None, :], mask=mask)
    if BITS < 8:
        tl.store(where + 2, a2 * factor[None, :], mask=mask)
        tl.store(where + 3, a3 * factor[None, :], mask=mask)
