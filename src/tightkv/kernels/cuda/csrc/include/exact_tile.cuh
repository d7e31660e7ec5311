// Tokens that are kept exact, sinks and ring: scores and values in the model's own frame.
#pragma once

#include "decode_params.cuh"
#include "int8_mma.cuh"
#include "page_codes.cuh"

#define SLACK 4.f        // scores may be that much above the peak before it is raised: weights to 16

struct ExactAccumulators {
    float peak[COL_TILES][2], sum[COL_TILES][2];  // of columns 2 c, 2 c + 1; sum of this lane's tokens alone
    float acc[COL_TILES][VX][2][4];
};

__device__ __forceinline__ void clear(ExactAccumulators &st) {
#pragma unroll
    for (int n = 0; n < COL_TILES; n++) {
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
__device__ __forceinline__ void raise_peak(ExactAccumulators &st, float (&s)[COL_TILES][4], int n,
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
        s[n][k] -= up, s[n][k + 2] -= up;
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                st.acc[n][x][m][k] *= shrink;
                st.acc[n][x][m][k + 2] *= shrink;
            }
    }
}

// Scores of 16 tokens, in log2 units and relative to base_of(peak) -> weights.
__device__ __forceinline__ void softmax_step(ExactAccumulators &st, float (&s)[COL_TILES][4]) {
#pragma unroll
    for (int n = 0; n < COL_TILES; n++) {
        float top[2];
#pragma unroll
        for (int k = 0; k < 2; k++) top[k] = fmaxf(s[n][k], s[n][k + 2]);
        const bool fresh = fminf(st.peak[n][0], st.peak[n][1]) == LOWEST;
        if (__any_sync(~0u, fresh || fmaxf(top[0], top[1]) > SLACK))
            raise_peak(st, s, n, top);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            s[n][k] = exp2_fast(s[n][k]);
            s[n][k + 2] = exp2_fast(s[n][k + 2]);
            st.sum[n][k] += s[n][k] + s[n][k + 2];
        }
    }
}

// Where the exact tokens of a sequence are: sinks, then the ring.
struct Exact {
    const u16 *sink_key, *sink_value, *ring_key, *ring_value;  // of the sequence and head
    int sinks, count, start, ring_from, ring;
    int first_slot;  // of the ring, where the token at ring_from is
};

struct ExactTokens {  // on their way: rows of chunks of 8 channels, in an order that spreads them over banks
    uint4 key[EXACT_TOKENS][DP / 8], value[EXACT_TOKENS][DP / 8];
};

__device__ __forceinline__ int key_slot(int row, int chunk) {
    return chunk ^ ((chunk >> 3) & 1) ^ ((row & 1) << 1);
}

__device__ __forceinline__ int value_slot(int row, int chunk) { return chunk ^ ((row >> 1) & 1); }

// Those from the `from`-th on, to shared memory at `to`.
__device__ __forceinline__ void copy_exact(u32 to, const Exact &x, int from, int lane) {
    constexpr int chunks = D / 8;
#pragma unroll
    for (int i = 0; i < (EXACT_TOKENS * chunks + 31) / 32; i++) {
        const int row = (lane + 32 * i) / chunks, chunk = (lane + 32 * i) % chunks, e = from + row;
        if (row >= EXACT_TOKENS || e >= x.count) continue;
        const bool sink = e < x.sinks;
        const int slot = x.first_slot + e - x.sinks;
        const long long at = (long long)(sink ? e : slot < x.ring ? slot : slot - x.ring) * HKV * D + 8 * chunk;
        const u32 key = to + 16 * (row * (DP / 8) + key_slot(row, chunk));
        const u32 value = to + 16 * ((EXACT_TOKENS + row) * (DP / 8) + value_slot(row, chunk));
        cp_async(key, (const u8 *)((sink ? x.sink_key : x.ring_key) + at));
        cp_async(value, (const u8 *)((sink ? x.sink_value : x.ring_value) + at));
    }
}

struct ExactTile {  // of them, as a lane multiplies them
    int at[2];
    bool key_there[2];
    uint4 key[2][KX];
    uint2 value[VX][4];
};

__device__ __forceinline__ void load(ExactTile &y, const ExactTokens &tokens, const Exact &x, int from, int r, int c) {
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int row = r + 8 * k, e = from + row;
        y.at[k] = e < x.sinks ? x.start + e : x.ring_from + e - x.sinks;
        y.key_there[k] = 8 * k < EXACT_TOKENS && e < x.count;
#pragma unroll
        for (int i = 0; i < KX; i++) {
            const int channel = key_channel(i, c);
            y.key[k][i] = y.key_there[k] && (D == DP || channel < D) ? tokens.key[row][key_slot(row, channel / 8)] : zero;
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {  // tokens 2 c, 2 c + 1 and 8 more
        const int row = 2 * c + (k & 1) + 8 * (k >> 1);
        const bool there = 8 * (k >> 1) < EXACT_TOKENS && from + row < x.count;
#pragma unroll
        for (int i = 0; i < VX; i++) {
            const int channel = value_channel(i, r);
            const uint4 *chunk = &tokens.value[row][value_slot(row, channel / 8)];
            y.value[i][k] = there && (D == DP || channel < D) ? ((const uint2 *)chunk)[channel / 4 & 1] : make_uint2(0, 0);
        }
    }
}

// In their own frame, not rotated.
__device__ __forceinline__ void attend_exact_tile(ExactAccumulators &st,
                                                  const u32 (&q)[COL_TILES][KX][4],
                                                  const ExactTile &y, const MaskBounds &v, int col0,
                                                  int c, float scale) {
    float s[COL_TILES][4];
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][k] = 0.f;
#pragma unroll
    for (int i = 0; i < KX; i++)
#pragma unroll
        for (int n = 0; n < COL_TILES; n++) {
            const uint4 h = y.key[0][i], g = y.key[1][i];
            mma_model(s[n], h.x, g.x, h.z, g.z, q[n][i][0], q[n][i][1]);
            mma_model(s[n], h.y, g.y, h.w, g.w, q[n][i][2], q[n][i][3]);
        }
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int col = col0 + 8 * n + 2 * c + (k & 1);
            const float e = masked_score(v, y.at[k >> 1], v.first_at + col / G,
                                 s[n][k] * scale * 1.4426950408889634f, 0);
            s[n][k] = y.key_there[k >> 1] ? e + base_of(st.peak[n][k & 1]) : NEG_INF;
        }
    softmax_step(st, s);
    u32 p[COL_TILES][2];
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            p[n][k] = transpose_8x8(pack_model2(s[n][2 * k], s[n][2 * k + 1]));
#pragma unroll
    for (int i = 0; i < VX; i++) {
        const uint2(&w)[4] = y.value[i];
        u32 a[4], b[4];  // channel: tokens (2c, 2c+1), and the 8 later
#pragma unroll
        for (int d = 0; d < 4; d++) {
            const u32 pick = (d & 1) ? 0x7632 : 0x5410;
            a[d] = d < 2 ? __byte_perm(w[0].x, w[1].x, pick) : __byte_perm(w[0].y, w[1].y, pick);
            b[d] = d < 2 ? __byte_perm(w[2].x, w[3].x, pick) : __byte_perm(w[2].y, w[3].y, pick);
        }
#pragma unroll
        for (int n = 0; n < COL_TILES; n++) {
            mma_model(st.acc[n][i][0], a[0], a[1], b[0], b[1], p[n][0], p[n][1]);
            mma_model(st.acc[n][i][1], a[2], a[3], b[2], b[3], p[n][0], p[n][1]);
        }
    }
}
