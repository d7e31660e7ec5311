// What the means of pages add to scores: q.mu, once a page.

// Four signed bytes -> halves: as the last byte of 1024 + (byte + 128), which is then taken off.
__device__ __forceinline__ void bytes_to_halves(u32 w, u32 &low, u32 &high) {
    w ^= 0x80808080u;
    low = add_halves(permute_bytes(w, 0x64646464u, 0x4140), 0xe480e480u);
    high = add_halves(permute_bytes(w, 0x64646464u, 0x4342), 0xe480e480u);
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
