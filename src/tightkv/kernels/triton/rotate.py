"""The rotation of a config inside a kernel, on the last dimension of a float32 tile, and of rows.

Kinds: 0 none, 1 randomized Hadamard (the butterflies of `math.rotation`, same order of sums),
2 a dense matrix.
"""

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.triton.constants import frame_of
from tightkv.math.rotation import Rotation


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


@triton.jit
def row_offsets(b, h, at, stride_b, stride_h, stride_l):
    """Where rows `at` of head h of sequence b begin."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + at.to(tl.int64) * stride_l


@triton.jit
def rows_and_head(count, ROWS: tl.constexpr):
    """Which of `count` rows this program has, and which (sequence, head).

    One dimension of programs, since the others end at 65,535.
    """
    blocks = tl.cdiv(count, ROWS)
    return tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.program_id(0) // blocks


@triton.jit
def load_rotated(x, offsets, live, table, BACK: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr):
    """Rows of D elements at x + offsets -> [ROWS, DP] in float32, rotated or rotated back."""
    D: tl.constexpr = L.D
    d = tl.arange(0, L.DP)
    if L.ROTATION == 2:  # a matrix of any size, 16 of its rows at a time
        y = tl.zeros([ROWS, L.DP], tl.float32)
        for k0 in range(0, D, 16):
            k = k0 + tl.arange(0, 16)
            part = tl.load(x + offsets[:, None] + k[None, :], mask=live[:, None], other=0.0)
            at = k[:, None] + d[None, :] * D if BACK else k[:, None] * D + d[None, :]
            m = tl.load(table + at, mask=(d < D)[None, :], other=0.0)
            y = tl.dot(part.to(tl.float32), m, y, input_precision="ieee")
        return y
    there = live[:, None] & (d < D)[None, :]
    y = tl.load(x + offsets[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    if BACK:
        return rotate_back(y, table, ROWS, L)
    return rotate(y, table, ROWS, L)


@triton.jit(do_not_specialize=["tokens"])  # one binary for all lengths
def _rotate_rows_kernel(
    x, out, table, tokens, x_b, x_h, x_l, out_b, out_h, out_l,
    H: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Rows of x to those of out, rotated or rotated back."""
    at, bh = rows_and_head(tokens, ROWS)
    b = bh // H
    h = bh % H
    d = tl.arange(0, L.DP)
    live = at < tokens
    y = load_rotated(x, row_offsets(b, h, at, x_b, x_h, x_l), live, table, BACK, ROWS, L)
    where = out + row_offsets(b, h, at, out_b, out_h, out_l)[:, None] + d[None, :]
    tl.store(where, y.to(out.dtype.element_ty), mask=live[:, None] & (d < L.D)[None, :])


def rotate_rows(rotation: Rotation, x: Tensor, out: Tensor, back: bool) -> None:
    """Write x [B, H, T, D], rotated or rotated back, to `out`, which has any strides."""
    b, h, tokens, _ = x.shape
    rows = rows_at_once(rotation)
    _rotate_rows_kernel[(triton.cdiv(tokens, rows) * b * h,)](
        x, out, rotation.table(x.device), tokens, *x.stride()[:3], *out.stride()[:3],
        H=h, BACK=back, ROWS=rows, L=frame_of(rotation), num_warps=4,
    )  # fmt: skip


def rows_at_once(rotation: Rotation) -> int:
    """How many rows a program takes: a matrix is worth loading for more."""
    return 32 if rotation.kind == "haar" else 16
