// Numbers of the model's dtype.
#pragma once

#include "ptx.cuh"

#define NEG_INF (__int_as_float(0xff800000))

__device__ __forceinline__ u32 pack_model2(float low, float high) {
    return BF16 ? pack_bf16x2(low, high) : pack_half2(low, high);
}

__device__ __forceinline__ float model_to_float(u16 h) {
    return BF16 ? __int_as_float((u32)h << 16) : half_to_float(h);
}

// A number of a token, relative to that of its head's center where there is one.
__device__ __forceinline__ u16 relative(u16 x, const u16 *center, int d) {
    return center ? (u16)pack_model2(model_to_float(x) - model_to_float(center[d]), 0.f) : x;
}

__device__ __forceinline__ void mma_model(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (BF16)
        mma_bf16(c, a0, a1, a2, a3, b0, b1);
    else
        mma_f16(c, a0, a1, a2, a3, b0, b1);
}
