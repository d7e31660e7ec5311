// What the means of pages add to scores: q.mu, once a page.
//
// Of two pages at a time: one in the upper rows of an A operand, one in the lower.

#if MEAN_BITS == 8
__device__ __forceinline__ void mean_scores(float (&one)[LANE_COLS], float (&two)[LANE_COLS],
                                            const u32 (&q)[SLOT_TILES][KX][2], const uint4 *mean1,
                                            const uint4 *mean2, int c, float factor) {
    Sums<8> sums;
#pragma unroll
    for (int x = 0; x < KX; x++) {
        const uint2 m = ((const uint2 *)mean1)[key_channel(x, c) / 8];
        const uint2 w = ((const uint2 *)mean2)[key_channel(x, c) / 8];
#pragma unroll
        for (int n = 0; n < SLOT_TILES; n++)
            multiply<false, false>(sums.all[n], m.x, w.x, m.y, w.y, q[n][x], x == 0);
    }
    const float unit1 = half_to_float(*(const u16 *)(mean1 + D / 16)) * factor;
    const float unit2 = half_to_float(*(const u16 *)(mean2 + D / 16)) * factor;
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++)
        one[j] = sums.column(j, 0) * unit1, two[j] = sums.column(j, 1) * unit2;
}
#endif

#if MEAN_BITS == 16
// Queries as halves, from shared memory; where four columns are all, each of them twice.
__device__ __forceinline__ void mean_scores(float (&one)[LANE_COLS], float (&two)[LANE_COLS],
                                            const u32 (*queries)[D / 2 + 4], const uint4 *mean1,
                                            const uint4 *mean2, int r, int c, float factor) {
    float s[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][k] = 0.f;
#pragma unroll
    for (int x = 0; x < KX; x++) {
        const uint4 m = mean1[key_channel(x, c) / 8], w = mean2[key_channel(x, c) / 8];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const u32 *row = queries[FEW ? r >> 1 : 8 * n + r];
            const uint4 q = *(const uint4 *)(row + key_channel(x, c) / 2);
            mma(s[n], m.x, w.x, m.z, w.z, q.x, q.z);
            mma(s[n], m.y, w.y, m.w, w.w, q.y, q.w);
        }
    }
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++)
        one[j] = s[j >> 1][j & 1] * factor, two[j] = s[j >> 1][2 + (j & 1)] * factor;
}
#endif
