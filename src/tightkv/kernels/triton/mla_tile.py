"""Tiles of latents: rows of a page to float16 levels, their scales and RoPE parts."""

import triton
import triton.language as tl

from tightkv.kernels.triton.unpack import nibble_levels
from tightkv.math.rotation import Rotation
from tightkv.pages.latent import SCALE_BIAS as _SCALE_BIAS
from tightkv.pages.latent import SCALE_SHIFT as _SCALE_SHIFT

SCALE_BIAS = tl.constexpr(_SCALE_BIAS)
SCALE_SHIFT = tl.constexpr(_SCALE_SHIFT)
SCALE_HALF = tl.constexpr(1 << (_SCALE_SHIFT - 1))


@triton.jit
def scale_codes(norm):
    """float32 norms -> int32, the nearest that can be stored."""
    bits = norm.to(tl.int32, bitcast=True) + SCALE_HALF
    return tl.minimum(tl.maximum((bits >> SCALE_SHIFT) - SCALE_BIAS, 0), 255)


@triton.jit
def scale_values(code):
    """Stored scales -> float32."""
    bits = (code.to(tl.int32) + SCALE_BIAS) << SCALE_SHIFT
    return tl.where(code == 0, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def load_levels(rows, there, TILE: tl.constexpr, L: tl.constexpr):
    """Packed rows at rows[TILE] (pointers to bytes) -> levels, float16 [TILE, DP].

    Columns come in the order of `channel_order`; those of channels from D on hold the level of code
    0. Rows that are not `there` are not read.
    """
    D: tl.constexpr = L.D
    DP: tl.constexpr = L.DP
    BITS: tl.constexpr = L.BITS
    words = rows.to(tl.pointer_type(tl.int32))[:, None]
    if BITS == 3:  # groups of 32 codes in three words
        group = tl.arange(0, DP // 32)[None, :]
        live = there[:, None] & (group < D // 32)
        a = tl.load(words + 3 * group, mask=live, other=0)
        b = tl.load(words + 3 * group + 1, mask=live, other=0)
        c = tl.load(words + 3 * group + 2, mask=live, other=0)
        spare = (a >> 3) & 0x11111111 | (b >> 2) & 0x22222222 | (c >> 1) & 0x44444444
        w = tl.join(tl.join(a & 0x77777777, c & 0x77777777), tl.join(b & 0x77777777, spare))
    else:
        n = tl.arange(0, DP * BITS // 32)[None, :]
        w = tl.load(words + n, mask=there[:, None] & (n < D * BITS // 32), other=0)
        if BITS == 2:
            w = tl.join(w & 0x33333333, (w >> 2) & 0x33333333)
    w = tl.permute(tl.reshape(w, [TILE, DP // 32, 4]), [0, 2, 1])
    w = tl.reshape(w, [TILE, DP // 8])
    h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(w, BITS, L.TABLE, L.PTX)
    even = tl.join(tl.join(h0, h4), tl.join(h2, h6))
    odd = tl.join(tl.join(h1, h5), tl.join(h3, h7))
    bits = tl.join(even, odd).to(tl.int16, bitcast=True)
    # Triton 3.6 fails where a reshape comes right before a product.
    return tl.reshape(bits, [TILE, DP]).to(tl.float16, bitcast=True)


@triton.jit
def channel_order(DP: tl.constexpr):
    """The channel of each column of a tile.

    A lane loads four words of eight codes. Their columns are DP / 4 apart, so that lanes store
    neighbouring columns to shared memory, without bank conflicts.
    """
    column = tl.arange(0, DP)
    word = column // 8
    return (word % (DP // 32) * 4 + word // (DP // 32)) * 8 + column % 8


@triton.jit
def column_order(DP: tl.constexpr):
    """The column of each channel."""
    channel = tl.arange(0, DP)
    word = channel // 8
    return (word % 4 * (DP // 32) + word // 4) * 8 + channel % 8


@triton.jit
def by_channel(levels, TILE: tl.constexpr, DP: tl.constexpr):
    """[TILE, DP] in the order of `channel_order` -> in that of channels."""
    x = tl.permute(tl.reshape(levels, [TILE, 4, DP // 32, 8]), [0, 2, 1, 3])
    return tl.reshape(x, [TILE, DP])


@triton.jit
def rope_rows(page, place, L: tl.constexpr):
    """Where the RoPE parts of tokens begin, at places of their pages: [N, 1]."""
    rows = (page + L.ROPE_AT).to(tl.pointer_type(L.ROPE_TYPE)) + place * L.ROPE
    return rows[:, None]


def rows_at_once(rotation: Rotation, others: int = 4) -> int:
    """How many rows a program takes: with a matrix, as many as a product needs."""
    return 16 if rotation.kind == "haar" else others
