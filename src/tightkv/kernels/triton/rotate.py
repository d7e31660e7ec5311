"""The rotation of a config inside a kernel, on the last dimension of a float32 tile.

Kinds: 0 none, 1 randomized Hadamard (the butterflies of `math.rotation`, same order of sums),
2 a dense matrix.
"""

import triton
import triton.language as tl


@triton.jit
def hadamard_sums(x, ROWS: tl.constexpr, D: tl.constexpr):
    """x [ROWS, D] @ H, unscaled."""
    for step in tl.static_range(0, 9):
        if (1 << step) < D:
            even, odd = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
            both = tl.join(even + odd, even - odd)  # [ROWS, D / 2, 2]
            x = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, D])
    return x


@triton.jit
def rotate(x, table, ROWS: tl.constexpr, L: tl.constexpr):
    """R x for each row of [ROWS, DP]; columns from D on are zero.

    `table` holds D signs (Hadamard) or the matrix R^T [D, D] in float32.
    """
    if L.ROTATION == 1:
        x = x * tl.load(table + tl.arange(0, L.D))[None, :]
        x = hadamard_sums(x, ROWS, L.D) * (L.D**-0.5)
    if L.ROTATION == 2:
        x = _dense(x, table, L.D, 1, ROWS, L.D, L.DP)
    return x


@triton.jit
def rotate_back(y, table, ROWS: tl.constexpr, L: tl.constexpr):
    """R^T y for each row of [ROWS, DP]."""
    if L.ROTATION == 1:
        y = hadamard_sums(y, ROWS, L.D) * (L.D**-0.5)
        y = y * tl.load(table + tl.arange(0, L.D))[None, :]
    if L.ROTATION == 2:
        y = _dense(y, table, 1, L.D, ROWS, L.D, L.DP)
    return y


@triton.jit
def _dense(
    x, matrix, stride_in, stride_out, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """x [ROWS, DP] @ M, M[i, o] at matrix + i * stride_in + o * stride_out."""
    # A slice of the input channels at a time, in a loop that stays one: the whole matrix does not
    # fit shared memory, and so large a product takes minutes to compile.
    STEP: tl.constexpr = 16
    x = tl.reshape(x, [ROWS, DP // STEP, STEP])
    slices = tl.arange(0, DP // STEP)[None, :, None]
    o = tl.arange(0, DP)[None, :]
    y = tl.zeros([ROWS, DP], tl.float32)
    for k in tl.range(0, tl.cdiv(D, STEP), num_stages=1):
        part = tl.sum(tl.where(slices == k, x, 0.0), axis=1)  # tl.gather shuffles more
        i = k * STEP + tl.arange(0, STEP)[:, None]
        live = (i < D) & (o < D)
        m = tl.load(matrix + i * stride_in + o * stride_out, mask=live, other=0.0)
        y = tl.dot(part, m, y, input_precision="ieee")
    return y
