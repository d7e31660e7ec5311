// From accumulators to memory: the state of a split, or the output.
#pragma once

#include "decode_params.cuh"
#include "hadamard.cuh"

// Where in a row of a WarpState a channel lies: the lanes of a store then have banks of their own.
__device__ __forceinline__ int state_slot(int channel) {
    int r, x;
    if (DP == 64) {
        r = ((channel >> 4) & 3) | (channel & 4);
        x = (channel >> 3) & 1;
    } else if (DP == 128) {
        r = channel >> 4;
        x = (channel >> 2) & 3;
    } else {
        r = (channel >> 4) & 7;
        x = (channel >> 7) | ((channel >> 1) & 6);
    }
    return 8 * (4 * x + (channel & 3)) + r;
}

// A lane's neighbouring numbers, DP / 32 of them: 2, 4 or 8.
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

// A split's output and LSE (in log2 units) of one query.
__device__ __forceinline__ void write_split(const DecodeParams &a, int partial, long long row, int lane,
                                            const float (&o)[DP / 32], float peak, float sum,
                                            float unit) {
    const long long place = (long long)partial * a.total_rows * HQ + row;
    if (lane == 0) a.partial_lse[place] = sum > 0.f ? peak + log2f(sum) : NEG_INF;
    const float inverse = sum > 0.f ? unit / sum : 0.f;
    float x[DP / 32];
#pragma unroll
    for (int k = 0; k < DP / 32; k++) x[k] = o[k] * inverse;
    store_vector(a.partial + place * DP + DP / 32 * lane, x);
}

// Sums over pages and over exact tokens, both in the order of `state_slot` -> the output. `center`
// (or null) is what the values of the head are relative to, `sign` the rotation's where it has signs.
__device__ __forceinline__ void write_output(float *pages, float *exact, const float (&sign)[LANE_CHANNELS],
                                             const float *rotation, const u16 *center, u16 *out, float *lse,
                                             int lane, float peak, float sum) {
    float x[LANE_CHANNELS], y[LANE_CHANNELS];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) {
        const int place = state_slot(lane + 32 * k);
        x[k] = pages[place], y[k] = exact[place];
    }
#if HADAMARD
    hadamard(x, lane);
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) x[k] *= ROOT * sign[k];
#elif DENSE
    multiply<float>(x, rotation + D * D, lane);
#endif
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) {
        if (!THERE(k)) continue;
        const float o = center ? model_to_float(center[lane + 32 * k]) : 0.f;
        out[lane + 32 * k] = (u16)pack_model2((x[k] + y[k]) * inverse + o, 0.f);
    }
    if (lane == 0) *lse = sum > 0.f ? (peak + log2f(sum)) * 0.6931471805599453f : NEG_INF;
}

// Queries after those of the last sequence, which no block and no merge answers.
__device__ __forceinline__ void clear_unused_queries(const DecodeParams &a) {
    if (a.num_splits > 1 || blockIdx.x || blockIdx.z) return;
    for (long long n = a.cu_seqlens[gridDim.x / HKV]; n < a.total_rows; n++)
        for (int i = threadIdx.x; i < HQ * D; i += 32 * WARPS) {
            a.out[n * a.out_n + i / D * a.out_h + i % D] = 0;
            if (i % D == 0) a.lse[n * HQ + i / D] = NEG_INF;
        }
}
