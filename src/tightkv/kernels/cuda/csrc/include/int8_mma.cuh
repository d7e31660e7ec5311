// Columns, query heads of query tokens, and products of bytes.
//
// Queries and weights go through products as two bytes, 256 hi + lo, which are neighbours among the
// eight columns of a B operand: such an operand has four columns, and a lane one of them and both its
// bytes. Sums start at the bits of a float whose last place is one: as floats they are numbers without
// a conversion.
#pragma once

#include "ptx.cuh"

#define COL_TILES ((COLS + 7) / 8)  // tiles of eight columns, of the exact tokens' products
#define LANE_COLS (COLS / 4)        // columns of a lane, each in an operand of its own
#define ZERO_BITS 0x4b400000
#define ZERO 12582912.f  // 1.5 * 2^23: sums must stay within 2^22 of it

// Values: levels of at most 127 and bytes of 255, of a tile's tokens. Keys and means: bytes from -127
// on, of so many slots of 32 channels.
#define SUM_SLOTS 8
static_assert(32 * TB * 127 * 255 < 1 << 22 && 32 * SUM_SLOTS * 127 * 128 < 1 << 22, "sums may be too large");

// Columns 2 c and 2 c + 1 of eight, as the products of exact tokens have them; c of the last four.
__device__ __forceinline__ int lane_column(int j, int c) {
    return 8 * (j >> 1) + (4 * (j | 1) < COLS ? 2 * c + (j & 1) : c);
}

// Which column is in row r of the n-th tile of eight: of a last four, each twice.
__device__ __forceinline__ int tile_column(int n, int r) {
    return 8 * n + (8 * n + 8 <= COLS ? r : r >> 1);
}

struct Int8Sums {
    int of[LANE_COLS][4];

    // Of a lane's j-th column, in the upper or the lower half of the rows. Constants cancel, and up
    // to the last addition nothing is rounded.
    __device__ __forceinline__ float column(int j, int half) const {
        const float hi = __int_as_float(of[j][2 * half]), lo = __int_as_float(of[j][2 * half + 1]);
        return fmaf(hi, 256.f, -257.f * ZERO) + lo;
    }
};

// Where sums of a lane's j-th column begin: hi and lo. Where there are many columns, of both halves of the rows, as
// products take them; a move is saved for each.
#define START_WORDS (COLS > 8 ? 4 : 2)
struct SumStart {
    int of[LANE_COLS][START_WORDS];
};

__device__ __forceinline__ void clear(SumStart &start) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++)
#pragma unroll
        for (int i = 0; i < START_WORDS; i++) start.of[j][i] = ZERO_BITS;
}

// Levels that are bytes from 0 on, 128 for 0, give sums that are too large by 128 times the sum of the
// other operand: it is taken off where they begin.
template <bool B_UNSIGNED>
__device__ __forceinline__ void take_off_offset(SumStart &start, int j, uint2 b) {
    const u32 m = 0x80808080;  // -128
    int(&x)[START_WORDS] = start.of[j];
    int d[4];
    mma_int8<false, B_UNSIGNED>(d, m, m, m, m, b.x, b.y, x[0], x[1], x[2 % START_WORDS], x[3 % START_WORDS]);
#pragma unroll
    for (int i = 0; i < START_WORDS; i++) x[i] = d[i];
}

// Rows x, y of an A operand, k of each from 0 and from 16 on; the first of a sum or one more.
template <bool A_UNSIGNED, bool B_UNSIGNED, int N>
__device__ __forceinline__ void mma_accumulate(int (&sum)[4], u32 x0, u32 y0, u32 x16, u32 y16, uint2 b,
                                               const int (&start)[N], bool first) {
    mma_int8<A_UNSIGNED, B_UNSIGNED>(sum, x0, y0, x16, y16, b.x, b.y, first ? start[0] : sum[0],
                                     first ? start[1] : sum[1], first ? start[2 % N] : sum[2],
                                     first ? start[3 % N] : sum[3]);
}
