"""Parts of attention over a tile: query operands, scores, softmax, values, and what is stored."""

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
    s, at, valid, query_at, live, mask, mask_n, mask_tokens, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Cap, mask and bring scores [tokens, COLS] to log2 units; hidden ones are -inf.

    `mask` has a pointer for each column, to what it holds of position 0.
    """
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
        where = mask[None, :] + at[:, None].to(tl.int64) * mask_n
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
def _operand(x, COLS: tl.constexpr, L: tl.constexpr):
    """[words of a chunk, chunks, 2, COLS] -> a right operand [words, COLS]."""
    return tl.reshape(x, [L.DP // (4 if L.KEY_BITS < 8 else 2), COLS]).to(tl.float16)


@triton.jit
def query_operands(q, table, COLS: tl.constexpr, L: tl.constexpr):
    """Queries [COLS, DP] -> rotated ones as right operands, and what scores are multiplied with.

    Operands [words, COLS], four for the codes of a word, two of 8 bits; and [DP, COLS] for means.
    The largest component of a query is 1 in them.
    """
    qr = rotate(q.to(tl.float32), table, COLS, L)  # [COLS, DP]
    top = tl.max(tl.abs(qr), axis=1)
    top = tl.where(top > 0.0, top, 1.0)
    qr = qr / top[:, None]
    CP: tl.constexpr = L.DP // L.KEY_CHUNK
    PAIRS: tl.constexpr = 4 if L.KEY_BITS < 8 else 2  # of codes in a word
    qx = tl.reshape(qr, [COLS, CP, L.KEY_CHUNK // (2 * PAIRS), PAIRS, 2])
    qx = tl.permute(qx, [2, 1, 4, 0, 3])  # [q, c, p, COLS, pair]
    means = tl.trans(qr.to(tl.float16))
    if L.KEY_BITS < 8:
        q0, q1, q2, q3 = split4(qx)
        codes = (
            _operand(q0, COLS, L), _operand(q1, COLS, L),
            _operand(q2, COLS, L), _operand(q3, COLS, L),
        )  # fmt: skip
        return codes, means, top
    else:
        q0, q1 = tl.split(qx)
        return (_operand(q0, COLS, L), _operand(q1, COLS, L)), means, top


@triton.jit
def score_tile(words, operands, TILE: tl.constexpr, L: tl.constexpr):
    """Words of a tile's keys times `query_operands` -> products of levels, [TILE, COLS]."""
    if L.KEY_BITS < 8:
        h = nibble_levels(words, L.KEY_BITS, L.KEY_TABLE, L.PTX)
    else:
        h = byte_levels(words)
    KW: tl.constexpr = words.shape[1]
    s = tl.dot(pair(h[0], h[1], TILE, KW), operands[0])
    s = tl.dot(pair(h[2], h[3], TILE, KW), operands[1], s)
    if L.KEY_BITS < 8:
        s = tl.dot(pair(h[4], h[5], TILE, KW), operands[2], s)
        s = tl.dot(pair(h[6], h[7], TILE, KW), operands[3], s)
    return s


@triton.jit
def mean_scores(record, q_mean, L: tl.constexpr):
    """What the mean of a page adds to the scores of its centered keys, [COLS]."""
    d = tl.arange(0, L.DP)
    numbers = record.to(tl.pointer_type(tl.float16))
    if L.MEAN_BITS == 16:
        mean = tl.load(numbers + L.MEAN_AT // 2 + d, mask=d < L.D, other=0.0)
        bias = tl.sum(tl.dot(_one_row(mean, L.DP), q_mean), axis=0)
    else:
        bytes_at = (record + L.MEAN_AT).to(tl.pointer_type(tl.int8))
        mean = tl.load(bytes_at + d, mask=d < L.D, other=0)
        step = tl.load(numbers + (L.MEAN_AT + L.D) // 2).to(tl.float32)
        bias = tl.sum(tl.dot(_one_row(mean.to(tl.float16), L.DP), q_mean), axis=0) * step
    return bias


@triton.jit
def no_values(COLS: tl.constexpr, L: tl.constexpr):
    """The accumulators of `accumulate_values`, [VW, COLS]: one for each pair of codes in a word."""
    if L.VALUE_BITS < 8:
        zero = tl.zeros([L.DP // 4, COLS], tl.float32)
        return zero, zero, zero, zero
    else:
        zero = tl.zeros([L.DP // 2, COLS], tl.float32)
        return zero, zero


@triton.jit
def value_accumulators(acc, COLS: tl.constexpr, L: tl.constexpr):
    """Values [COLS, DP] in the frame of the pages -> accumulators as of `no_values`."""
    PAIRS: tl.constexpr = 4 if L.VALUE_BITS < 8 else 2
    VW: tl.constexpr = L.DP // PAIRS
    # channel = 16 chunk + PAIRS q + x
    x = tl.permute(tl.reshape(acc, [COLS, L.DP // 16, 16 // PAIRS, PAIRS]), [2, 1, 0, 3])
    if L.VALUE_BITS < 8:
        x0, x1, x2, x3 = split4(x)
        return (
            tl.reshape(x0, [VW, COLS]), tl.reshape(x1, [VW, COLS]),
            tl.reshape(x2, [VW, COLS]), tl.reshape(x3, [VW, COLS]),
        )  # fmt: skip
    else:
        x0, x1 = tl.split(x)
        return tl.reshape(x0, [VW, COLS]), tl.reshape(x1, [VW, COLS])


@triton.jit
def accumulate_values(words, p, shrink, acc, L: tl.constexpr):
    """Words of a tile's values times weights p [TILE, COLS], added to what shrinks."""
    VW: tl.constexpr = words.shape[0]
    PAIRS: tl.constexpr = words.shape[1]
    s = shrink[None, :]
    if L.VALUE_BITS < 8:
        h = nibble_levels(words, L.VALUE_BITS, L.VALUE_TABLE, L.PTX)
        return (
            tl.dot(pair(h[0], h[1], VW, PAIRS), p, acc[0] * s),
            tl.dot(pair(h[2], h[3], VW, PAIRS), p, acc[1] * s),
            tl.dot(pair(h[4], h[5], VW, PAIRS), p, acc[2] * s),
            tl.dot(pair(h[6], h[7], VW, PAIRS), p, acc[3] * s),
        )
    else:
        h = byte_levels(words)
        return (
            tl.dot(pair(h[0], h[1], VW, PAIRS), p, acc[0] * s),
            tl.dot(pair(h[2], h[3], VW, PAIRS), p, acc[1] * s),
        )


@triton.jit
def write_partials(partial, partial_lse, at, there, peak, weight, acc, L: tl.constexpr):
    """The state of a split, of the columns that are there."""
    X: tl.constexpr = 4 if L.VALUE_BITS < 8 else 2
    VCP: tl.constexpr = L.DP // 16
    w = tl.arange(0, VCP * (16 // X))
    channel = (w % VCP) * 16 + (w // VCP) * X
    split_lse = tl.where(weight != 0.0, peak + tl.log2(weight), float("-inf"))
    tl.store(partial_lse + at, split_lse, mask=there)
    factor = tl.where(weight != 0.0, L.VALUE_UNIT / weight, 0.0)
    where = partial + at[None, :] * L.D + channel[:, None]
    mask = there[None, :] & (channel < L.D)[:, None]
    for i in tl.static_range(X):
        tl.store(where + i, acc[i] * factor[None, :], mask=mask)
