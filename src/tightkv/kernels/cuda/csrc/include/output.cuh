// From accumulators to memory: the state of a split, or the output.
#pragma once

#include "decode_params.cuh"

// Where in a row of a WarpState a channel lies: the lanes of a store then have banks of their own.
__device__ __forceinline__ int state_slot(int channel) {
    int r, x;
    if (DP == 64) {
        r = ((channel >> 4) & 3) | (channel & 4);
        x = (channel >> 3) & 1;
    } else {
        r = (channel >> 4) & 7;
        x = (channel >> 7) + DP / 128 * ((channel >> 2) & 3);
    }
    return 8 * (4 * x + (channel & 3)) + r;
}

// A lane's neighbouring numbers, DP / 32 of them: from 2 to 16.
__device__ __forceinline__ void load_vector(float (&x)[DP / 32], const float *from) {
    if (DP == 64) {
        const uint2 two = *(const uint2 *)from;
        x[0] = __int_as_float(two.x), x[1] = __int_as_float(two.y);
        return;
    }
#pragma unroll
    for (int k = 0; k < DP / 32; k += 4) {
        const uint4 four = *(const uint4 *)(from + k);
        x[k] = __int_as_float(four.x), x[(k + 1) % (DP / 32)] = __int_as_float(four.y);
        x[(k + 2) % (DP / 32)] = __int_as_float(four.z), x[(k + 3) % (DP / 32)] = __int_as_float(four.w);
    }
}

__device__ __forceinline__ void store_vector(float *to, const float (&x)[DP / 32]) {
    if (DP == 64) {
        *(uint2 *)to = make_uint2(__float_as_int(x[0]), __float_as_int(x[1]));
        return;
    }
#pragma unroll
    for (int k = 0; k < DP / 32; k += 4)
        *(uint4 *)(to + k) = {(u32)__float_as_int(x[k]), (u32)__float_as_int(x[(k + 1) % (DP / 32)]),
                              (u32)__float_as_int(x[(k + 2) % (DP / 32)]),
                              (u32)__float_as_int(x[(k + 3) % (DP / 32)])};
}

// Of as many lanes, to each of them; several numbers at once.
template <int LANES, int COUNT>
__device__ __forceinline__ void most_of(float (&x)[COUNT]) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = fmaxf(x[i], __shfl_xor_sync(~0u, x[i], bit));
}

template <int LANES, int COUNT>
__device__ __forceinline__ void sum_of(float (&x)[COUNT]) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] += __shfl_xor_sync(~0u, x[i], bit);
}

// A channel of the output; `center` [HKV, D] (or null) is what values are relative to.
__device__ __forceinline__ void write_channel(u16 *out, const u16 *center, int head, int channel, float x) {
    const float o = center ? model_to_float(center[head * D + channel]) : 0.f;
    out[channel] = (u16)pack_model2(x + o, 0.f);
}

__device__ __forceinline__ void write_lse(float *lse, float peak, float sum) {
    *lse = sum > 0.f ? (peak + log2_fast(sum)) * 0.6931471805599453f : NEG_INF;
}

// Queries after those of the last sequence, which no block and no merge answers.
__device__ __forceinline__ void clear_unused_queries(const DecodeParams &a) {
    if (blockIdx.x || blockIdx.y || blockIdx.z) return;
    for (long long n = a.cu_seqlens[a.batch]; n < a.total_rows; n++)
        for (int i = threadIdx.x; i < HQ * D; i += 32 * WARPS) {
            a.out[n * a.out_n + i / D * a.out_h + i % D] = 0;
            if (i % D == 0) a.lse[n * HQ + i / D] = NEG_INF;
        }
}
