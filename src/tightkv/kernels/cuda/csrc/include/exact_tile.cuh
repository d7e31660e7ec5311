// Tokens that are kept exact, sinks and ring: scores and values in the model's own frame.
#pragma once

#include "decode_params.cuh"
#include "int8_mma.cuh"
#include "page_codes.cuh"

// Where a kernel has many instructions, fetching them takes longer than the loops over a few exact tokens.
constexpr int exact_at_once = COLS > 8 || DP > 128 ? 1 : 64;  // turns of a loop that are written out
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

struct ExactTokens {  // on their way; rows are padded, so that they begin in different banks
    u16 key[EXACT_TOKENS][DP + 8], value[EXACT_TOKENS][DP + 8];
};

// The keys or the values of the e-th, or of the last where there are fewer.
__device__ __forceinline__ const u8 *locate_exact(const Exact &x, int e, bool value) {
    e = min(e, x.count - 1);
    const bool sink = e < x.sinks;
    const int slot = x.first_slot + e - x.sinks;
    const u16 *of = value ? (sink ? x.sink_value : x.ring_value) : sink ? x.sink_key : x.ring_key;
    return (const u8 *)(of + (long long)(sink ? e : slot < x.ring ? slot : slot - x.ring) * HKV * D);
}

// Those from the `from`-th on, to shared memory at `to`: rows of keys, then of values. A lane finds one of them.
__device__ __forceinline__ void copy_exact(u32 to, const Exact &x, int from, int lane) {
    constexpr int chunks = DP / 8 < 32 ? DP / 8 : 32;  // of 8 channels, that lanes copy at once
    const int first = lane % chunks;
    const u64 own = (u64)locate_exact(x, from + lane % EXACT_TOKENS, lane / EXACT_TOKENS % 2);
#pragma unroll exact_at_once
    for (int i = 0; i < 2 * EXACT_TOKENS; i += 32 / chunks) {
        const int row = i + lane / chunks;
        const u8 *at = (const u8 *)__shfl_sync(~0u, own, row);
#pragma unroll
        for (int chunk = first; chunk - first < DP / 8; chunk += chunks)
            if (D == DP || 8 * chunk < D) cp_async(to + 2 * (DP + 8) * row + 16 * chunk, at + 16 * chunk);
    }
}

// Scores and values of exact tokens from the `from`-th on, in their own frame, not rotated.
__device__ __forceinline__ void attend_exact(ExactAccumulators &st, const ExactTokens &tokens,
                                             const u32 (*query)[DP / 2 + 4], const Exact &x, int from,
                                             const MaskBounds &v, int col0, int r, int c, float scale) {
    const uint4 zero = {0, 0, 0, 0};
    float s[COL_TILES][4];
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][k] = 0.f;
#pragma unroll exact_at_once
    for (int i = 0; i < KX; i++) {
        const int channel = key_channel(i, c);
        const bool there = D == DP || channel < D;
        const uint4 h = there ? *(const uint4 *)(tokens.key[r] + channel) : zero;
        const uint4 g = there && EXACT_TOKENS > 8 ? *(const uint4 *)(tokens.key[(r + 8) % EXACT_TOKENS] + channel) : zero;
#pragma unroll
        for (int n = 0; n < COL_TILES; n++) {
            const uint4 q = *(const uint4 *)(query[8 * n + (8 * n + 8 <= COLS ? r : r & 3)] + channel / 2);
            mma_model(s[n], h.x, g.x, h.z, g.z, q.x, q.z);
            mma_model(s[n], h.y, g.y, h.w, g.w, q.y, q.w);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int row = r + 8 * (k >> 1), e = from + row;
        const int at = e < x.sinks ? x.start + e : x.ring_from + e - x.sinks;
        const bool there = row < EXACT_TOKENS && e < x.count;
#pragma unroll
        for (int n = 0; n < COL_TILES; n++) {
            const int col = col0 + 8 * n + 2 * c + (k & 1);
            const float score = masked_score(v, at, v.first_at + col / G, s[n][k] * scale * 1.4426950408889634f);
            s[n][k] = there ? score + base_of(st.peak[n][k & 1]) : NEG_INF;
        }
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
        uint2 w[4];  // tokens 2 c, 2 c + 1 and 8 more
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = 2 * c + (k & 1) + 8 * (k >> 1);
            w[k] = 8 * (k >> 1) < EXACT_TOKENS ? *(const uint2 *)(tokens.value[row % EXACT_TOKENS] + value_channel(i, r))
                                               : make_uint2(0, 0);
        }
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
