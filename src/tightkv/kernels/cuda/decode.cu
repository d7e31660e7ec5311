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

#define TILES (PAGE / (32 * TB))      // tiles in a page
#define C (D / 32)                    // chunks of a key row
#define VC (D / 16)                   // chunks of a value row
#define KX (C)                        // nibble words a lane has for a key row: 4 C / 4
#define VX (VC / 2)                   // and for a value pair: 4 VC / 8
#define KL ((C + 3) / 4)              // key chunks a lane loads
#define VL ((VC + 7) / 8)             // value chunks a lane loads
#define WARPS 4
#define MERGE_WARPS 8
#define COLS (8 * NT)
#define NEG_INF (__int_as_float(0xff800000))

struct Rows {  // one kernel argument for all pointers and strides
    const void *query;
    const u8 *pages;
    const int *block_table, *lengths, *starts, *ring_starts, *sink_counts, *ring_rows, *first;
    const u16 *ring_key, *ring_value, *sink_key, *sink_value;
    const float *signs;
    float *partial, *partial_lse;
    long long query_n, query_h, table_b, total_rows;
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
        u32 m = w & 0x77777777u;
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

struct KeyTile {
    uint4 w[TB][KL][KW];
    uint2 scale[TB];
};
struct ValueTile {
    uint4 w[TB][VL][VW];
    uint2 scale[TB];
};

// Offsets are constants but for the lane's own, so that loads share one address register.
__device__ __forceinline__ void load_keys(KeyTile &t, const u8 *record, int block, int r, int c) {
    const int chunk0 = D == 64 ? (c & 1) : c, j0 = (D == 64 && KEY_BITS == 4) ? (c >> 1) : 0;
    const u8 *codes = record + 16 * (((block * KEY_BITS + j0) * 8 + r) * C + chunk0);
    const u8 *scales = record + KEY_SCALE_AT + 64 * block + 8 * r;
#pragma unroll
    for (int b = 0; b < TB; b++) {
#pragma unroll
        for (int l = 0; l < KL; l++)
#pragma unroll
            for (int k = 0; k < KW; k++) {
                const int j = (D == 64 && KEY_BITS == 4) ? 2 * k : k;
                t.w[b][l][k] = __ldcs(
                    (const uint4 *)(codes + 16 * ((b * KEY_BITS + j) * 8 * C + 4 * l)));
            }
        t.scale[b] = __ldcs((const uint2 *)(scales + 64 * b));
    }
}

__device__ __forceinline__ void load_values(ValueTile &t, const u8 *record, int block, int r, int c) {
    const int chunk0 = D == 64 ? (r & 3) : r, j0 = (D == 64 && VALUE_BITS == 4) ? (r >> 2) : 0;
    const u8 *codes =
        record + VALUE_AT + 16 * (((block * VALUE_BITS + j0) * VC + chunk0) * 4 + c);
    const u8 *scales = record + VALUE_SCALE_AT + 64 * block + 8 * r;
#pragma unroll
    for (int b = 0; b < TB; b++) {
#pragma unroll
        for (int l = 0; l < VL; l++)
#pragma unroll
            for (int k = 0; k < VW; k++) {
                const int j = (D == 64 && VALUE_BITS == 4) ? 2 * k : k;
                t.w[b][l][k] = __ldcs(
                    (const uint4 *)(codes + 64 * ((b * VALUE_BITS + j) * VC + 8 * l)));
            }
        t.scale[b] = __ldcs((const uint2 *)(scales + 64 * b));
    }
}

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

__device__ __forceinline__ u32 key_word(const KeyTile &t, int b, int x, int i, int c) {
    const u32 *w = (const u32 *)&t.w[b][D == 256 ? (x & 1) : 0][0] + i;
    if (D == 64) return nibbles_at<KEY_BITS>(w, x, c >> 1);
    return nibbles<KEY_BITS>(w, D == 256 ? x >> 1 : x);
}

__device__ __forceinline__ u32 value_word(const ValueTile &t, int b, int x, int i, int r) {
    const u32 *w = (const u32 *)&t.w[b][D == 256 ? (x & 1) : 0][0] + i;
    if (D == 64) return nibbles_at<VALUE_BITS>(w, x, r >> 2);
    return nibbles<VALUE_BITS>(w, D == 256 ? x >> 1 : x);
}

#define LOWEST (-1e30f)  // no score yet; finite, so that differences are numbers

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
        if (__any_sync(~0u, fresh || fmaxf(top[0], top[1]) > 0.f))
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
    int first_at, count;  // position of the first query token; how many
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

// q.mu of a page for columns 2 c, 2 c + 1, in score units.
//
// A vector of four registers is one A operand as it lies: (x, z) in its upper rows, (y, w) in its
// lower ones. Two products, with queries (0, 2) and (1, 3), and the upper rows of the first and the
// lower rows of the second are what is wanted.
__device__ __forceinline__ void mean_scores(float (&bias)[NT][2], const u32 (&q)[NT][KX][4],
                                            const u8 *record, int c, float factor) {
    float up[NT][4], down[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) up[n][k] = down[n][k] = 0.f;
#if MEAN_BITS == 8
    factor *= half_to_float(*(const u16 *)(record + MEAN_AT + D));
#endif
#pragma unroll
    for (int x = 0; x < KX; x++) {
#if MEAN_BITS == 16
        const uint4 m = *(const uint4 *)(record + MEAN_AT + 2 * key_channel(x, c));
#elif MEAN_BITS == 8
        const uint2 w = *(const uint2 *)(record + MEAN_AT + key_channel(x, c));
        uint4 m;
        m.x = pack_half((float)(signed char)w.x, (float)(signed char)(w.x >> 8));
        m.y = pack_half((float)(signed char)(w.x >> 16), (float)(signed char)(w.x >> 24));
        m.z = pack_half((float)(signed char)w.y, (float)(signed char)(w.y >> 8));
        m.w = pack_half((float)(signed char)(w.y >> 16), (float)(signed char)(w.y >> 24));
#endif
#if MEAN_BITS > 0
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma(up[n], m.x, m.y, m.z, m.w, q[n][x][0], q[n][x][1]);
            mma(down[n], m.x, m.y, m.z, m.w, q[n][x][2], q[n][x][3]);
        }
#endif
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

// Join the warps of a block and write their share.
__device__ __forceinline__ void join(const State &st, float (*merge_acc)[COLS][D],
                                     float (*merge_peak)[COLS], float (*merge_sum)[COLS],
                                     const Rows &a, int share, int begin, int count, int head,
                                     int col0, int lane, int warp, float unit) {
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
                merge_peak[warp][8 * n + 2 * c + k] = st.peak[n][k];
                merge_sum[warp][8 * n + 2 * c + k] = sum;
            }
        }
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    merge_acc[warp][8 * n + 2 * c + (k & 1)]
                             [value_channel(x, r) + 2 * m + (k >> 1)] = st.acc[n][x][m][k];
    }
    __syncthreads();
    for (int n = warp; n < COLS; n += WARPS) {
        const int col = col0 + n, token = col / G;
        if (token >= count) break;
        float peak = LOWEST, sum = 0.f, weight[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, merge_peak[w][n]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            weight[w] = exp2_fast(merge_peak[w][n] - peak);
            sum += weight[w] * merge_sum[w][n];
        }
        const long long place =
            ((long long)share * a.total_rows + begin + token) * HQ + head * G + col % G;
        if (lane == 0) a.partial_lse[place] = sum > 0.f ? peak + log2f(sum) : NEG_INF;
        const float inverse = sum > 0.f ? unit / sum : 0.f;
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            float o = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) o += weight[w] * merge_acc[w][n][lane + 32 * k];
            a.partial[place * D + lane + 32 * k] = o * inverse;
        }
    }
}

// A tile at the edge of what is seen: hide scores, and scales that were never written (NaN).
__device__ __forceinline__ void mask_tile(const Bounds &v, const State &st,
                                          float (&s)[NT][2 * TB][4], ValueTile &vt, int at0,
                                          int col0, int r, int c) {
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
                u32 &two = i < 2 ? vt.scale[b].x : vt.scale[b].y;
                two &= (i & 1) ? 0x0000ffffu : 0xffff0000u;
            }
        }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const Rows a) {
    __shared__ __align__(16) u32 q_shared[2][COLS][D / 2 + 4];  // rotated halves, exact in model dtype
    __shared__ float merge_acc[WARPS][COLS][D];
    __shared__ float merge_peak[WARPS][COLS], merge_sum[WARPS][COLS], q_top[COLS];
    __shared__ u32 tables[4];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int r = lane >> 2, c = lane & 3;
    // shares of pages come first in the grid: they run longest
    const int split = blockIdx.y, row = blockIdx.x / HKV, head = blockIdx.x % HKV;
    asm volatile("griddepcontrol.wait;");  // for the append before this
    const int begin = a.first[row], count = a.first[row + 1] - begin;
    const int col0 = blockIdx.z * COLS;
    if (col0 >= count * G) return;

    const int length = a.lengths[row], start = a.starts[row], ring_start = a.ring_starts[row];
    const int sinks_end = min(start + a.sink_counts[row], ring_start);
    Bounds v;
    v.low = max(sinks_end, start), v.high = ring_start;
    v.count = count, v.first_at = length - count;
    v.causal = a.causal, v.window = a.window, v.softcap = a.softcap;
    const int first_col_at = v.first_at + col0 / G;
    int low = start;
    if (v.window > 0) low = max(low, first_col_at - v.window + 1);

    // this block's tiles, a run of them for each warp: those of one page share q.mu
    const int page_from = low / PAGE, page_to = (ring_start + PAGE - 1) / PAGE;
    const int tiles = max(page_to - page_from, 0) * TILES;
    const int block_each = (tiles + a.splits - 1) / a.splits;
    const int tile_to = min(tiles, (split + 1) * block_each);
    const int warp_each = (max(tile_to - split * block_each, 0) + WARPS - 1) / WARPS;
    int t = page_from * TILES + split * block_each + warp * warp_each;
    const int t_end = min(page_from * TILES + tile_to, t + warp_each);
    const int n_sinks = max(sinks_end - start, 0), ring_from = max(ring_start, start);
    const int n_exact = n_sinks + max(length - ring_from, 0);

    // the first tile is on its way while the queries are prepared
    const int *table = a.block_table + row * a.table_b;
    KeyTile kt;
    ValueTile vt;
    const u8 *record = a.pages;
    int next_page = 0;
    if (t < t_end) {
        record = a.pages + ((long long)table[t / TILES] * HKV + head) * RECORD;
        load_keys(kt, record, (t % TILES) * TB, r, c);
        load_values(vt, record, (t % TILES) * TB, r, c);
        if (t + 1 < t_end) next_page = table[(t + 1) / TILES];
    }

    if (threadIdx.x == 0) {
        tables[0] = KEY_LOW, tables[1] = KEY_HIGH, tables[2] = VALUE_LOW, tables[3] = VALUE_HIGH;
    }
    // --- queries: each warp rotates every fourth column; both frames go to shared memory ---
    for (int n = warp; n < COLS; n += WARPS) {
        int col = col0 + n, token = col / G;
        float x[D / 32];
        bool live = token < count && v.first_at + token >= 0;
        const u16 *q = (const u16 *)a.query + (long long)(begin + token) * a.query_n +
                       (long long)(head * G + col % G) * a.query_h;
#pragma unroll
        for (int k = 0; k < D / 32; k++) x[k] = live ? model_to_float(q[lane + 32 * k]) : 0.f;
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            ((u16 *)q_shared[1][n])[lane + 32 * k] = live ? q[lane + 32 * k] : (u16)0;
#if ROTATED
            x[k] *= a.signs[lane + 32 * k];
#endif
        }
#if ROTATED
        hadamard(x, lane);
#endif
        float top = 0.f;
#pragma unroll
        for (int k = 0; k < D / 32; k++) top = fmaxf(top, fabsf(x[k]));
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
        if (lane == 0) q_top[n] = top;
#pragma unroll
        for (int k = 0; k < D / 32; k++) merge_acc[0][n][lane + 32 * k] = x[k];
    }
    __syncthreads();
    // One factor for all columns: the largest component becomes 256.
    float top = 0.f;
#pragma unroll
    for (int n = 0; n < COLS; n++) top = fmaxf(top, q_top[n]);
    top = top > 0.f ? top * (1.f / 256.f) : 1.f;
    for (int n = warp; n < COLS; n += WARPS)
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            ((u16 *)q_shared[0][n])[lane + 32 * k] =
                (u16)pack_half(__fdividef(merge_acc[0][n][lane + 32 * k], top), 0.f);
    __syncthreads();
    // scores are dot * factor, in log2 units
    const float factor = top * (ROTATED ? ROOT : 1.f) * a.scale * 1.4426950408889634f;

    State st;
    clear(st);
    u32 q[NT][KX][4];
    load_queries(q, q_shared[0], r, c);
    {
        // Read back from shared memory: constants would be made again for every use.
        const volatile u32 *kept = tables;
        const u32 key_low = kept[0], key_high = kept[1];
#if VALUE_BITS == KEY_BITS
        const u32 value_low = key_low, value_high = key_high;
#else
        const u32 value_low = kept[2], value_high = kept[3];
#endif
        const float key_unit = KEY_UNIT * factor;
        const int last_seen = first_col_at;  // tokens up to here are seen by every column
        const int newest = v.first_at + (col0 + COLS - 1) / G;
        float bias[NT][2];
        bool new_page = true;
        for (; t < t_end; t++) {
            const bool more = t + 1 < t_end;
            const u8 *next = a.pages + ((long long)next_page * HKV + head) * RECORD;
            if (t + 2 < t_end) next_page = table[(t + 2) / TILES];
            if (new_page) mean_scores(bias, q, record, c, factor);
            new_page = (t + 1) % TILES == 0;
#if MEAN_BITS > 0
            if (new_page && more && lane < 2)
                asm volatile("prefetch.global.L1 [%0];" ::"l"(next + MEAN_AT + 128 * lane));
#endif

            float s[NT][2 * TB][4];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int g = 0; g < 2 * TB; g++)
#pragma unroll
                    for (int k = 0; k < 4; k++) s[n][g][k] = 0.f;
#pragma unroll
            for (int b = 0; b < TB; b++)
#pragma unroll
                for (int x = 0; x < KX; x++) {
                    u32 h[4][4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        levels<KEY_BITS>(key_word(kt, b, x, i, c), key_low, key_high, h[i]);
#pragma unroll
                    for (int k = 0; k < 2; k++)  // neighbours do not wait for each other
#pragma unroll
                        for (int i = 0; i < 4; i += 2)
#pragma unroll
                            for (int n = 0; n < NT; n++)
                                mma(s[n][2 * b + i / 2], h[i][k], h[i + 1][k], h[i][k + 2],
                                    h[i + 1][k + 2], q[n][x][2 * k], q[n][x][2 * k + 1]);
                }
            uint2 key_scale[TB];
#pragma unroll
            for (int b = 0; b < TB; b++) key_scale[b] = kt.scale[b];
            if (more) load_keys(kt, next, ((t + 1) % TILES) * TB, r, c);

            const int at0 = (t / TILES) * PAGE + (t % TILES) * 32 * TB;
            const bool whole = at0 >= v.low && at0 + 32 * TB <= v.high && !SOFTCAP &&
                               (!v.causal || at0 + 32 * TB - 1 <= last_seen) &&
                               (v.window <= 0 || at0 > newest - v.window);
            // scores above the peak so far: mostly negative, and then the peak stays
            float centered_base[NT][2], base[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    base[n][k] = base_of(st.peak[n][k]);
                    centered_base[n][k] = bias[n][k] + base[n][k];
                }
#pragma unroll
            for (int b = 0; b < TB; b++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 two = i < 2 ? key_scale[b].x : key_scale[b].y;
                    const float size =
                        fabsf(half_to_float((u16)(two >> (16 * (i & 1))))) * key_unit;
                    const bool centered = MEAN_BITS > 0 && (two & ((i & 1) ? 0x80000000u : 0x8000u));
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            float *e = &s[n][2 * b + i / 2][k + 2 * (i & 1)];
                            *e = *e * size + (centered ? centered_base[n][k] : base[n][k]);
                        }
                }
            if (!whole) mask_tile(v, st, s, vt, at0, col0, r, c);
            softmax_step<2 * TB>(st, s);

#pragma unroll
            for (int b = 0; b < TB; b++) {
                u32 p[NT][4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u16 raw = (u16)((i < 2 ? vt.scale[b].x : vt.scale[b].y) >> (16 * (i & 1)));
                    float size = half_to_float(raw);
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        float *e = s[n][2 * b + i / 2] + 2 * (i & 1);
                        p[n][i] = turn(pack_half(e[0] * size, e[1] * size));
                    }
                }
#pragma unroll
                for (int x = 0; x < VX; x++)
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        u32 h[4], g[4];
                        levels<VALUE_BITS>(value_word(vt, b, x, i, r), value_low, value_high, h);
                        levels<VALUE_BITS>(value_word(vt, b, x, i + 1, r), value_low, value_high, g);
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            mma(st.acc[n][x][0], h[0], h[1], g[0], g[1], p[n][i], p[n][i + 1]);
                            mma(st.acc[n][x][1], h[2], h[3], g[2], g[3], p[n][i], p[n][i + 1]);
                        }
                    }
            }
            if (more) load_values(vt, next, ((t + 1) % TILES) * TB, r, c);
            record = next;
        }
    }
    join(st, merge_acc, merge_peak, merge_sum, a, split, begin, count, head, col0, lane, warp, VALUE_UNIT);
    if (split >= a.exact_shares) return;

    // --- exact tokens, 16 at a time: sinks, then the ring; in their own frame, a share apart ---
    __syncthreads();
    clear(st);
    load_queries(q, q_shared[1], r, c);
    for (int group = split * WARPS + warp; 16 * group < n_exact; group += a.exact_shares * WARPS) {
        const int exact_from = 16 * group, exact_to = min(n_exact, exact_from + 16);
        const int owner = a.ring_rows[row];
        const u16 *keys[2];
        int at[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int e = exact_from + r + 8 * k;
            bool sink = e < n_sinks;
            at[k] = sink ? start + e : ring_from + e - n_sinks;
            long long place = sink ? (long long)owner * a.sinks + e
                                   : (long long)owner * a.ring + at[k] % a.ring;
            keys[k] = (sink ? a.sink_key : a.ring_key) + (place * HKV + head) * D;
            if (e >= exact_to) keys[k] = 0;
        }
        float s[NT][1][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) s[n][0][k] = 0.f;
        const uint4 zero = {0, 0, 0, 0};
#pragma unroll
        for (int x = 0; x < KX; x++) {
            uint4 h = keys[0] ? *(const uint4 *)(keys[0] + key_channel(x, c)) : zero;
            uint4 g = keys[1] ? *(const uint4 *)(keys[1] + key_channel(x, c)) : zero;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                mma_model(s[n][0], h.x, g.x, h.z, g.z, q[n][x][0], q[n][x][1]);
                mma_model(s[n][0], h.y, g.y, h.w, g.w, q[n][x][2], q[n][x][3]);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int col = col0 + 8 * n + 2 * c + (k & 1);
                float e = s[n][0][k] * a.scale * 1.4426950408889634f;
                e = seen(v, at[k >> 1], v.first_at + col / G, e, 0);
                s[n][0][k] = keys[k >> 1] ? e + base_of(st.peak[n][k & 1]) : NEG_INF;
            }
        softmax_step<1>(st, s);
        u32 p[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                p[n][k] = turn(pack_model(s[n][0][2 * k], s[n][0][2 * k + 1]));
        // tokens 2 c, 2 c + 1 and 8 more; channels of this lane's value slots
        const u16 *values[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int e = exact_from + 2 * c + (k & 1) + 8 * (k >> 1);
            bool sink = e < n_sinks;
            int position = sink ? start + e : ring_from + e - n_sinks;
            long long place = sink ? (long long)owner * a.sinks + e
                                   : (long long)owner * a.ring + position % a.ring;
            values[k] = (sink ? a.sink_value : a.ring_value) + (place * HKV + head) * D;
            if (e >= exact_to) values[k] = 0;
        }
#pragma unroll
        for (int x = 0; x < VX; x++) {
            uint2 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] = values[k] ? *(const uint2 *)(values[k] + value_channel(x, r))
                                 : make_uint2(0, 0);
            u32 h[4], g[4];  // channel y: tokens (2c, 2c+1), and the 8 later
#pragma unroll
            for (int y = 0; y < 4; y++) {
                u32 pick = (y & 1) ? 0x7632 : 0x5410;
                u32 w0 = y < 2 ? w[0].x : w[0].y, w1 = y < 2 ? w[1].x : w[1].y;
                u32 w2 = y < 2 ? w[2].x : w[2].y, w3 = y < 2 ? w[3].x : w[3].y;
                h[y] = __byte_perm(w0, w1, pick);
                g[y] = __byte_perm(w2, w3, pick);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                mma_model(st.acc[n][x][0], h[0], h[1], g[0], g[1], p[n][0], p[n][1]);
                mma_model(st.acc[n][x][1], h[2], h[3], g[2], g[3], p[n][0], p[n][1]);
            }
        }
    }

    join(st, merge_acc, merge_peak, merge_sum, a, a.splits + split, begin, count, head, col0, lane,
         warp, 1.f);
}

// A block a (query, head): weigh the shares, rotate those of the pages back, add the exact ones.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
merge(const float *partial, const float *partial_lse, const float *signs, const int *first,
      void *out, float *lse, long long out_n, long long out_h, long long total_rows, int batch,
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
#if ROTATED
    hadamard(pages, lane);
#endif
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    u16 *o = (u16 *)out + (row / HQ) * out_n + (row % HQ) * out_h;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        float x = pages[k];
#if ROTATED
        x *= ROOT * signs[lane + 32 * k];
#endif
        o[lane + 32 * k] = (u16)pack_model((x + exact[k]) * inverse, 0.f);
    }
    if (lane == 0) lse[row] = sum > 0.f ? (peak + log2f(sum)) * 0.6931471805599453f : NEG_INF;
}
