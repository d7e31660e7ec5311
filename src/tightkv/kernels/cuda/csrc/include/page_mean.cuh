// What the mean of a page adds to scores: q.mu, once a page.
#pragma once

#include "queries.cuh"
#include "smem_pipeline.cuh"

#if MEAN_BITS == 8
// Of two pages: one in the upper rows of an A operand, one in the lower. Words are loaded one by one, each
// to its place; pairs would have to be moved there.
__device__ __forceinline__ void mean_scores(float (&one)[LANE_COLS], float (&two)[LANE_COLS],
                                            const QueryOperands &q, const uint4 *mean1,
                                            const uint4 *mean2, int c, float factor) {
    const volatile u32 *m = (const volatile u32 *)mean1, *w = (const volatile u32 *)mean2;
    const int zero[4] = {ZERO_BITS, ZERO_BITS, ZERO_BITS, ZERO_BITS};
    Int8Sums sums;
    float first[LANE_COLS][2];  // of the slots before, where there are more than one sum can have
#pragma unroll
    for (int x = 0; x < KX; x++) {
        if (x == SUM_SLOTS)
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) first[j][0] = sums.column(j, 0), first[j][1] = sums.column(j, 1);
        const int at = key_channel(x, c) / 4;
        const bool there = D == DP || 4 * at < D;
        const u32 a[4] = {there ? m[at] : 0, there ? w[at] : 0, there ? m[at + 1] : 0, there ? w[at + 1] : 0};
#pragma unroll
        for (int n = 0; n < LANE_COLS; n++)
            mma_accumulate<false, false>(sums.of[n], a[0], a[1], a[2], a[3], q(n, x), zero, x % SUM_SLOTS == 0);
    }
    const float unit1 = half_to_float(*(const u16 *)(mean1 + D / 16)) * factor;
    const float unit2 = half_to_float(*(const u16 *)(mean2 + D / 16)) * factor;
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++)
        one[j] = (sums.column(j, 0) + (KX > SUM_SLOTS ? first[j][0] : 0.f)) * unit1,
        two[j] = (sums.column(j, 1) + (KX > SUM_SLOTS ? first[j][1] : 0.f)) * unit2;
}
#endif

#if MEAN_BITS == 16
// Of one page, in all rows. Queries as halves, from shared memory. Registers are operands as they were
// loaded: pairs of channels 0 and 2 of each eight in the upper rows, 1 and 3 in the lower ones, so each
// product is half of use.
__device__ __forceinline__ void mean_scores(float (&scores)[LANE_COLS],
                                            const u32 (*queries)[DP / 2 + 4], const uint4 *mean,
                                            int r, int c, float factor) {
    float upper[COL_TILES][4], lower[COL_TILES][4];
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) upper[n][k] = lower[n][k] = 0.f;
#pragma unroll means_at_once
    for (int x = 0; x < KX; x++) {
        const int at = key_channel(x, c);
        const uint4 m = D == DP || at < D ? mean[at / 8] : uint4{0, 0, 0, 0};
#pragma unroll
        for (int n = 0; n < COL_TILES; n++) {
            const u32 *row = queries[tile_column(n, r)];
            const uint4 q = *(const uint4 *)(row + at / 2);  // pairs 0 2 1 3
            mma_f16(upper[n], m.x, m.y, m.z, m.w, q.x, q.y);
            mma_f16(lower[n], m.x, m.y, m.z, m.w, q.z, q.w);
        }
    }
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++)
        scores[j] = (upper[j >> 1][j & 1] + lower[j >> 1][2 + (j & 1)]) * factor;
}
#endif

#if MEAN_BITS > 0
// Of all pages of a tile; `queries` are halves in shared memory.
template <class Tile>
__device__ __forceinline__ void mean_scores_of_tile(float (&bias)[SPAN][LANE_COLS], const Tile &tile,
                                                    const QueryOperands &q, const u32 (*queries)[DP / 2 + 4], int r,
                                                    int c) {
#pragma unroll
    for (int p = 0; p < SPAN; p += MEAN_BITS == 16 ? 1 : 2)
#if MEAN_BITS == 16
        mean_scores(bias[p], queries, tile.page[p].mean, r, c, 1.f / (KEY_UNIT * BYTE_UNIT));
#else
        mean_scores(bias[p], bias[min(p + 1, SPAN - 1)], q, tile.page[p].mean, tile.page[min(p + 1, SPAN - 1)].mean, c,
                    1.f / KEY_UNIT);
#endif
}
#endif
