// Pages: how tiles of them come to shared memory, how codes become levels, what means add.
//
// Lane 4 r + c has 16 bytes of a row of words: the same word of tokens r, r + 8, r + 16, r + 24.
// Decoded they are an A operand of mma.m16n8k16 as they lie: keys as tokens by channels (the order
// of channels is applied to the query), values as channels by tokens, a word of theirs holding
// channels of one token pair. docs/kernels.md has the picture.

#if PAGE >= 32 * TB
#define TILES (PAGE / (32 * TB))      // tiles in a page
#define SPAN 1                        // pages in a tile
#else
#define TILES 1
#define SPAN (32 * TB / PAGE)
#endif
#define BP (TB / SPAN)                // blocks of 32 tokens in a page's part of a tile
#define C (D / 32)                    // chunks of a key row
#define VC (D / 16)                   // chunks of a value row
#define KX (C)                        // nibble words a lane has for a key row: 4 C / 4
#define VX (VC / 2)                   // and for a value pair: 4 VC / 8
#define KL ((C + 3) / 4)              // key chunks a lane loads
#define VL ((VC + 7) / 8)             // value chunks a lane loads
#define KEY_BLOCK (4 * D * KEY_BITS)      // bytes of codes of 32 tokens
#define VALUE_BLOCK (4 * D * VALUE_BITS)
#define MEAN_CHUNKS (MEAN_BITS == 16 ? D / 8 : MEAN_BITS == 8 ? D / 16 + 1 : 0)  // of 16 bytes
#define COLS (8 * NT)                 // columns: query heads of query tokens

// Eight codes of a nibble word -> four f16x2 of levels.
template <int BITS>
__device__ __forceinline__ void levels(u32 w, u32 low, u32 high, u32 *h) {
    u32 a, b;
    if (BITS == 4) {
        u32 m;  // in assembler, or the mask is applied twice
        asm("and.b32 %0, %1, 0x77777777;" : "=r"(m) : "r"(w));
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(a) : "r"(low), "r"(high), "r"(m));
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(b) : "r"(low), "r"(high), "r"(m >> 16));
        a ^= w & 0x80808080u;
        b ^= (w << 4) & 0x80808080u;
    } else {
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(a) : "r"(low), "r"(high), "r"(w));
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(b) : "r"(low), "r"(high), "r"(w >> 16));
    }
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(h[0]), "=r"(h[1]) : "r"(a));
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(h[2]), "=r"(h[3]) : "r"(b));
}

// Nibble word q of a chunk from its packed words (w has a stride of 4: uint4 components).
template <int BITS>
__device__ __forceinline__ u32 nibbles(const u32 *w, int q) {
    if (BITS == 4) return w[4 * q];
    if (BITS == 3) {
        u32 spare = ((w[0] >> 3) & 0x11111111u) | ((w[4] >> 2) & 0x22222222u) |
                    ((w[8] >> 1) & 0x44444444u);
        return q == 3 ? spare : (w[4 * (q == 3 ? 0 : q)] & 0x77777777u);
    }
    return (w[4 * (q >> 1)] >> (2 * (q & 1))) & 0x33333333u;
}

template <int BITS>
__device__ __forceinline__ u32 nibbles_at(const u32 *w, int x, int low) {
    // q = 2 x + low where a row has half as many chunks as lanes: `low` differs between lanes
    if (BITS == 4) return w[4 * x];  // loaded for this lane's q
    if (BITS == 3) {
        u32 spare = ((w[0] >> 3) & 0x11111111u) | ((w[4] >> 2) & 0x22222222u) |
                    ((w[8] >> 1) & 0x44444444u);
        if (x == 0) return (low ? w[4] : w[0]) & 0x77777777u;
        return low ? spare : (w[8] & 0x77777777u);
    }
    return (w[4 * x] >> (2 * low)) & 0x33333333u;
}

#define KW (D == 64 ? (KEY_BITS == 4 ? 2 : KEY_BITS) : KEY_BITS)      // uint4 a chunk, keys
#define VW (D == 64 ? (VALUE_BITS == 4 ? 2 : VALUE_BITS) : VALUE_BITS)

struct KeyBlock {  // a lane's codes of 32 tokens
    uint4 w[KL][KW];
};
struct ValueBlock {
    uint4 w[VL][VW];
};

// A tile on its way or being read: each lane's codes, then what is common to all lanes.
struct Stage {
    uint4 key[TB][KL * KW][32], value[TB][VL * VW][32];
    uint2 key_scale[TB][8], value_scale[TB][8];
    uint4 mean[SPAN][MEAN_CHUNKS + !MEAN_CHUNKS];  // of a tile's pages
};

#define STAGE_VALUE (512 * TB * KL * KW)  // where its members begin
#define STAGE_KEY_SCALE (STAGE_VALUE + 512 * TB * VL * VW)
#define STAGE_VALUE_SCALE (STAGE_KEY_SCALE + 64 * TB)
#define STAGE_MEAN (STAGE_VALUE_SCALE + 64 * TB)

// Where a lane's bytes of a record begin; the rest of an address is constant.
__device__ __forceinline__ int key_lane(int r, int c) {
    if (D == 64) return 16 * (((KEY_BITS == 4 ? 8 * (c >> 1) : 0) + r) * C + (c & 1));
    return 16 * (r * C + c);
}

__device__ __forceinline__ int value_lane(int r, int c) {
    if (D == 64) return 16 * (((VALUE_BITS == 4 ? VC * (r >> 2) : 0) + (r & 3)) * 4 + c);
    return 16 * (r * 4 + c);
}

// 16 bytes to an address in shared memory.
__device__ __forceinline__ void copy(u32 to, const u8 *from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy) : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER>  // all but the last `LATER` groups of copies are there
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Codes of page p of a tile, to the stage at `to`. `key` and `value` are the page's record, moved
// on to the tile's and the lane's bytes.
__device__ __forceinline__ void copy_codes(u32 to, int p, const u8 *key, const u8 *value, int lane,
                                           u64 policy) {
    const u32 keys = to + 16 * lane, values = keys + STAGE_VALUE;
#pragma unroll
    for (int b = 0; b < BP; b++)
#pragma unroll
        for (int l = 0; l < KL; l++)
#pragma unroll
            for (int k = 0; k < KW; k++) {
                const int j = (D == 64 && KEY_BITS == 4) ? 2 * k : k;
                copy(keys + 512 * (((p * BP + b) * KL + l) * KW + k),
                     key + b * KEY_BLOCK + 128 * C * j + 64 * l, policy);
            }
#pragma unroll
    for (int b = 0; b < BP; b++)
#pragma unroll
        for (int l = 0; l < VL; l++)
#pragma unroll
            for (int k = 0; k < VW; k++) {
                const int j = (D == 64 && VALUE_BITS == 4) ? 2 * k : k;
                copy(values + 512 * (((p * BP + b) * VL + l) * VW + k),
                     value + VALUE_AT + b * VALUE_BLOCK + 64 * VC * j + 512 * l, policy);
            }
}

// 16 bytes of a page's scales or mean that a lane copies: where from, where to in a stage.
struct Number {
    int from, to, to_next;  // of the next page of the tile
    bool scale, mean;

    __device__ __forceinline__ Number(int e) {
        scale = e < 8 * BP, mean = !scale && e < 8 * BP + MEAN_CHUNKS;
        const bool key = e < 4 * BP;
        const int chunk = key ? e : scale ? e - 4 * BP : e - 8 * BP;
        from = (key ? KEY_SCALE_AT : scale ? VALUE_SCALE_AT : MEAN_AT) + 16 * chunk;
        to = 16 * chunk + (key ? STAGE_KEY_SCALE : scale ? STAGE_VALUE_SCALE : STAGE_MEAN);
        to_next = scale ? 64 * BP : 16 * MEAN_CHUNKS;
    }
};
#define NUMBERS ((8 * BP + MEAN_CHUNKS + 31) / 32)  // a lane

// Channel of the first of a lane's eight codes of key slot x.
__device__ __forceinline__ int key_channel(int x, int c) {
    if (D == 64) return 32 * (c & 1) + 8 * (2 * x + (c >> 1));
    if (D == 128) return 32 * c + 8 * x;
    return 32 * (c + 4 * (x & 1)) + 8 * (x >> 1);
}

// Channel of the first of a lane's four channels of value slot x.
__device__ __forceinline__ int value_channel(int x, int r) {
    if (D == 64) return 16 * (r & 3) + 4 * (2 * x + (r >> 2));
    if (D == 128) return 16 * r + 4 * x;
    return 16 * (r + 8 * (x & 1)) + 4 * (x >> 1);
}

__device__ __forceinline__ u32 key_word(const KeyBlock &t, int x, int i, int c) {
    const u32 *w = (const u32 *)&t.w[D == 256 ? (x & 1) : 0][0] + i;
    if (D == 64) return nibbles_at<KEY_BITS>(w, x, c >> 1);
    return nibbles<KEY_BITS>(w, D == 256 ? x >> 1 : x);
}

__device__ __forceinline__ u32 value_word(const ValueBlock &t, int x, int i, int r) {
    const u32 *w = (const u32 *)&t.w[D == 256 ? (x & 1) : 0][0] + i;
    if (D == 64) return nibbles_at<VALUE_BITS>(w, x, r >> 2);
    return nibbles<VALUE_BITS>(w, D == 256 ? x >> 1 : x);
}

// Four signed bytes -> halves: as the last byte of 1024 + (byte + 128), which is then taken off.
__device__ __forceinline__ void bytes_to_halves(u32 w, u32 &low, u32 &high) {
    w ^= 0x80808080u;
    asm("{.reg .b32 x; prmt.b32 x, %1, 0x64646464, 0x4140; add.f16x2 %0, x, %2;}"
        : "=r"(low) : "r"(w), "r"(0xe480e480u));
    asm("{.reg .b32 x; prmt.b32 x, %1, 0x64646464, 0x4342; add.f16x2 %0, x, %2;}"
        : "=r"(high) : "r"(w), "r"(0xe480e480u));
}

// A lane's channels of a page's mean, as four registers of halves.
__device__ __forceinline__ uint4 mean_halves(const uint4 *mean, int channel) {
#if MEAN_BITS == 8
    const uint2 w = ((const uint2 *)mean)[channel / 8];
    uint4 m;
    bytes_to_halves(w.x, m.x, m.y);
    bytes_to_halves(w.y, m.z, m.w);
    return m;
#else
    return mean[channel / 8];
#endif
}

__device__ __forceinline__ float mean_unit(const uint4 *mean) {
    return MEAN_BITS == 8 ? half_to_float(*(const u16 *)(mean + D / 16)) : 1.f;
}

// q.mu of two pages for columns 2 c, 2 c + 1, in score units: one page in the upper rows of the A
// operand, one in the lower.
__device__ __forceinline__ void mean_scores_of_two(float (&one)[NT][2], float (&two)[NT][2],
                                                   const u32 (&q)[NT][KX][4], const uint4 *mean1,
                                                   const uint4 *mean2, int c, float factor) {
    float s[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][k] = 0.f;
#pragma unroll
    for (int x = 0; x < KX; x++) {
        const uint4 m = mean_halves(mean1, key_channel(x, c));
        const uint4 w = mean_halves(mean2, key_channel(x, c));
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma(s[n], m.x, w.x, m.z, w.z, q[n][x][0], q[n][x][1]);
            mma(s[n], m.y, w.y, m.w, w.w, q[n][x][2], q[n][x][3]);
        }
    }
    const float unit1 = mean_unit(mean1) * factor, unit2 = mean_unit(mean2) * factor;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            one[n][k] = s[n][k] * unit1, two[n][k] = s[n][k + 2] * unit2;
}

// q.mu of one page.
//
// A vector of four registers is one A operand as it lies: (x, z) in its upper rows, (y, w) in its
// lower ones. Two products, with queries (0, 2) and (1, 3), and the upper rows of the first and the
// lower rows of the second are what is wanted.
__device__ __forceinline__ void mean_scores(float (&bias)[NT][2], const u32 (&q)[NT][KX][4],
                                            const uint4 *mean, int c, float factor) {
    float up[NT][4], down[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) up[n][k] = down[n][k] = 0.f;
    factor *= mean_unit(mean);
#pragma unroll
    for (int x = 0; x < KX; x++) {
        const uint4 m = mean_halves(mean, key_channel(x, c));
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma(up[n], m.x, m.y, m.z, m.w, q[n][x][0], q[n][x][1]);
            mma(down[n], m.x, m.y, m.z, m.w, q[n][x][2], q[n][x][3]);
        }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) bias[n][k] = (up[n][k] + down[n][k + 2]) * factor;
}
