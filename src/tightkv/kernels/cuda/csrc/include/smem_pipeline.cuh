// Tiles on their way through shared memory: where a lane's bytes of a page lie, and where they go.
#pragma once

#include "page_codes.cuh"

// A tile on its way or being read: each lane's codes, then what is common to all lanes.
struct __align__(128) Stage {  // all banks of shared memory once
    uint4 key[TB][KL * KW][32], value[TB][VL * VW][32];
    uint2 key_scale[TB][8], value_scale[TB][8];
    uint4 mean[SPAN][MEAN_CHUNKS + !MEAN_CHUNKS];  // of a tile's pages
};

#define STAGE_VALUE (512 * TB * KL * KW)  // where its members begin
#define STAGE_KEY_SCALE (STAGE_VALUE + 512 * TB * VL * VW)
#define STAGE_VALUE_SCALE (STAGE_KEY_SCALE + 64 * TB)
#define STAGE_MEAN (STAGE_VALUE_SCALE + 64 * TB)

// Where a lane's bytes of a record begin; the rest of an address is constant.
__device__ __forceinline__ int key_lane_offset(int r, int c) {
    const int words = KEY_BITS == 4 ? 1 : KEY_BITS == 8 ? 2 : 0;  // that belong to other lanes
    if (HALF_WORDS) return 8 * (r * C + c);
    if (D == 64) return 16 * ((8 * words * (c >> 1) + r) * C + (c & 1));
    return 16 * (r * C + c);
}

__device__ __forceinline__ int value_lane_offset(int r, int c) {
    const int words = VALUE_BITS == 4 ? 1 : VALUE_BITS == 8 ? 2 : 0;
    if (D == 64) return 16 * ((VC * words * (r >> 2) + (r & 3)) * 4 + c);
    return 16 * (r * 4 + c);
}

// A lane's k-th word of a chunk: of 64 channels every second of 4 bits, or two of four of 8.
__device__ __forceinline__ constexpr int own_word(int k, int bits) {
    return D != 64 || bits < 4 ? k : bits == 4 ? 2 * k : k + (k & 2);
}

// Codes of page p of a tile, to the stage at `to`. `key` and `value` are the page's record, moved
// on to the tile's and the lane's bytes.
__device__ __forceinline__ void copy_codes(u32 to, int p, const u8 *key, const u8 *value, int lane,
                                           u64 policy) {
    const u32 keys = to + 16 * lane, values = keys + STAGE_VALUE;
    const int r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int b = 0; b < BP; b++)
#pragma unroll
        for (int l = 0; l < KL; l++)
#pragma unroll
            for (int k = 0; k < KW; k++) {
                if (HALF_WORDS) {
                    const u32 at = keys + 512 * ((p * BP + b) * KW + k);
                    const u8 *from = key + b * KEY_BLOCK + 64 * C * k;
                    cp_async_8(at, from);
                    if (c + 4 < C) cp_async_8(at + 8, from + 32);
                    continue;
                }
                if (D < DP && c + 4 * l >= C) continue;
                const int j = own_word(k, KEY_BITS);
                cp_async(keys + 512 * (((p * BP + b) * KL + l) * KW + k),
                     key + b * KEY_BLOCK + 128 * C * j + 64 * l, policy);
            }
#pragma unroll
    for (int b = 0; b < BP; b++)
#pragma unroll
        for (int l = 0; l < VL; l++)
#pragma unroll
            for (int k = 0; k < VW; k++) {
                if (D < DP && r + 8 * l >= VC) continue;
                const int j = own_word(k, VALUE_BITS);
                cp_async(values + 512 * (((p * BP + b) * VL + l) * VW + k),
                     value + VALUE_AT + b * VALUE_BLOCK + 64 * VC * j + 512 * l, policy);
            }
}

// 16 bytes of a page's scales or mean that a lane copies: where from, where to in a stage.
struct ScaleCopy {
    int from, to, to_next;  // of the next page of the tile
    bool scale, mean;

    __device__ __forceinline__ ScaleCopy(int e) {
        scale = e < 8 * BP, mean = !scale && e < 8 * BP + MEAN_CHUNKS;
        const bool key = e < 4 * BP;
        const int chunk = key ? e : scale ? e - 4 * BP : e - 8 * BP;
        from = (key ? KEY_SCALE_AT : scale ? VALUE_SCALE_AT : MEAN_AT) + 16 * chunk;
        to = 16 * chunk + (key ? STAGE_KEY_SCALE : scale ? STAGE_VALUE_SCALE : STAGE_MEAN);
        to_next = scale ? 64 * BP : 16 * MEAN_CHUNKS;
    }
};
#define SCALE_COPIES ((8 * BP + MEAN_CHUNKS + 31) / 32)  // a lane
