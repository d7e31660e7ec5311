// The rotation of a vector that a warp holds.
#pragma once

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
