// Tiles on their way through shared memory: where a lane's bytes of a page lie, and where they go.
#pragma once

#include "exact_tile.cuh"
#include "page_codes.cuh"
#include "ring_tile.cuh"

// What a tile has of a page: each lane's codes, then what is common to all lanes. With 128 channels it
// lies like that in a page that has no more tokens.
struct __align__(128) PagePart {  // all banks of shared memory once
    uint4 key[BP][KL * KW][32], value[BP][VL * VW][32];
    uint2 key_scale[BP][8], value_scale[BP][8];
    uint4 mean[MEAN_CHUNKS + !MEAN_CHUNKS];
};

union Stage {  // a tile on its way or being read, or exact tokens
    PagePart page[SPAN];
    ExactTokens exact;
    RingTokens ring;  // smaller
};

// Of 512 channels there are not registers for both accumulators: those of pages are stored where the first stage
// was, then exact tokens go through the second one.
#define EXACT_APART (DP > 256)

#define PART_VALUE (512 * BP * KL * KW)  // where its members begin
#define PART_KEY_SCALE (PART_VALUE + 512 * BP * VL * VW)
#define PART_VALUE_SCALE (PART_KEY_SCALE + 64 * BP)
#define PART_MEAN (PART_VALUE_SCALE + 64 * BP)

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

// Codes of a page, to its part of a stage at `to`. `key` and `value` are the page's record, moved on to the
// tile's and the lane's bytes.
__device__ __forceinline__ void copy_codes(u32 to, const u8 *key, const u8 *value, int lane, u64 policy) {
    const u32 keys = to + 16 * lane, values = keys + PART_VALUE;
    const int r = lane >> 2, c = lane & 3;
#pragma unroll
    for (int b = 0; b < BP; b++)
#pragma unroll
        for (int l = 0; l < KL; l++)
#pragma unroll
            for (int k = 0; k < KW; k++) {
                if (HALF_WORDS) {
                    const u32 at = keys + 512 * (b * KW + k);
                    const u8 *from = key + b * KEY_BLOCK + 64 * C * k;
                    cp_async_8(at, from);
                    if (c + 4 < C) cp_async_8(at + 8, from + 32);
                    continue;
                }
                if (D < DP && c + 4 * l >= C) continue;
                const int j = own_word(k, KEY_BITS);
                cp_async(keys + 512 * ((b * KL + l) * KW + k),
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
                cp_async(values + 512 * ((b * VL + l) * VW + k),
                     value + VALUE_AT + b * VALUE_BLOCK + 64 * VC * j + 512 * l, policy);
            }
}

// 16 bytes of a page's scales or mean that a lane copies: where from, where to in its part of a stage.
struct ScaleCopy {
    int from, to;
    bool scale, mean;

    __device__ __forceinline__ ScaleCopy(int e) {
        scale = e < 8 * BP, mean = !scale && e < 8 * BP + MEAN_CHUNKS;
        const bool key = e < 4 * BP;
        const int chunk = key ? e : scale ? e - 4 * BP : e - 8 * BP;
        from = (key ? KEY_SCALE_AT : scale ? VALUE_SCALE_AT : MEAN_AT) + 16 * chunk;
        to = 16 * chunk + (key ? PART_KEY_SCALE : scale ? PART_VALUE_SCALE : PART_MEAN);
    }
};
#define SCALE_COPIES ((8 * BP + MEAN_CHUNKS + 31) / 32)  // a lane
static_assert(SCALE_COPIES <= 3, "more than decode.cu prepares");

// Bulk copies take no lane's time, where codes lie in a page as in a stage. With few columns lanes have it.
#define BULK_COPIES (__CUDA_ARCH__ >= 900 && D == 128 && COLS >= 8)
#define PART_BYTES (PART_MEAN + 16 * MEAN_CHUNKS)

#if BULK_COPIES
static_assert(TILES > 1 || (PART_VALUE == VALUE_AT && PART_KEY_SCALE == KEY_SCALE_AT &&
                            PART_VALUE_SCALE == VALUE_SCALE_AT && (!MEAN_CHUNKS || PART_MEAN == MEAN_AT)),
              "a page has another order");
// What a tile has of a page from its `block`-th 32 tokens on, by one lane.
__device__ __forceinline__ void bulk_copy_part(u32 to, const u8 *record, int block, u32 barrier, u64 policy) {
    if (TILES == 1) {
        bulk_copy(to, record, PART_BYTES, barrier, policy);
        return;
    }
    bulk_copy(to, record + block * KEY_BLOCK, PART_VALUE, barrier, policy);
    bulk_copy(to + PART_VALUE, record + VALUE_AT + block * VALUE_BLOCK, PART_KEY_SCALE - PART_VALUE, barrier,
              policy);
    bulk_copy(to + PART_KEY_SCALE, record + KEY_SCALE_AT + 64 * block, 64 * BP, barrier, policy);
    bulk_copy(to + PART_VALUE_SCALE, record + VALUE_SCALE_AT + 64 * block, 64 * BP, barrier, policy);
    if (MEAN_CHUNKS) bulk_copy(to + PART_MEAN, record + MEAN_AT, 16 * MEAN_CHUNKS, barrier, policy);
}
#endif
