// The queries of a block: from the model's tensor to both frames in shared memory, to registers.
#pragma once

#include "decode_params.cuh"
#include "hadamard.cuh"
#include "int8_mma.cuh"
#include "page_codes.cuh"

#define OWN_COLS ((COLS + WARPS - 1) / WARPS)  // that a warp prepares: every WARPS-th

struct Queries {  // a lane's part of them
    u16 raw[OWN_COLS][DP / 32];
    float sign[DP / 32];
};

__device__ __forceinline__ bool is_own(int warp, int i) {
    return COLS % WARPS == 0 || warp + WARPS * i < COLS;
}

__device__ __forceinline__ void load(Queries &q, const DecodeParams &a, int begin, int count, int first_at,
                                     int head, int col0, int lane, int warp) {
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++) {
        const int col = col0 + warp + WARPS * i, token = col / G;
        const bool live = token < count && first_at + token >= 0 && is_own(warp, i);
        const u16 *at = (const u16 *)a.query + (long long)(begin + token) * a.query_n +
                        (long long)(head * G + col % G) * a.query_h;
#pragma unroll
        for (int k = 0; k < DP / 32; k++)
            q.raw[i][k] = live && THERE(k) ? at[lane + 32 * k] : (u16)0;
    }
#pragma unroll
    for (int k = 0; k < DP / 32; k++) q.sign[k] = HADAMARD ? a.rotation[lane + 32 * k] : 1.f;
}

// Rotated queries as bytes: their largest component is 127 * 256 = 256 hi + lo.
#define BYTE_UNIT (1.f / 127.f)  // of one of their halves, the largest of which is 256
struct QueryBytes {
    u8 plane[2][COLS][DP + 16];  // hi, lo
};

__device__ __forceinline__ void write_bytes(QueryBytes &to, int column, int channel, float x) {
    const int whole = (int)rintf(x), hi = (whole + 128) >> 8;
    to.plane[0][column][channel] = (u8)hi;
    to.plane[1][column][channel] = (u8)(whole - 256 * hi);
}

// Both frames of a block's queries to shared memory; returns what scores of rotated halves are to be
// multiplied with to be in log2 units; those of bytes also with BYTE_UNIT. It is above zero: where
// `scale` is not, rotated queries are turned, or zero.
template <class SharedMemory>
__device__ __forceinline__ float prepare(const Queries &q, SharedMemory &sh, float scale,
                                         const float *rotation, int lane, int warp) {
    const float turned = scale > 0.f ? 1.f : scale < 0.f ? -1.f : 0.f;
#pragma unroll
    for (int k = 0; k < DP / 32; k++) {
        const u32 negative = __ballot_sync(~0u, q.sign[k] < 0.f);
        if (threadIdx.x == 0) sh.negative[k] = negative;
    }
    float x[OWN_COLS][DP / 32];
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++)
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            if (is_own(warp, i)) ((u16 *)sh.query[1][warp + WARPS * i])[lane + 32 * k] = q.raw[i][k];
            x[i][k] = model_to_float(q.raw[i][k]) * q.sign[k] * turned;
        }
#if HADAMARD
    hadamard(x, lane);
#elif DENSE
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++)
        if (is_own(warp, i)) multiply<float>(x[i], rotation, lane);
#endif
    // One factor for all columns: the largest component becomes 256.
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++)
#pragma unroll
        for (int k = 0; k < DP / 32; k++) top = fmaxf(top, fabsf(x[i][k]));
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
    if (lane == 0) sh.query_top[warp] = top;
    __syncthreads();
    top = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, sh.query_top[w]);
    top = top > 0.f ? top * (1.f / 256.f) : 1.f;
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++)
#pragma unroll
        for (int k = 0; k < DP / 32; k++)
            if (is_own(warp, i)) {
                const float y = __fdividef(x[i][k], top);
                const int pairs_0213 = lane & ~6 | (lane & 2) << 1 | (lane & 4) >> 1;
                u16 *row = (u16 *)sh.query[0][warp + WARPS * i];
                row[pairs_0213 + 32 * k] = (u16)pack_half2(y, 0.f);
                write_bytes(sh.query_bytes, warp + WARPS * i, lane + 32 * k, 127.f * y);
            }
    __syncthreads();
    return top * (HADAMARD ? ROOT : 1.f) * (scale ? fabsf(scale) : 1.f) * 1.4426950408889634f;
}

// A lane's part of B operands: bytes, and halves of the exact tokens' frame.
struct QueryOperands {
#if SHARED_QUERIES
    const volatile u64 *own;  // in shared memory, 32 lanes side by side
    __device__ __forceinline__ uint2 operator()(int n, int x) const {
        const u64 both = own[32 * (KX * n + x)];
        return make_uint2((u32)both, (u32)(both >> 32));
    }
#else
    uint2 own[LANE_COLS][KX];
    __device__ __forceinline__ uint2 operator()(int n, int x) const { return own[n][x]; }
#endif
};

template <class SharedMemory>
__device__ __forceinline__ void load_query_bytes(QueryOperands &q, SharedMemory &sh, int lane, int warp) {
    const int r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < LANE_COLS; n++)
#pragma unroll
        for (int x = 0; x < KX; x++) {
            const u8 *row = sh.query_bytes.plane[r & 1][lane_column(n, r >> 1)];
            const uint2 eight = *(const uint2 *)(row + key_channel(x, c));
#if SHARED_QUERIES
            if (warp == (KX * n + x) % WARPS) sh.query_operands[KX * n + x][lane] = eight;
        }
    __syncthreads();
    q.own = (const volatile u64 *)sh.query_operands[0] + lane;
#else
            q.own[n][x] = eight;
        }
#endif
}
