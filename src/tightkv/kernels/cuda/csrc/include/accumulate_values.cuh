// Values of a tile of pages: softmax weights times the levels of the values' codes.
#pragma once

#include "smem_pipeline.cuh"
#include "tile_softmax.cuh"

// A lane's k-th 16 bytes of codes of a block of 32 tokens, sorted by channel.
template <class Tile>
__device__ __forceinline__ void load_value_codes(ValueBlock &codes, const Tile &tile, int b, int k, int lane) {
    uint4 w = tile.page[b / BP].value[b % BP][k][lane];
    if (VALUE_BITS < 8) {
        sort_by_channel(w.x, w.y);
        sort_by_channel(w.z, w.w);
    }
    (&codes.w[0][0])[k] = w;
}

// All codes of a tile, before the softmax needs the registers' results; wide heads load them slot by slot.
template <class Tile>
__device__ __forceinline__ void load_values(ValueBlock (&codes)[TB], const Tile &tile, int lane) {
    if (WIDE_VALUES) return;
#pragma unroll
    for (int b = 0; b < TB; b++)
#pragma unroll
        for (int k = 0; k < VL * VW; k++) load_value_codes(codes[b], tile, b, k, lane);
}

// Where the sums of values begin: levels that are bytes from 0 on are 128 too large.
__device__ __forceinline__ void start_value_sums(SumStart &start, const u32 (&weights)[TB][LANE_COLS][2]) {
    clear(start);
#pragma unroll
    for (int b = 0; b < TB; b++)
#pragma unroll
        for (int n = 0; n < LANE_COLS; n++)
            take_off_offset<true>(start, n, make_uint2(weights[b][n][0], weights[b][n][1]));
}

// Products of the weights with slot x of the values, channels 0, 1 and 2, 3 in a sum each.
template <class Tile>
__device__ __forceinline__ void multiply_values(Int8Sums (&sums)[2], ValueBlock (&codes)[TB], const Tile &tile, int x,
                                                const u32 (&weights)[TB][LANE_COLS][2], const SumStart &start,
                                                const LevelTable &table, int r, int lane) {
#pragma unroll
    for (int b = 0; b < TB; b++) {
        if (WIDE_VALUES) load_value_codes(codes[b], tile, b, x % VL * VW + x / VL, lane);
        Levels of[2][2];  // channel pair; tokens 0..15, 16..31
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < 2; m++) of[m][h] = value_levels(codes[b], x, m, h, r, table);
#pragma unroll
        for (int n = 0; n < LANE_COLS; n++) {
            const uint2 operand = make_uint2(weights[b][n][0], weights[b][n][1]);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const Levels &one = of[m][0], &two = of[m][1];
                mma_accumulate<VALUE_OFFSET, true>(sums[m].of[n], one.low, one.high, two.low, two.high, operand,
                                                   start.of[n], b == 0);
                if (VALUE_PRODUCTS == 2)
                    mma_accumulate<false, true>(sums[m].of[n], one.negative_low, one.negative_high,
                                                two.negative_low, two.negative_high, operand, start.of[n], false);
            }
        }
    }
}

// Accumulators plus the tile's values times `weights`, of which `scale` makes those of the accumulators.
template <class Tile>
__device__ __forceinline__ void accumulate_values(Accumulators &f, ValueBlock (&codes)[TB], const Tile &tile,
                                                  const u32 (&weights)[TB][LANE_COLS][2],
                                                  const float (&scale)[LANE_COLS], SumStart &start,
                                                  const LevelTable &table, int r, int lane) {
    if (VALUE_OFFSET) start_value_sums(start, weights);
#pragma unroll
    for (int x = 0; x < VX; x++) {
        Int8Sums sums[2];
        multiply_values(sums, codes, tile, x, weights, start, table, r, lane);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < LANE_COLS; j++) f.acc[x][m][half][j] += sums[m].column(j, half) * scale[j];
    }
}
