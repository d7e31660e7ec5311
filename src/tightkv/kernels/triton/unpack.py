"""Code planes of a page to tiles of float16 levels, and back.

Every width up to 4 bits is brought to "nibble words": 32-bit words whose eight nibbles hold one
code each. Word q of a chunk holds codes 8 q .. 8 q + 7. (8-bit codes: four a word, 4 q .. 4 q + 3.)
"""

import triton
import triton.language as tl


@triton.jit
def load_key_words(record, block, NB: tl.constexpr, L: tl.constexpr):
    """Blocks [block, block + NB) of a record's keys -> int32 [NB * 32 tokens, words].

    Word index is q * CP + chunk. Tokens come in the order of `token_order`.
    """
    BITS: tl.constexpr = L.KEY_BITS
    CHUNK: tl.constexpr = L.KEY_CHUNK
    CHUNKS: tl.constexpr = L.D // CHUNK
    CP: tl.constexpr = L.DP // CHUNK
    plane = record.to(tl.pointer_type(tl.int32 if CHUNK == 32 else tl.int16))
    NJ: tl.constexpr = BITS  # words of CHUNK bits in a chunk's row
    NJP: tl.constexpr = 4 if BITS == 3 else BITS
    flat = tl.arange(0, NB * NJP * 8 * CP * 4)
    i = flat % 4
    c = (flat // 4) % CP
    r = (flat // (4 * CP)) % 8
    j = (flat // (32 * CP)) % NJP
    b = flat // (32 * CP * NJP)
    offset = (((block + b) * NJ + j) * 8 + r) * (CHUNKS * 4) + c * 4 + i
    if CP == CHUNKS and NJP == NJ:
        w = tl.load(plane + block * (NJ * 32 * CHUNKS) + flat)
    else:
        w = tl.load(plane + offset, mask=(c < CHUNKS) & (j < NJ), other=0)
    if CHUNK == 16:
        w = w.to(tl.int32) & 0xFFFF
        # [b, j, half, c4, p, c, i] -> 32-bit words
        if BITS == 3:
            w = _fill_spare(tl.reshape(w, [NB, 4, 8 * CP * 4]), 0x7777, 0x1111)
        w = tl.reshape(w, [NB, NJP // 2, 2, 8 * CP * 4])
        low, high = tl.split(tl.permute(w, [0, 1, 3, 2]))
        w = low | (high << 16)  # [b, j, (r, c, i)]
    else:
        w = tl.reshape(w, [NB, NJP, 8 * CP * 4])
        if BITS == 3:
            w = _fill_spare(w, 0x77777777, 0x11111111)
    NQ: tl.constexpr = NJP * CHUNK // 32
    if BITS == 2:
        w = tl.join(w & 0x33333333, (w >> 2) & 0x33333333)  # [b, j, rci, h]
        w = tl.permute(w, [0, 1, 3, 2])
    Q: tl.constexpr = 2 * NQ if BITS == 2 else NQ
    w = tl.reshape(w, [NB, Q, 4, 2, CP, 4])  # [b, q, c4, p, c, i]
    w = tl.permute(w, [0, 2, 5, 3, 1, 4])  # [b, c4, i, p, q, c]
    return tl.reshape(w, [NB * 32, Q * CP])


@triton.jit
def load_value_words(record, block, NB: tl.constexpr, L: tl.constexpr):
    """Blocks of a record's values -> int32 [words, NB * 16 pairs]; word index is q * CP + chunk.

    Pairs come in the order of `token_order`; nibble n is channel n // 2 of token n % 2.
    """
    BITS: tl.constexpr = L.VALUE_BITS
    CHUNKS: tl.constexpr = L.D // 16
    CP: tl.constexpr = L.DP // 16
    plane = (record + L.VALUE_AT).to(tl.pointer_type(tl.int32))
    NJP: tl.constexpr = 4 if BITS == 3 else BITS
    flat = tl.arange(0, NB * NJP * CP * 16)
    pair = flat % 16
    c = (flat // 16) % CP
    j = (flat // (16 * CP)) % NJP
    b = flat // (16 * CP * NJP)
    if CP == CHUNKS and NJP == BITS:
        w = tl.load(plane + block * (BITS * CHUNKS * 16) + flat)
    else:
        offset = (((block + b) * BITS + j) * CHUNKS + c) * 16 + pair
        w = tl.load(plane + offset, mask=(c < CHUNKS) & (j < BITS), other=0)
    w = tl.reshape(w, [NB, NJP, CP * 16])
    if BITS == 3:
        w = _fill_spare(w, 0x77777777, 0x11111111)
    if BITS == 2:
        w = tl.join(w & 0x33333333, (w >> 2) & 0x33333333)
        w = tl.permute(w, [0, 1, 3, 2])
    Q: tl.constexpr = 4 if BITS == 2 else NJP
    w = tl.reshape(w, [NB, Q, CP, 16])
    return tl.reshape(tl.permute(w, [1, 2, 0, 3]), [Q * CP, NB * 16])


@triton.jit
def _fill_spare(w, KEEP: tl.constexpr, TOP: tl.constexpr):
    """3-bit rows [b, 4, n], word 3 empty: words 0..2 hold a code a nibble, their tops the rest."""
    j = tl.arange(0, 4)[None, :, None]
    spare = tl.sum(((w >> 3) & TOP) << tl.minimum(j, 2), axis=1)
    return tl.where(j == 3, spare[:, None, :], w & KEEP)


@triton.jit
def token_order(NB: tl.constexpr):
    """Tokens of NB blocks in the order of tiles: [blk, c4, i, p] -> 32 blk + 8 i + 2 c4 + p."""
    row = tl.arange(0, NB * 32)
    p = row % 2
    i = (row // 2) % 4
    c4 = (row // 8) % 4
    return (row // 32) * 32 + 8 * i + 2 * c4 + p


@triton.jit
def scale_order(NB: tl.constexpr):
    """Where the fp16 number of each of those tokens lies in its plane: [blk][r][i]."""
    row = tl.arange(0, NB * 32)
    p = row % 2
    i = (row // 2) % 4
    c4 = (row // 8) % 4
    return (row // 32) * 32 + (2 * c4 + p) * 4 + i


@triton.jit
def _look_up(index, TABLE: tl.constexpr):
    """e4m3 byte `index` of an 8-byte table -> float16, exact."""
    byte = (tl.full(index.shape, TABLE, tl.int64) >> (8 * index).to(tl.int64)).to(tl.int32)
    bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
    # The same bits mean 2**-8 of the value in float16.
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _nibble(w, N: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    x = _look_up((w >> (4 * N)) & 7, TABLE)
    if BITS == 4:
        x = tl.where(((w >> (4 * N + 3)) & 1) != 0, -x, x)
    return x.to(tl.float16)


@triton.jit
def _byte(w, N: tl.constexpr):
    return ((w << (24 - 8 * N)) >> 24).to(tl.float16)


# Eight levels from bytes of a table, $9 (low) and $10 (high), by the nibbles of $8.
_CONVERT = """
    mov.b32 {a, b}, lo;
    mov.b32 {c, d}, hi;
    cvt.rn.f16x2.e4m3x2 r0, a;
    cvt.rn.f16x2.e4m3x2 r1, b;
    cvt.rn.f16x2.e4m3x2 r2, c;
    cvt.rn.f16x2.e4m3x2 r3, d;
    mov.b32 {$0, $1}, r0;
    mov.b32 {$2, $3}, r1;
    mov.b32 {$4, $5}, r2;
    mov.b32 {$6, $7}, r3;
"""
_LEVELS = tl.constexpr(f"""{{
    .reg .b32 n, lo, hi, r0, r1, r2, r3;
    .reg .b16 a, b, c, d;
    shr.u32 n, $8, 16;
    prmt.b32 lo, $9, $10, $8;
    prmt.b32 hi, $9, $10, n;
    {_CONVERT}
}}""")
_SIGNED_LEVELS = tl.constexpr(f"""{{
    .reg .b32 m, n, lo, hi, s, r0, r1, r2, r3;
    .reg .b16 a, b, c, d;
    and.b32 m, $8, 0x77777777;
    shr.u32 n, m, 16;
    prmt.b32 lo, $9, $10, m;
    prmt.b32 hi, $9, $10, n;
    shl.b32 s, $8, 4;
    prmt.b32 m, s, $8, 0x5140;
    prmt.b32 n, s, $8, 0x7362;
    lop3.b32 lo, m, 0x80808080, lo, 0x6a;
    lop3.b32 hi, n, 0x80808080, hi, 0x6a;
    {_CONVERT}
}}""")


@triton.jit
def nibble_levels(w, BITS: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr):
    """Nibble words -> the levels of their eight codes, float16 each."""
    if PTX:
        LOW: tl.constexpr = TABLE & 0xFFFFFFFF
        HIGH: tl.constexpr = (TABLE >> 32) & 0xFFFFFFFF
        return tl.inline_asm_elementwise(
            _SIGNED_LEVELS if BITS == 4 else _LEVELS,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [w, LOW, HIGH],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    return (
        _nibble(w, 0, BITS, TABLE), _nibble(w, 1, BITS, TABLE),
        _nibble(w, 2, BITS, TABLE), _nibble(w, 3, BITS, TABLE),
        _nibble(w, 4, BITS, TABLE), _nibble(w, 5, BITS, TABLE),
        _nibble(w, 6, BITS, TABLE), _nibble(w, 7, BITS, TABLE),
    )  # fmt: skip


@triton.jit
def byte_levels(w):
    """8-bit words -> the levels of their four codes, float16 each."""
    return _byte(w, 0), _byte(w, 1), _byte(w, 2), _byte(w, 3)


# --- plain numbers, for attention that wants them so ---
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
