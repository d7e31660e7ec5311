// Scores and values of a ring of codes.
#pragma once

#include "queries.cuh"
#include "ring_tile.cuh"
#include "smem_pipeline.cuh"
#include "tile_softmax.cuh"

// Products of the keys of tokens r and r + 8: of their bytes and of their nibbles. Where there are more slots than
// one sum can have, `first` has the bytes' before.
__device__ __forceinline__ void multiply_ring_keys(Int8Sums &high, Int8Sums &low, float (&first)[LANE_COLS][2],
                                                   const RingTokens &tokens, const QueryOperands &q, int r, int c) {
    const int zero[2] = {ZERO_BITS, ZERO_BITS};
    const u32 nibble = 0x0f0f0f0f;
    const u8 *one = tokens.key[r], *two = tokens.key[(r + 8) % EXACT_TOKENS];
#pragma unroll keys_at_once
    for (int x = 0; x < KX; x++) {
        if (KX > SUM_SLOTS && x == SUM_SLOTS)
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) first[j][0] = high.column(j, 0), first[j][1] = high.column(j, 1);
        const int at = D == DP ? key_channel(x, c) : min(key_channel(x, c), D - 8);  // queries have zeros beyond
        const uint2 h = *(const uint2 *)(one + at), g = *(const uint2 *)(two + at);
        const u32 v = *(const u32 *)(one + D + at / 2), w = *(const u32 *)(two + D + at / 2);
#pragma unroll
        for (int n = 0; n < LANE_COLS; n++) {
            const uint2 operand = q(n, x);
            mma_accumulate<false, false>(high.of[n], h.x, g.x, h.y, g.y, operand, zero, x % SUM_SLOTS == 0);
            mma_accumulate<false, false>(low.of[n], v & nibble, w & nibble, v >> 4 & nibble, w >> 4 & nibble, operand,
                                         zero, x == 0);
        }
    }
}

// Words of four tokens' channels -> words of four channels' tokens.
__device__ __forceinline__ void transpose_4x4(u32 (&w)[4]) {
    const u32 a = prmt(w[0], w[1], 0x5140), b = prmt(w[2], w[3], 0x5140);
    const u32 x = prmt(w[0], w[1], 0x7362), y = prmt(w[2], w[3], 0x7362);
    w[0] = prmt(a, b, 0x5410), w[1] = prmt(a, b, 0x7632), w[2] = prmt(x, y, 0x5410), w[3] = prmt(x, y, 0x7632);
}

// Accumulators plus the values of 16 tokens times `weights`.
__device__ __forceinline__ void add_ring_values(Accumulators &f, const RingTokens &tokens,
                                                const u32 (&weights)[1][LANE_COLS][2], const float (&scale)[LANE_COLS],
                                                int r, int c) {
    const int zero[2] = {ZERO_BITS, ZERO_BITS};
#pragma unroll
    for (int x = 0; x < VX; x++) {
        const int channel = D == DP ? value_channel(x, r) : min(value_channel(x, r), D - 4);  // nobody reads the others
        u32 w[4];
#pragma unroll
        for (int k = 0; k < 4; k++)  // in the weights' order
            w[k] = *(const u32 *)(tokens.value[(2 * c + (k & 1) + 8 * (k >> 1)) % EXACT_TOKENS] + channel);
        transpose_4x4(w);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            Int8Sums sums;
#pragma unroll
            for (int n = 0; n < LANE_COLS; n++)
                mma_accumulate<false, true>(sums.of[n], w[2 * m], w[2 * m + 1], 0, 0, make_uint2(weights[0][n][0], 0),
                                            zero, true);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < LANE_COLS; j++) f.acc[x][m][half][j] += sums.column(j, half) * scale[j];
        }
    }
}

// A group of tokens, the first of which is at position `from`; it is `group_at` tokens after the ring's first.
// `unit` makes log2 units of products.
__device__ __forceinline__ void attend_ring(Accumulators &f, const RingTokens &tokens, const QueryOperands &q,
                                            const Ring &ring, int group_at, const MaskBounds &v, int col0, float unit,
                                            int r, int c) {
    Int8Sums high, low;
    float first[LANE_COLS][2];
    multiply_ring_keys(high, low, first, tokens, q, r, c);
    const u32 one = tokens.scales[r], two = tokens.scales[(r + 8) % EXACT_TOKENS];
    const uint2 value_scale[1] = {make_uint2(prmt(one, EXACT_TOKENS > 8 ? two : 0, 0x7632), 0)};
    const float largest_scale = half_to_float((u16)warp_max(max((int)(one >> 16), (int)(two >> 16))));
    float s[LANE_COLS][2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int row = r + 8 * k, at = ring.from + group_at + row;
        const bool there = row < EXACT_TOKENS && group_at + row < ring.count;
        const float key_scale = half_to_float((u16)(k ? two : one));
#pragma unroll
        for (int j = 0; j < LANE_COLS; j++) {
            const float upper = high.column(j, k) + (KX > SUM_SLOTS ? first[j][k] : 0.f);
            const float sum = fmaf(upper, 16.f, low.column(j, k)) * key_scale * (SOFTCAP ? unit : 1.f);
            const int query_at = v.first_at + (col0 + lane_column(j, c)) / G;
            s[j][k] = there ? masked_score(v, at, query_at, sum) : NEG_INF;
        }
    }
    u32 weights[1][LANE_COLS][2];
    float scale[LANE_COLS];
    online_softmax(f, s, SOFTCAP ? 1.f : unit, value_scale, largest_scale, weights, scale);
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) scale[j] *= 1.f / VALUE_UNIT;  // which the epilogue multiplies with
    add_ring_values(f, tokens, weights, scale, r, c);
}
