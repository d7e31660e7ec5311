// Columns, query heads of query tokens, and products of bytes.
//
// Queries and weights go through products as two bytes, 256 hi + lo, each of which has a slot of its
// own among the columns of a B operand: those of a column are neighbours where four columns are all,
// else in tiles that follow each other. Sums start at the bits of a float whose last place is one:
// as floats they are numbers without a conversion.
#pragma once

#include "ptx.cuh"

#define COL_TILES ((COLS + 7) / 8)                // tiles of eight columns
#define FEW_COLS (COLS == 4)
#define LANE_COLS (FEW_COLS ? 1 : 2 * COL_TILES)       // columns of a lane
#define SLOT_TILES (FEW_COLS ? 1 : 2 * COL_TILES)
#define ZERO_BITS 0x4b400000
#define ZERO 12582912.f                    // 1.5 * 2^23: sums must stay within 2^22 of it

// Values: levels of at most 127 and bytes of 255, of a tile's tokens. Keys and means: bytes from -127
// on. So D may be 256.
static_assert(32 * TB * 127 * 255 < 1 << 22 && D * 127 * 128 < 1 << 22, "sums may be too large");

__device__ __forceinline__ int lane_column(int j, int c) {
    return FEW_COLS ? c : 8 * (j >> 1) + 2 * c + (j & 1);
}

struct Int8Sums {
    int of[SLOT_TILES][4];

    // Of a lane's j-th column, in the upper or the lower half of the rows. Constants cancel, and up
    // to the last addition nothing is rounded.
    __device__ __forceinline__ float column(int j, int half) const {
        const int n = FEW_COLS ? 0 : j & ~1, k = 2 * half + (FEW_COLS ? 0 : j & 1);
        const int m = FEW_COLS ? 0 : n + 1, l = FEW_COLS ? k + 1 : k;  // the slot of lo
        const float hi = __int_as_float(of[n][k]), lo = __int_as_float(of[m][l]);
        return fmaf(hi, 256.f, -257.f * ZERO) + lo;
    }
};

// Rows x, y of an A operand, k of each from 0 and from 16 on; the first of a sum or one more.
template <bool B_UNSIGNED>
__device__ __forceinline__ void mma_accumulate(int (&sum)[4], u32 x0, u32 y0, u32 x16, u32 y16,
                                         const u32 (&b)[2], bool first) {
    const int zero = ZERO_BITS;
    mma_int8<B_UNSIGNED>(sum, x0, y0, x16, y16, b[0], b[1], first ? zero : sum[0],
                          first ? zero : sum[1], first ? zero : sum[2], first ? zero : sum[3]);
}
