// Scores of a tile of pages: the queries' bytes times the levels of the keys' codes.
#pragma once

#include "page_mean.cuh"
#include "smem_pipeline.cuh"
#include "tile_softmax.cuh"

// Where the sums of keys begin: levels that are bytes from 0 on are 128 too large.
__device__ __forceinline__ void start_key_sums(SumStart &start, const QueryOperands &q) {
    clear(start);
    if (KEY_OFFSET)
#pragma unroll
        for (int x = 0; x < KX; x++)
#pragma unroll
            for (int n = 0; n < LANE_COLS; n++) take_off_offset<false>(start, n, q(n, x));
}

// A lane's codes of 32 keys; wide heads load them slot by slot.
__device__ __forceinline__ void load_keys(KeyBlock &codes, const uint4 (&keys)[KL * KW][32], int lane) {
    if (WIDE_KEYS) return;
#pragma unroll
    for (int k = 0; k < KL * KW; k++) (&codes.w[0][0])[k] = keys[k][lane];
}

// Products of 32 keys, 16 in each of `sums`. Where there are more slots than one sum can have, `first` has the
// products of those before.
__device__ __forceinline__ void multiply_keys(Int8Sums (&sums)[2], float (&first)[LANE_COLS][4],
                                              const KeyBlock &codes, const uint4 (&keys)[KL * KW][32],
                                              const QueryOperands &q, const SumStart &start, const LevelTable &table,
                                              int c, int lane) {
#pragma unroll keys_at_once
    for (int x = 0; x < KX; x++) {
        if (KX > SUM_SLOTS && x == SUM_SLOTS)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < LANE_COLS; j++) first[j][i] = sums[i / 2].column(j, i & 1);
        Levels of[4];
        if (WIDE_KEYS) {
            const uint4 own = keys[x % KL * KW + x / KL][lane];
            of[0] = decode_levels<KEY_BITS>(own.x, table);
            of[1] = decode_levels<KEY_BITS>(own.y, table);
            of[2] = decode_levels<KEY_BITS>(own.z, table);
            of[3] = decode_levels<KEY_BITS>(own.w, table);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) of[i] = key_levels(codes, x, i, c, table);
        }
#pragma unroll
        for (int n = 0; n < LANE_COLS; n++) {
            const uint2 operand = q(n, x);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Levels &one = of[2 * h], &two = of[2 * h + 1];
                mma_accumulate<KEY_OFFSET, false>(sums[h].of[n], one.low, two.low, one.high, two.high, operand,
                                                  start.of[n], x % SUM_SLOTS == 0);
                if (KEY_PRODUCTS == 2)
                    mma_accumulate<false, false>(sums[h].of[n], one.negative_low, two.negative_low,
                                                 one.negative_high, two.negative_high, operand, start.of[n], false);
            }
        }
    }
}

// Scores s of all tokens of a tile, in units of KEY_UNIT; with a softcap in log2 units, which `key_unit` makes.
// `bias` is what the means of its pages add to centered keys: those with a negative scale.
template <class Tile>
__device__ __forceinline__ void score_tile(float (&s)[LANE_COLS][4 * TB], const Tile &tile, const QueryOperands &q,
                                           const SumStart &start, const LevelTable &table,
                                           const float (&bias)[SPAN][LANE_COLS], float key_unit, int r, int c,
                                           int lane) {
#pragma unroll
    for (int b = 0; b < TB; b++) {
        const auto &keys = tile.page[b / BP].key[b % BP];
        KeyBlock codes;
        load_keys(codes, keys, lane);
        const uint2 key_scale = tile.page[b / BP].key_scale[b % BP][r];
        Int8Sums sums[2];
        float first[LANE_COLS][4];
        multiply_keys(sums, first, codes, keys, q, start, table, c, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float scale = half_at(key_scale, i);
            const bool centered = MEAN_BITS > 0 && __float_as_int(scale) < 0;
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) {
                const float sum = sums[i / 2].column(j, i & 1) + (KX > SUM_SLOTS ? first[j][i] : 0.f);
                s[j][4 * b + i] = fmaf(sum, fabsf(scale), centered ? bias[b / BP][j] : 0.f);
                if (SOFTCAP) s[j][4 * b + i] *= key_unit;
            }
        }
    }
}
