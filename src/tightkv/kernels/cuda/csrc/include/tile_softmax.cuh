// The softmax over tiles of pages, and their weights as bytes.
//
// Weights are relative to the highest score of the tile and to its largest scale, so that 16 bits have
// them: what is lost is far below another token of its tile, not below the peak. Sums of tiles are
// floats.
#pragma once

#include "decode_params.cuh"
#include "int8_mma.cuh"
#include "page_codes.cuh"

#define TILE_SLACK 16.f   // a tile's scores may be that much above the peak before it is raised
// Below 65,536 by as much as scores are rounded: right up to scores of 2**19.
#define MOST_WEIGHT 61440.f
#define WHOLE 8388608.f   // its last place is one

struct Accumulators {
    float peak[LANE_COLS], sum[LANE_COLS];  // sum of this lane's tokens alone
    float acc[VX][2][2][LANE_COLS];         // channel pairs 0 1 and 2 3, rows
};

__device__ __forceinline__ void clear(Accumulators &f) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        f.peak[j] = LOWEST, f.sum[j] = 0.f;
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++) f.acc[x][m][0][j] = f.acc[x][m][1][j] = 0.f;
    }
}

// The i-th of four halves: of token r + 8 i.
__device__ __forceinline__ float half_at(uint2 four, int i) {
    return half_to_float((u16)((i < 2 ? four.x : four.y) >> (16 * (i & 1))));
}

// Tiles in [from, to) are wholly seen by every column; the others are at the edge.
struct WholeTiles {
    int from, to;
};

__device__ __forceinline__ WholeTiles whole_tiles(const MaskBounds &v, int col0, int tile_end) {
    const int newest = v.first_at + (col0 + COLS - 1) / G;
    int seen_from = v.low, seen_to = v.high;
    if (v.window > 0) seen_from = max(seen_from, newest - v.window + 1);
    if (v.causal) seen_to = min(seen_to, v.first_at + col0 / G + 1);
    return {SOFTCAP ? tile_end : (seen_from + 32 * TB - 1) / (32 * TB), seen_to / (32 * TB)};
}

// A tile at the edge of what is seen: hide scales that are not this sequence's or were never written
// (they may be NaN, or large), and scores.
__device__ __forceinline__ void mask_scales(const MaskBounds &v, uint2 (&scale)[TB], int at0, int r) {
#pragma unroll
    for (int t = 0; t < 4 * TB; t++) {
        const int at = at0 + 8 * t + r;
        u32 &two = t % 4 < 2 ? scale[t / 4].x : scale[t / 4].y;
        if (at < v.low || at >= v.high) two &= (t & 1) ? 0x0000ffffu : 0xffff0000u;
    }
}

__device__ __forceinline__ void mask_scores(const MaskBounds &v, float (&s)[LANE_COLS][4 * TB], int at0,
                                            int col0, int r, int c) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        const int query_at = v.first_at + (col0 + lane_column(j, c)) / G;
        const int from = (v.window > 0 ? max(v.low, query_at - v.window + 1) : v.low) - at0 - r;
        const int to = (v.causal ? min(v.high, query_at + 1) : v.high) - at0 - r;
#pragma unroll
        for (int t = 0; t < 4 * TB; t++) s[j][t] = 8 * t >= from && 8 * t < to ? capped(v, s[j][t]) : NEG_INF;
    }
}

// The largest of a tile's scales.
__device__ __forceinline__ float max_scale(const uint2 (&scale)[TB]) {
    u32 most = 0;
#pragma unroll
    for (int b = 0; b < TB; b++) most = max_half2(most, max_half2(scale[b].x, scale[b].y));
    return half_to_float((u16)warp_max(max((int)(most & 0xffff), (int)(most >> 16))));
}

// The highest scores of a tile in log2 units, of which `unit` makes them. A lane has K of its tokens.
template <int K>
__device__ __forceinline__ void tile_tops(const float (&s)[LANE_COLS][K], float unit,
                                          float (&top)[LANE_COLS]) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        float t = s[j][0];
#pragma unroll
        for (int k = 1; k < K; k++) t = fmaxf(t, s[j][k]);
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 4));
        t = fmaxf(t, __shfl_xor_sync(~0u, t, 8));
        top[j] = fmaxf(t, __shfl_xor_sync(~0u, t, 16)) * unit;
    }
}

// Raise the peaks where a tile is far above; returns by `scale` what its weights are to be multiplied with.
// It comes before the weights: what follows has no branch, and values are looked up meanwhile.
__device__ __forceinline__ void raise_peaks(Accumulators &f, const float (&top)[LANE_COLS],
                                            float (&scale)[LANE_COLS]) {
    bool raise = false;
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) raise = raise || top[j] > f.peak[j] + TILE_SLACK;
    if (__any_sync(~0u, raise))
#pragma unroll
        for (int j = 0; j < LANE_COLS; j++) {
            const float peak = fmaxf(f.peak[j], top[j]), shrink = exp2_fast(f.peak[j] - peak);
            f.peak[j] = peak, f.sum[j] *= shrink;
#pragma unroll
            for (int x = 0; x < VX; x++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    f.acc[x][m][0][j] *= shrink, f.acc[x][m][1][j] *= shrink;
        }
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) scale[j] = exp2_fast(top[j] - f.peak[j]);
}

// A tile's scores, of which `unit` makes log2 units -> weights times the scales of values, as B operands
// of 32 tokens, 1 / `weight_unit` to one. `sum` is of the weights alone. Both are relative to `top`.
template <int K, int BLOCKS>
__device__ __forceinline__ void softmax_weights(const float (&s)[LANE_COLS][K], float unit,
                                      const uint2 (&value_scale)[BLOCKS], float weight_unit,
                                      const float (&top)[LANE_COLS], u32 (&weights)[BLOCKS][LANE_COLS][2],
                                      float (&sum)[LANE_COLS]) {
    const float parts = -log2_fast(weight_unit);
    u32 whole[LANE_COLS][K];
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        const float base = top[j] == NEG_INF ? 0.f : top[j];
        sum[j] = 0.f;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const float e = exp2_fast(fmaf(s[j][k], unit, parts - base));
            sum[j] += e;
            whole[j][k] = __float_as_int(fmaf(e, half_at(value_scale[k / 4], k % 4), WHOLE));
        }
        sum[j] *= weight_unit;
    }
    // Tokens r and r + 8 of a lane: hi, hi, lo, lo; turned, tokens 2 c and 2 c + 1 of a column.
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int h = 0; 4 * b + 2 * h < K && h < 2; h++)
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) {
                const u32 bytes = prmt(whole[j][4 * b + 2 * h], whole[j][4 * b + 2 * h + 1], 0x4051);
                const u32 turned = transpose_8x8(bytes);
                weights[b][j][h] = prmt(turned, turned, 0x3120);  // in the values' order
            }
}

// One step of the softmax: scores of a tile -> its weights as B operands, and `scale`, which brings their products
// with values to the frame of the accumulators. `largest_scale` is that of the tile's values.
template <int K, int BLOCKS>
__device__ __forceinline__ void online_softmax(Accumulators &f, const float (&s)[LANE_COLS][K], float unit,
                                               const uint2 (&value_scale)[BLOCKS], float largest_scale,
                                               u32 (&weights)[BLOCKS][LANE_COLS][2], float (&scale)[LANE_COLS]) {
    const float weight_unit = largest_scale > 0.f ? largest_scale * (1.f / MOST_WEIGHT) : 1.f;
    float top[LANE_COLS], sum[LANE_COLS];
    tile_tops(s, unit, top);
    raise_peaks(f, top, scale);
    softmax_weights(s, unit, value_scale, weight_unit, top, weights, sum);
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        f.sum[j] += sum[j] * scale[j];
        scale[j] *= weight_unit;
    }
}
