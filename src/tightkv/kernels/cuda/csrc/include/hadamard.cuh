// The rotation of a vector that a warp holds: a fast transform for powers of two, else a matrix.
#pragma once

#define HADAMARD (ROTATED == 1)
#define DENSE (ROTATED == 2)
#define LANE_CHANNELS ((D + 31) / 32)  // lane + 32 k, where there is such a channel:
#define THERE(k) (D % 32 == 0 ? (k) < D / 32 : lane + 32 * (k) < D)

#if HADAMARD
// Several x [D] of a warp's lanes, lane l holding channels l + 32 k, times the unscaled Hadamard matrix.
template <int COUNT>
__device__ __forceinline__ void hadamard(float (&x)[COUNT][D / 32], int lane) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int k = 0; k < D / 32; k++) {
                float other = __shfl_xor_sync(~0u, x[i][k], bit);
                x[i][k] = (lane & bit) ? other - x[i][k] : x[i][k] + other;
            }
#pragma unroll
    for (int bit = 1; bit < D / 32; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int k = 0; k < D / 32; k++)
                if (!(k & bit)) {
                    float a = x[i][k], b = x[i][k + bit];
                    x[i][k] = a + b;
                    x[i][k + bit] = a - b;
                }
}

__device__ __forceinline__ void hadamard(float (&x)[D / 32], int lane) {
    hadamard((float(&)[1][D / 32])x, lane);
}
#endif

#if DENSE
// x [D], held alike, times a matrix [D, D]; in double precision it is rounded as math.rotation does.
template <class Number, int K>
__device__ __forceinline__ void multiply(float (&x)[K], const float *matrix, int lane) {
    Number y[LANE_CHANNELS];
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) y[k] = 0;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++)
#pragma unroll 16
        for (int l = 0; l < 32 && 32 * i + l < D; l++) {
            const Number one = __shfl_sync(~0u, x[i], l);
            const float *row = matrix + (32 * i + l) * D + lane;
#pragma unroll
            for (int k = 0; k < LANE_CHANNELS; k++)
                if (THERE(k)) y[k] = fma(one, (Number)row[32 * k], y[k]);
        }
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) x[k] = (float)y[k];
}
#endif
