"""The rotation of a config inside a kernel, on the last dimension of a float32 tile.

Kinds: 0 none, 1 randomized Hadamard (the butterflies of `math.rotation`, same order of sums),
2 a dense matrix.
"""

import triton
import triton.language as tl

NONE, HADAMARD, DENSE = 0, 1, 2


@triton.jit
def hadamard_sums(x, ROWS: tl.constexpr, D: tl.constexpr):
    """x [ROWS, D] @ H, unscaled."""
    for step in tl.static_range(0, 8):
        if (1 << step) < D:
            even, odd = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
            both = tl.join(even + odd, even - odd)  # [ROWS, D / 2, 2]
            x = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, D])
    return x


@triton.jit
def rotate(
    x, table, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """R x for each row of [ROWS, DP]; columns from D on are zero.

    `table` holds D signs (Hadamard) or the matrix R [D, D] in float32.
    """
    if KIND == 1:
        x = x * tl.load(table + tl.arange(0, D))[None, :]
        x = hadamard_sums(x, ROWS, D) * (D**-0.5)
    if KIND == 2:
        x = _dense(x, table, 1, D, ROWS, D, DP)
    return x


@triton.jit
def rotate_back(
    y, table, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """R^T y for each row of [ROWS, DP]."""
    if KIND == 1:
        y = hadamard_sums(y, ROWS, D) * (D**-0.5)
        y = y * tl.load(table + tl.arange(0, D))[None, :]
    if KIND == 2:
        y = _dense(y, table, D, 1, ROWS, D, DP)
    return y


@triton.jit
def _dense(
    x, matrix, stride_in, stride_out, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """x [ROWS, DP] @ M, M[i, o] at matrix + i * stride_in + o * stride_out."""
    at = tl.arange(0, DP)
    live = (at[:, None] < D) & (at[None, :] < D)
    m = tl.load(matrix + at[:, None] * stride_in + at[None, :] * stride_out, mask=live, other=0.0)
    return tl.dot(x, m, input_precision="ieee")
