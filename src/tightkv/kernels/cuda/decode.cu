// Decode attention over compressed pages with mma.m16n8k16 and no shared memory in the main loop.
//
// Keys are the A operand: lane 4 r + c loads 16 bytes, the same word of tokens r, r + 8, r + 16,
// r + 24, and its codes are the fragment as they lie (the order of channels is applied to the
// query). Values are the A operand too, channels by tokens: a word holds channels of one token
// pair, which is what a fragment register wants. The weights are turned by movmatrix. docs/cuda.md
// has the picture. Every upper-case name is a -D constant of the build (see kernels/cuda).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

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
#define WARPS 4
#define MERGE_WARPS 8
#define COLS (8 * NT)
#define KEY_BLOCK (4 * D * KEY_BITS)      // bytes of codes of 32 tokens
#define VALUE_BLOCK (4 * D * VALUE_BITS)
#define MEAN_CHUNKS (MEAN_BITS == 16 ? D / 8 : MEAN_BITS == 8 ? D / 16 + 1 : 0)  // of 16 bytes
#define NEG_INF (__int_as_float(0xff800000))

struct Rows {  // one kernel argument for all pointers and strides
    const void *query;
    const u8 *pages;
    const int *block_table, *lengths, *starts, *ring_starts, *sink_counts, *ring_rows, *first;
    const u16 *ring_key, *ring_value, *sink_key, *sink_value;
    const float *signs;
    float *partial, *partial_lse;  // of shares, where there are several
    u16 *out;
    float *lse;
    long long query_n, query_h, out_n, out_h, table_b, page_bytes, total_rows;
    float scale, softcap;
    int ring, sinks, splits, exact_shares, window, causal;
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// 1 where the sign bit is set, else 0. The number must not be zero or NaN.
__device__ __forceinline__ float one_if_negative(u32 bits) {
    float y;
    asm("set.lt.f32.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(__int_as_float(bits)));
    return y;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u32 pack_model(float low, float high) {
    u32 r;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}

__device__ __forceinline__ float model_to_float(u16 h) {
#if BF16
    return __int_as_float((u32)h << 16);
#else
    return half_to_float(h);
#endif
}

// A pair of halves times the low or the high half of `two`.
template <int HIGH>
__device__ __forceinline__ u32 scaled(u32 pair, u32 two) {
    u32 y;
    if (HIGH)
        asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h};"
            " mul.f16x2 %0, %1, s;}" : "=r"(y) : "r"(pair), "r"(two));
    else
        asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l};"
            " mul.f16x2 %0, %1, s;}" : "=r"(y) : "r"(pair), "r"(two));
    return y;
}

__device__ __forceinline__ u32 turn(u32 x) {  // transpose an 8 x 8 tile of halves
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void mma(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_model(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    mma(c, a0, a1, a2, a3, b0, b1);
#endif
}

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
    const u32 keys = to + 16 * lane, values = keys + __builtin_offsetof(Stage, value);
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
        to = 16 * chunk + (int)(key     ? __builtin_offsetof(Stage, key_scale)
                                : scale ? __builtin_offsetof(Stage, value_scale)
                                        : __builtin_offsetof(Stage, mean));
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

#define LOWEST (-1e30f)  // no score yet; finite, so that differences are numbers
#define SLACK 4.f        // scores may be that much above the peak before it is raised: weights to 16

struct State {
    float peak[NT][2], sum[NT][2];  // of columns 2 c, 2 c + 1; sum of this lane's tokens alone
    float acc[NT][VX][2][4];
};

__device__ __forceinline__ void clear(State &st) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) st.peak[n][k] = LOWEST, st.sum[n][k] = 0.f;
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int k = 0; k < 4; k++) st.acc[n][x][m][k] = 0.f;
    }
}

// What scores are taken relative to: the peak so far, or 0 before there is one.
__device__ __forceinline__ float base_of(float peak) { return peak == LOWEST ? 0.f : -peak; }

// A higher score than any before, or the first: the accumulators shrink.
template <int GROUPS>
__device__ __forceinline__ void raise_peak(State &st, float (&s)[NT][GROUPS][4], int n,
                                           float (&top)[2]) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        float t = top[k];
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 4));
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 8));
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 16));
        const bool first = st.peak[n][k] == LOWEST, none = t == NEG_INF;
        const float up = first ? (none ? 0.f : t) : fmaxf(t, 0.f);
        const float shrink = first ? 1.f : exp2_fast(-up);
        st.peak[n][k] = first ? (none ? LOWEST : t) : st.peak[n][k] + up;
        st.sum[n][k] *= shrink;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) s[n][g][k] -= up, s[n][g][k + 2] -= up;
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                st.acc[n][x][m][k] *= shrink;
                st.acc[n][x][m][k + 2] *= shrink;
            }
    }
}

// Scores s[nt][16-token group][4], in log2 units and relative to base_of(peak) -> weights.
template <int GROUPS>
__device__ __forceinline__ void softmax_step(State &st, float (&s)[NT][GROUPS][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float top[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            top[k] = fmaxf(s[n][0][k], s[n][0][k + 2]);
#pragma unroll
            for (int g = 1; g < GROUPS; g++)
                top[k] = fmaxf(top[k], fmaxf(s[n][g][k], s[n][g][k + 2]));
        }
        const bool fresh = fminf(st.peak[n][0], st.peak[n][1]) == LOWEST;
        if (__any_sync(~0u, fresh || fmaxf(top[0], top[1]) > SLACK))
            raise_peak<GROUPS>(st, s, n, top);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                s[n][g][k] = exp2_fast(s[n][g][k]);
                s[n][g][k + 2] = exp2_fast(s[n][g][k + 2]);
                st.sum[n][k] += s[n][g][k] + s[n][g][k + 2];
            }
    }
}

// x [D] of a warp's lanes, lane l holding channels l + 32 k, times the unscaled Hadamard matrix.
__device__ __forceinline__ void hadamard(float (&x)[D / 32], int lane) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            float other = __shfl_xor_sync(~0u, x[k], bit);
            x[k] = (lane & bit) ? other - x[k] : x[k] + other;
        }
#pragma unroll
    for (int bit = 1; bit < D / 32; bit *= 2)
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            if (!(k & bit)) {
                float a = x[k], b = x[k + bit];
                x[k] = a + b;
                x[k + bit] = a - b;
            }
}

struct Bounds {
    int low, high;        // positions in [low, high) are read from pages, others there are not
    int first_at;         // position of the first query token
    int causal, window;
    float softcap;
};

__device__ __forceinline__ float seen(const Bounds &v, int at, int query_at, float s, int page) {
#if SOFTCAP
    // s is in log2 units: cap * tanh(x / cap) = cap * (1 - 2 / (1 + e^(2 x / cap)))
    const float e = exp2_fast(s * __fdividef(2.f, v.softcap));
    s = v.softcap * 1.4426950408889634f * (1.f - __fdividef(2.f, 1.f + e));
#endif
    bool ok = true;
    if (page) ok = at >= v.low && at < v.high;
    if (v.causal) ok = ok && at <= query_at;
    if (v.window > 0) ok = ok && at > query_at - v.window;
    return ok ? s : NEG_INF;
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

__device__ __forceinline__ void load_queries(u32 (&q)[NT][KX][4], const u32 (*shared)[D / 2 + 4],
                                             int r, int c) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int x = 0; x < KX; x++)
#pragma unroll
            for (int k = 0; k < 4; k++)  // pairs 0 2 1 3: see mean_scores
                q[n][x][k] =
                    shared[8 * n + r][key_channel(x, c) / 2 + 2 * (k & 1) + (k >> 1)];
}

// Where in a stashed row a channel lies: the lanes of a store then have banks of their own.
__device__ __forceinline__ int place_of(int channel) {
    int r, x;
    if (D == 64) {
        r = ((channel >> 4) & 3) | (channel & 4);
        x = (channel >> 3) & 1;
    } else if (D == 128) {
        r = channel >> 4;
        x = (channel >> 2) & 3;
    } else {
        r = (channel >> 4) & 7;
        x = (channel >> 7) | ((channel >> 1) & 6);
    }
    return 8 * (4 * x + (channel & 3)) + r;
}

struct Stash {  // what a warp found, in one frame
    float acc[COLS][D + 4], peak[COLS], sum[COLS];
};

union Warp {  // a warp's own memory: first for tiles, then for what it found
    Stage stage[STAGES];
    struct {
        Stash pages, exact;
    } found;
};

struct Shared {
    Warp warp[WARPS];
    u32 query[2][COLS][D / 2 + 4];  // rotated halves, and as they came
    float query_top[COLS];
    u32 tables[4];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "kernels/cuda computes another size");

__device__ __forceinline__ void stash(const State &st, Stash &to, int lane) {
    const int r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float sum = st.sum[n][k];
            sum += __shfl_xor_sync(~0u, sum, 4);
            sum += __shfl_xor_sync(~0u, sum, 8);
            sum += __shfl_xor_sync(~0u, sum, 16);
            if (r == 0) {
                to.peak[8 * n + 2 * c + k] = st.peak[n][k];
                to.sum[8 * n + 2 * c + k] = sum;
            }
        }
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    to.acc[8 * n + 2 * c + (k & 1)][8 * (4 * x + 2 * m + (k >> 1)) + r] =
                        st.acc[n][x][m][k];
    }
}

// A column of all warps: their sum relative to the highest peak, which is returned with the weight.
template <bool EXACT>
__device__ __forceinline__ void gather(const Shared &sh, int n, int lane, float (&o)[D / 32],
                                       float &peak, float &sum) {
    peak = LOWEST, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const Stash &from = EXACT ? sh.warp[w].found.exact : sh.warp[w].found.pages;
        if (from.sum[n] > 0.f) peak = fmaxf(peak, from.peak[n]);
    }
#pragma unroll
    for (int k = 0; k < D / 32; k++) o[k] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const Stash &from = EXACT ? sh.warp[w].found.exact : sh.warp[w].found.pages;
        if (!(from.sum[n] > 0.f)) continue;  // nothing was found
        const float weight = exp2_fast(from.peak[n] - peak);
        sum += weight * from.sum[n];
#pragma unroll
        for (int k = 0; k < D / 32; k++) o[k] += weight * from.acc[n][lane + 32 * k];
    }
}

// A share's mean value and LSE (in log2 units) of one query.
__device__ __forceinline__ void write_share(const Rows &a, int share, long long row, int lane,
                                            const float (&o)[D / 32], float peak, float sum,
                                            float unit) {
    const long long place = (long long)share * a.total_rows * HQ + row;
    if (lane == 0) a.partial_lse[place] = sum > 0.f ? peak + log2f(sum) : NEG_INF;
    const float inverse = sum > 0.f ? unit / sum : 0.f;
#pragma unroll
    for (int k = 0; k < D / 32; k++) a.partial[place * D + lane + 32 * k] = o[k] * inverse;
}

// Sums over pages (in the order of `place_of`, in `row`) and over exact tokens -> the answer.
__device__ __forceinline__ void write_answer(float *pages, float *exact, const float *signs,
                                             u16 *out, float *lse, int lane, float peak,
                                             float sum) {
    float x[D / 32], y[D / 32];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        const int place = place_of(lane + 32 * k);
        x[k] = pages[place], y[k] = exact[place];
    }
#if ROTATED
    hadamard(x, lane);
#pragma unroll
    for (int k = 0; k < D / 32; k++) x[k] *= ROOT * signs[lane + 32 * k];
#endif
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
    for (int k = 0; k < D / 32; k++)
        out[lane + 32 * k] = (u16)pack_model((x[k] + y[k]) * inverse, 0.f);
    if (lane == 0) *lse = sum > 0.f ? (peak + log2f(sum)) * 0.6931471805599453f : NEG_INF;
}

// Join the warps of a block: to the answer where it has all of a sequence, else to its shares.
__device__ __forceinline__ void join(Shared &sh, const Rows &a, int split, int begin, int count,
                                     int head, int col0, int lane, int warp) {
    __syncthreads();
    for (int n = warp; n < COLS; n += WARPS) {
        const int col = col0 + n, token = col / G;
        if (token >= count) break;
        const int query_head = head * G + col % G;
        const long long row = (long long)(begin + token) * HQ + query_head;
        float o[D / 32], e[D / 32], peak, sum, exact_peak, exact_sum;
        gather<false>(sh, n, lane, o, peak, sum);
        gather<true>(sh, n, lane, e, exact_peak, exact_sum);
        if (a.splits > 1) {
            write_share(a, split, row, lane, o, peak, sum, VALUE_UNIT);
            if (split < a.exact_shares)
                write_share(a, a.splits + split, row, lane, e, exact_peak, exact_sum, 1.f);
            continue;
        }
        const float top = fmaxf(peak, exact_peak);
        const float w = sum > 0.f ? exp2_fast(peak - top) : 0.f;
        const float v = exact_sum > 0.f ? exp2_fast(exact_peak - top) : 0.f;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            sh.warp[0].found.pages.acc[n][lane + 32 * k] = w * VALUE_UNIT * o[k];
            sh.warp[0].found.exact.acc[n][lane + 32 * k] = v * e[k];
        }
        write_answer(sh.warp[0].found.pages.acc[n], sh.warp[0].found.exact.acc[n], a.signs,
                     a.out + (long long)(begin + token) * a.out_n + query_head * a.out_h,
                     a.lse + row, lane, top, w * sum + v * exact_sum);
    }
}

// A tile at the edge of what is seen: hide scores, and scales that were never written (NaN).
__device__ __forceinline__ void mask_tile(const Bounds &v, const State &st,
                                          float (&s)[NT][2 * TB][4], uint2 (&value_scale)[TB],
                                          int at0, int col0, int r, int c) {
#pragma unroll
    for (int b = 0; b < TB; b++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = at0 + 32 * b + 8 * i + r;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    float *e = &s[n][2 * b + i / 2][k + 2 * (i & 1)];
                    const float base = base_of(st.peak[n][k]);
                    *e = base +
                         seen(v, at, v.first_at + (col0 + 8 * n + 2 * c + k) / G, *e - base, 1);
                }
            if (at < v.low || at >= v.high) {
                u32 &two = i < 2 ? value_scale[b].x : value_scale[b].y;
                two &= (i & 1) ? 0x0000ffffu : 0xffff0000u;
            }
        }
}

// 16 exact tokens, from the `from`-th: sinks, then the ring. In their own frame.
struct Exact {
    const u16 *sink_key, *sink_value, *ring_key, *ring_value;  // of the sequence and head
    int sinks, count, start, ring_from, ring;
};

__device__ __forceinline__ bool exact_place(const Exact &x, int e, int &at, long long &place) {
    const bool sink = e < x.sinks;
    at = sink ? x.start + e : x.ring_from + e - x.sinks;
    place = (long long)(sink ? e : at % x.ring) * HKV * D;
    return sink;
}

__device__ __forceinline__ void exact_tokens(State &st, const u32 (&q)[NT][KX][4], const Exact &x,
                                             const Bounds &v, int from, int col0, int r, int c,
                                             float scale) {
    const u16 *keys[2], *values[4];
    int at[2], unused;
    long long place;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int e = from + r + 8 * k;
        keys[k] = (exact_place(x, e, at[k], place) ? x.sink_key : x.ring_key) + place;
        if (e >= x.count) keys[k] = 0;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {  // tokens 2 c, 2 c + 1 and 8 more
        const int e = from + 2 * c + (k & 1) + 8 * (k >> 1);
        values[k] = (exact_place(x, e, unused, place) ? x.sink_value : x.ring_value) + place;
        if (e >= x.count) values[k] = 0;
    }
    const uint4 zero = {0, 0, 0, 0};
    uint4 h[KX], g[KX];
    uint2 w[VX][4];
#pragma unroll
    for (int i = 0; i < KX; i++) {
        h[i] = keys[0] ? *(const uint4 *)(keys[0] + key_channel(i, c)) : zero;
        g[i] = keys[1] ? *(const uint4 *)(keys[1] + key_channel(i, c)) : zero;
    }
#pragma unroll
    for (int i = 0; i < VX; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            w[i][k] = values[k] ? *(const uint2 *)(values[k] + value_channel(i, r))
                                : make_uint2(0, 0);
    float s[NT][1][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][0][k] = 0.f;
#pragma unroll
    for (int i = 0; i < KX; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma_model(s[n][0], h[i].x, g[i].x, h[i].z, g[i].z, q[n][i][0], q[n][i][1]);
            mma_model(s[n][0], h[i].y, g[i].y, h[i].w, g[i].w, q[n][i][2], q[n][i][3]);
        }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int col = col0 + 8 * n + 2 * c + (k & 1);
            const float e = seen(v, at[k >> 1], v.first_at + col / G,
                                 s[n][0][k] * scale * 1.4426950408889634f, 0);
            s[n][0][k] = keys[k >> 1] ? e + base_of(st.peak[n][k & 1]) : NEG_INF;
        }
    softmax_step<1>(st, s);
    u32 p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            p[n][k] = turn(pack_model(s[n][0][2 * k], s[n][0][2 * k + 1]));
#pragma unroll
    for (int i = 0; i < VX; i++) {
        u32 a[4], b[4];  // channel y: tokens (2c, 2c+1), and the 8 later
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const u32 pick = (y & 1) ? 0x7632 : 0x5410;
            a[y] = y < 2 ? __byte_perm(w[i][0].x, w[i][1].x, pick)
                         : __byte_perm(w[i][0].y, w[i][1].y, pick);
            b[y] = y < 2 ? __byte_perm(w[i][2].x, w[i][3].x, pick)
                         : __byte_perm(w[i][2].y, w[i][3].y, pick);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma_model(st.acc[n][i][0], a[0], a[1], b[0], b[1], p[n][0], p[n][1]);
            mma_model(st.acc[n][i][1], a[2], a[3], b[2], b[3], p[n][0], p[n][1]);
        }
    }
}

struct Queries {  // a lane's part of the columns its warp prepares: every fourth
    u16 raw[COLS / WARPS][D / 32];
    float sign[D / 32];
};

__device__ __forceinline__ void load(Queries &q, const Rows &a, int begin, int count, int first_at,
                                     int head, int col0, int lane, int warp) {
#pragma unroll
    for (int i = 0; i < COLS / WARPS; i++) {
        const int col = col0 + warp + WARPS * i, token = col / G;
        const bool live = token < count && first_at + token >= 0;
        const u16 *at = (const u16 *)a.query + (long long)(begin + token) * a.query_n +
                        (long long)(head * G + col % G) * a.query_h;
#pragma unroll
        for (int k = 0; k < D / 32; k++) q.raw[i][k] = live ? at[lane + 32 * k] : (u16)0;
    }
#pragma unroll
    for (int k = 0; k < D / 32; k++) q.sign[k] = ROTATED ? a.signs[lane + 32 * k] : 1.f;
}

// Both frames of a block's queries to shared memory; returns what rotated scores are to be
// multiplied with to be in log2 units.
__device__ __forceinline__ float prepare(const Queries &q, Shared &sh, float scale, int lane,
                                         int warp) {
    float x[COLS / WARPS][D / 32];
#pragma unroll
    for (int i = 0; i < COLS / WARPS; i++) {
        float top = 0.f;
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            ((u16 *)sh.query[1][warp + WARPS * i])[lane + 32 * k] = q.raw[i][k];
            x[i][k] = model_to_float(q.raw[i][k]) * q.sign[k];
        }
#if ROTATED
        hadamard(x[i], lane);
#endif
#pragma unroll
        for (int k = 0; k < D / 32; k++) top = fmaxf(top, fabsf(x[i][k]));
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
        if (lane == 0) sh.query_top[warp + WARPS * i] = top;
    }
    __syncthreads();
    // One factor for all columns: the largest component becomes 256.
    float top = 0.f;
#pragma unroll
    for (int n = 0; n < COLS; n++) top = fmaxf(top, sh.query_top[n]);
    top = top > 0.f ? top * (1.f / 256.f) : 1.f;
#pragma unroll
    for (int i = 0; i < COLS / WARPS; i++)
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            ((u16 *)sh.query[0][warp + WARPS * i])[lane + 32 * k] =
                (u16)pack_half(__fdividef(x[i][k], top), 0.f);
    __syncthreads();
    return top * (ROTATED ? ROOT : 1.f) * scale * 1.4426950408889634f;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const Rows a) {
    extern __shared__ __align__(16) char memory[];
    Shared &sh = *(Shared *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int r = lane >> 2, c = lane & 3;
    const int split = blockIdx.y, row = blockIdx.x / HKV, head = blockIdx.x % HKV;
    asm volatile("griddepcontrol.wait;");  // for the append before this
    const int begin = a.first[row], count = a.first[row + 1] - begin;
    const int length = a.lengths[row], start = a.starts[row], ring_start = a.ring_starts[row];
    const int sinks_end = min(start + a.sink_counts[row], ring_start), owner = a.ring_rows[row];
    const int col0 = blockIdx.z * COLS;
    if (col0 >= count * G) return;

    Bounds v;
    v.low = max(sinks_end, start), v.high = ring_start;
    v.first_at = length - count;
    v.causal = a.causal, v.window = a.window, v.softcap = a.softcap;
    const int first_col_at = v.first_at + col0 / G;  // tokens up to here are seen by every column
    int low = start;
    if (v.window > 0) low = max(low, first_col_at - v.window + 1);
    Exact exact;
    exact.start = start, exact.ring_from = max(ring_start, start), exact.ring = a.ring;
    exact.sinks = max(sinks_end - start, 0);
    exact.count = exact.sinks + max(length - exact.ring_from, 0);

    // Work comes in units: 16 exact tokens, or a tile of pages. Each warp has a run of them.
    const int page_from = low / PAGE, page_to = (ring_start + PAGE - 1) / PAGE;
    const int tile_from = page_from * TILES / SPAN, tile_to = (page_to * TILES + SPAN - 1) / SPAN;
    const int groups = (exact.count + 15) / 16;
    const int units = groups + max(tile_to - tile_from, 0);
    const int block_each = (units + a.splits - 1) / a.splits;
    const int block_to = min(units, (split + 1) * block_each);
    const int warp_each = (max(block_to - split * block_each, 0) + WARPS - 1) / WARPS;
    const int unit = split * block_each + warp * warp_each, unit_to = min(block_to, unit + warp_each);
    const int tile0 = tile_from - groups;
    int t = tile0 + max(unit, groups);
    const int t_end = tile0 + unit_to;

    // The first tiles are on their way while the queries are prepared. Page numbers are taken
    // from the table 32 at a time, one a lane.
    const int *table = a.block_table + row * a.table_b;
    int window = t / TILES * SPAN;
    int page_ids = t < t_end ? table[min(window + lane, page_to - 1)] : 0;
    Queries queries;
    load(queries, a, begin, count, v.first_at, head, col0, lane, warp);
    const u8 *pages = a.pages + head * RECORD;
    const u8 *key_base = pages + key_lane(r, c), *value_base = pages + value_lane(r, c);
    const Number numbers[2] = {Number(lane), Number(lane + 32)};
    const u32 page_bytes = a.page_bytes;
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const Stage *stages = sh.warp[warp].stage;
    const u32 first_stage = (u32)__cvta_generic_to_shared(stages);
    u32 to = first_stage;
    int ahead = t;  // the next tile to be copied
    auto copy_next = [&]() {
        if (ahead < t_end) {
            const int page = ahead / TILES * SPAN, block = (ahead % TILES) * TB;
            if (page == window + 32) {
                window += 32;
                page_ids = table[min(window + lane, page_to - 1)];
            }
            const bool new_page = TILES == 1 || block == 0 || ahead == t;
#pragma unroll
            for (int p = 0; p < SPAN; p++) {
                const u64 at = (u64)page_bytes * (u32)__shfl_sync(~0u, page_ids, page + p - window);
                copy_codes(to, p, key_base + at + block * KEY_BLOCK,
                           value_base + at + block * VALUE_BLOCK, lane, policy);
#pragma unroll
                for (int k = 0; k < NUMBERS; k++) {
                    const Number &x = numbers[k];
                    if (x.scale || (new_page && x.mean))
                        copy(to + x.to + p * x.to_next,
                             pages + at + x.from + (x.scale ? 64 * block : 0), policy);
                }
            }
            ahead++;
            to += sizeof(Stage);
            if (to == first_stage + STAGES * sizeof(Stage)) to = first_stage;
        }
        end_of_copies();
    };
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) copy_next();
    if (threadIdx.x == 0) {
        sh.tables[0] = KEY_LOW, sh.tables[1] = KEY_HIGH;
        sh.tables[2] = VALUE_LOW, sh.tables[3] = VALUE_HIGH;
    }
    const float factor = prepare(queries, sh, a.scale, lane, warp);

    State st;
    clear(st);
    u32 q[NT][KX][4];
    load_queries(q, sh.query[0], r, c);
    {
        // Read back from shared memory: constants would be made again for every use.
        const volatile u32 *kept = sh.tables;
        const u32 key_low = kept[0], key_high = kept[1];
#if VALUE_BITS == KEY_BITS
        const u32 value_low = key_low, value_high = key_high;
#else
        const u32 value_low = kept[2], value_high = kept[3];
#endif
        const float key_unit = KEY_UNIT * factor;
        // tiles in [whole_from, whole_to) are wholly seen by every column
        const int newest = v.first_at + (col0 + COLS - 1) / G;
        int seen_from = v.low, seen_to = v.high;
        if (v.window > 0) seen_from = max(seen_from, newest - v.window + 1);
        if (v.causal) seen_to = min(seen_to, first_col_at + 1);
        const int whole_from = SOFTCAP ? t_end : (seen_from + 32 * TB - 1) / (32 * TB);
        const int whole_to = seen_to / (32 * TB);
        float bias[SPAN][NT][2];
        bool new_page = true;
        int at_stage = 0;
        for (; t < t_end; t++) {
            copy_next();
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // lanes read what others copied
            const Stage &tile = stages[at_stage];
            at_stage = at_stage + 1 == STAGES ? 0 : at_stage + 1;
#if MEAN_BITS > 0
#if SPAN == 1
            if (new_page) mean_scores(bias[0], q, tile.mean[0], c, factor);
#else
#pragma unroll
            for (int p = 0; p < SPAN; p += 2)
                mean_scores_of_two(bias[p], bias[p + 1], q, tile.mean[p], tile.mean[p + 1], c, factor);
#endif
#endif
            new_page = (t + 1) % TILES == 0;

            float s[NT][2 * TB][4];
            uint2 key_scale[TB], value_scale[TB];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int g = 0; g < 2 * TB; g++)
#pragma unroll
                    for (int k = 0; k < 4; k++) s[n][g][k] = 0.f;
#pragma unroll
            for (int b = 0; b < TB; b++) {
                KeyBlock codes;
#pragma unroll
                for (int k = 0; k < KL * KW; k++) (&codes.w[0][0])[k] = tile.key[b][k][lane];
                key_scale[b] = tile.key_scale[b][r];
                value_scale[b] = tile.value_scale[b][r];
#pragma unroll
                for (int x = 0; x < KX; x++) {
                    u32 h[4][4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        levels<KEY_BITS>(key_word(codes, x, i, c), key_low, key_high, h[i]);
#pragma unroll
                    for (int k = 0; k < 2; k++)  // neighbours do not wait for each other
#pragma unroll
                        for (int i = 0; i < 4; i += 2)
#pragma unroll
                            for (int n = 0; n < NT; n++)
                                mma(s[n][2 * b + i / 2], h[i][k], h[i + 1][k], h[i][k + 2],
                                    h[i + 1][k + 2], q[n][x][2 * k], q[n][x][2 * k + 1]);
                }
            }
            // scores relative to the peak: mostly negative or little above it, and then it stays
            float base[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 2; k++) base[n][k] = base_of(st.peak[n][k]);
#pragma unroll
            for (int b = 0; b < TB; b++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 two = i < 2 ? key_scale[b].x : key_scale[b].y;
                    const float size =
                        fabsf(half_to_float((u16)(two >> (16 * (i & 1))))) * key_unit;
                    const float centered = one_if_negative((i & 1) ? two + 1 : two * 65536 + 1);
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            float *e = &s[n][2 * b + i / 2][k + 2 * (i & 1)];
                            if (MEAN_BITS > 0)
                                *e = *e * size + (centered * bias[b / BP][n][k] + base[n][k]);
                            else
                                *e = *e * size + base[n][k];
                        }
                }
            if (t < whole_from || t >= whole_to)
                mask_tile(v, st, s, value_scale, t * 32 * TB, col0, r, c);
            softmax_step<2 * TB>(st, s);

#pragma unroll
            for (int b = 0; b < TB; b++) {
                ValueBlock codes;
#pragma unroll
                for (int k = 0; k < VL * VW; k++) (&codes.w[0][0])[k] = tile.value[b][k][lane];
                u32 p[NT][4];
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float *e = s[n][2 * b], *f = s[n][2 * b + 1];
                    p[n][0] = turn(scaled<0>(pack_half(e[0], e[1]), value_scale[b].x));
                    p[n][1] = turn(scaled<1>(pack_half(e[2], e[3]), value_scale[b].x));
                    p[n][2] = turn(scaled<0>(pack_half(f[0], f[1]), value_scale[b].y));
                    p[n][3] = turn(scaled<1>(pack_half(f[2], f[3]), value_scale[b].y));
                }
#pragma unroll
                for (int x = 0; x < VX; x++)
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        u32 h[4], g[4];
                        levels<VALUE_BITS>(value_word(codes, x, i, r), value_low, value_high, h);
                        levels<VALUE_BITS>(value_word(codes, x, i + 1, r), value_low, value_high, g);
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            mma(st.acc[n][x][0], h[0], h[1], g[0], g[1], p[n][i], p[n][i + 1]);
                            mma(st.acc[n][x][1], h[2], h[3], g[2], g[3], p[n][i], p[n][i + 1]);
                        }
                    }
            }
        }
    }
    asm volatile("griddepcontrol.launch_dependents;");
    __syncwarp();  // the last tile has been read by all lanes
    stash(st, sh.warp[warp].found.pages, lane);
    if (unit < min(groups, unit_to)) {
        const long long sink_at = ((long long)owner * a.sinks * HKV + head) * D;
        const long long ring_at = ((long long)owner * a.ring * HKV + head) * D;
        exact.sink_key = a.sink_key + sink_at, exact.sink_value = a.sink_value + sink_at;
        exact.ring_key = a.ring_key + ring_at, exact.ring_value = a.ring_value + ring_at;
        load_queries(q, sh.query[1], r, c);
        clear(st);
        for (int group = unit; group < min(groups, unit_to); group++)
            exact_tokens(st, q, exact, v, 16 * group, col0, r, c, a.scale);
        stash(st, sh.warp[warp].found.exact, lane);
    } else if (lane < COLS) {
        sh.warp[warp].found.exact.sum[lane] = 0.f;
    }
    join(sh, a, split, begin, count, head, col0, lane, warp);
}

// A block a (query, head): weigh the shares, rotate those of the pages back, add the exact ones.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
merge(const float *partial, const float *partial_lse, const float *signs, const int *first,
      u16 *out, float *lse, long long out_n, long long out_h, long long total_rows, int batch,
      int splits, int shares) {
    __shared__ float sums[MERGE_WARPS][2][D], weights[MERGE_WARPS];
    asm volatile("griddepcontrol.wait;");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long row = blockIdx.x, step = total_rows * HQ;
    const bool owned = row < (long long)first[batch] * HQ;
    float peak = NEG_INF;
    if (owned)
        for (int s = lane; s < shares; s += 32) peak = fmaxf(peak, partial_lse[s * step + row]);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, bit));
    const float base = peak == NEG_INF ? 0.f : peak;
    float sum = 0.f, pages[D / 32], exact[D / 32];
#pragma unroll
    for (int k = 0; k < D / 32; k++) pages[k] = exact[k] = 0.f;
    if (owned)
#pragma unroll 8
        for (int s = warp; s < shares; s += MERGE_WARPS) {
            const float w = exp2_fast(partial_lse[s * step + row] - base);
            const float *o = partial + (s * step + row) * D;
            sum += w;
#pragma unroll
            for (int k = 0; k < D / 32; k++) {
                const float x = w * o[lane + 32 * k];
                if (s < splits) pages[k] += x; else exact[k] += x;
            }
        }
    if (lane == 0) weights[warp] = sum;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        sums[warp][0][lane + 32 * k] = pages[k];
        sums[warp][1][lane + 32 * k] = exact[k];
    }
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; w++) {
        sum += weights[w];
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            pages[k] += sums[w][0][lane + 32 * k];
            exact[k] += sums[w][1][lane + 32 * k];
        }
    }
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        sums[0][0][lane + 32 * k] = pages[k];
        sums[0][1][lane + 32 * k] = exact[k];
    }
    write_answer(sums[0][0], sums[0][1], signs, out + (row / HQ) * out_n + (row % HQ) * out_h,
                 lse + row, lane, peak, sum);
}
