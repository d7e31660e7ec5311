// Pages: which words a lane has of them, how codes become levels.
//
// Lane 4 r + c has 16 bytes of a row of words: the same word of tokens r, r + 8, r + 16, r + 24.
// Decoded they are an A operand of mma.m16n8k32 as they lie: keys as tokens by channels (the order
// of channels is applied to the query), values as channels by tokens. A word of values holds four
// channels of a token pair; bytes of two are sorted by channel first. docs/kernels.md has the picture.
#pragma once

#include "ptx.cuh"

#if PAGE >= 32 * TB
#define TILES (PAGE / (32 * TB))      // tiles in a page
#define SPAN 1                        // pages in a tile
#else
#define TILES 1
#define SPAN (32 * TB / PAGE)
#endif
#define BP (TB / SPAN)                // blocks of 32 tokens in a page's part of a tile
#define HALF_WORDS (D % 32 != 0)      // of keys: an odd multiple of 16 has chunks of 16 codes
#define C (D / (HALF_WORDS ? 16 : 32))  // chunks of a key row
#define VC (D / 16)                   // chunks of a value row
// Lanes are for the next power of two, DP: those of the channels that are none have zeros in queries.
#define KX (DP / 32)                  // nibble words a lane has for a key row: 4 chunks / 4
#define VX (DP / 32)                  // and for a value pair: 4 chunks / 8
#define KL ((DP + 127) / 128)         // key chunks a lane loads
#define VL ((DP + 127) / 128)         // value chunks a lane loads
#define KEY_BLOCK (4 * D * KEY_BITS)      // bytes of codes of 32 tokens
#define VALUE_BLOCK (4 * D * VALUE_BITS)
#define MEAN_CHUNKS (MEAN_BITS == 16 ? D / 8 : MEAN_BITS == 8 ? D / 16 + 1 : 0)  // of 16 bytes

// Levels of codes are bytes, and a byte permute looks up eight of them. With four bits there are two
// tables: the fourth bit of a selector asks for eight copies of a byte's sign bit, so a level of the
// first table, above zero, or 0; and a level of the second, below zero, or -1. Their sum is the level,
// if those of the first table are one more; it is left to the products. Where there are many columns,
// products are what takes time (SUM_LEVELS): then both tables are magnitudes, and their difference plus
// 128 is the level's byte, unsigned.
#define KEY_OFFSET (KEY_BITS == 4 && SUM_LEVELS)
#define VALUE_OFFSET (VALUE_BITS == 4 && SUM_LEVELS)
#define KEY_PRODUCTS (KEY_BITS == 4 && !SUM_LEVELS ? 2 : 1)  // a code takes part in
#define VALUE_PRODUCTS (VALUE_BITS == 4 && !SUM_LEVELS ? 2 : 1)

struct LevelTable {
    u32 low, high, negative_low, negative_high;  // the last two of four bits alone
};

// Read back from shared memory: constants would be made again for every use.
__device__ __forceinline__ LevelTable reload(const volatile LevelTable &t) {
    return {t.low, t.high, t.negative_low, t.negative_high};
}

struct Levels {
    u32 low, high;  // of the codes in the word's low and high half
    u32 negative_low, negative_high;
};

template <int BITS>
__device__ __forceinline__ Levels decode_levels(u32 w, const LevelTable &t) {
    Levels x;
    x.low = prmt(t.low, t.high, w), x.high = prmt(t.low, t.high, w >> 16);
    if (BITS == 4) {
        const u32 other = flip_sign_bits(w);
        const u32 low = prmt(t.negative_low, t.negative_high, other);
        const u32 high = prmt(t.negative_low, t.negative_high, other >> 16);
        if (SUM_LEVELS)  // no byte borrows from the next
            x.low += 0x80808080 - low, x.high += 0x80808080 - high;
        else
            x.negative_low = low, x.negative_high = high;
    }
    return x;
}

// Words of values of two token pairs -> words of two channels each, of both pairs.
__device__ __forceinline__ void sort_by_channel(u32 &w, u32 &v) {
    const u32 first = prmt(w, v, 0x5140);
    v = prmt(w, v, 0x7362);
    w = first;
}

// Nibble word q of a chunk from its packed words (w has a stride of 4: uint4 components).
template <int BITS>
__device__ __forceinline__ u32 nibbles(const u32 *w, int q) {
    if (BITS == 4) return w[4 * q];
    if (BITS == 3) {
        u32 spare = ((w[0] >> 3) & 0x11111111u) | ((w[4] >> 2) & 0x22222222u) |
                    ((w[8] >> 1) & 0x44444444u);
        return q == 3 ? spare : (w[4 * (q == 3 ? 0 : q)] & 0x77777777u);
    }
    return (w[4 * (q >> 1)] >> (2 * (q & 1))) & 0x33333333u;
}

template <int BITS>
__device__ __forceinline__ u32 nibbles_at(const u32 *w, int x, int low) {
    // q = 2 x + low where a row has half as many chunks as lanes: `low` differs between lanes
    if (BITS == 4) return w[4 * x];  // loaded for this lane's q
    if (BITS == 3) {
        u32 spare = ((w[0] >> 3) & 0x11111111u) | ((w[4] >> 2) & 0x22222222u) |
                    ((w[8] >> 1) & 0x44444444u);
        if (x == 0) return (low ? w[4] : w[0]) & 0x77777777u;
        return low ? spare : (w[8] & 0x77777777u);
    }
    return (w[4 * x] >> (2 * low)) & 0x33333333u;
}

// uint4 a chunk; with 64 channels a lane needs every second word of 4 bits, or two of four of 8
#define KW (D == 64 && KEY_BITS >= 4 ? KEY_BITS / 2 : KEY_BITS)
#define VW (D == 64 && VALUE_BITS >= 4 ? VALUE_BITS / 2 : VALUE_BITS)

// Of 512 channels, and of values with 16 columns, a lane's codes of 4 bits are read from shared memory slot by slot:
// there are no registers for all.
#define WIDE_KEYS (DP > 256 && KEY_BITS == 4)
#define WIDE_VALUES ((DP > 256 || COLS > 12) && VALUE_BITS == 4)
constexpr int keys_at_once = WIDE_KEYS ? 4 : 64;  // slots whose instructions are written out

constexpr int means_at_once = DP > 256 ? 2 : 64;

struct KeyBlock {  // a lane's codes of 32 tokens
    uint4 w[KL][KW];
};
struct ValueBlock {
    uint4 w[VL][VW];
};

// Channel of the first of a lane's eight codes of key slot x.
__device__ __forceinline__ int key_channel(int x, int c) {
    if (HALF_WORDS) return 16 * (c + 4 * (x >> 1)) + 8 * (x & 1);
    if (D == 64) return 32 * (c & 1) + 8 * (2 * x + (c >> 1));
    return 32 * (c + 4 * (x % KL)) + 8 * (x / KL);
}

// Channel of the first of a lane's four channels of value slot x.
__device__ __forceinline__ int value_channel(int x, int r) {
    if (D == 64) return 16 * (r & 3) + 4 * (2 * x + (r >> 2));
    return 16 * (r + 8 * (x % VL)) + 4 * (x / VL);
}

#if HALF_WORDS
static_assert(DP == 128, "a lane has two chunks of keys");
// As below; a register has a word of two tokens, and the lane's chunks c and c + 4 follow one another.
__device__ __forceinline__ Levels half_word_levels(const KeyBlock &t, int x, int i, const LevelTable &table) {
    const u32 *w = (const u32 *)&t.w[0][0] + 2 * (x >> 1) + (i >> 1);
    const u32 token = (i & 1) ? 0x7632 : 0x5410;
    const int h = x & 1;  // half of the chunk
    const auto both = [&](int j) { return prmt(w[4 * (j % KW)], w[4 * ((j + 1) % KW)], token); };
    if (KEY_BITS == 8) return {both(4 * h), both(4 * h + 2), 0, 0};
    if (KEY_BITS == 4) return decode_levels<KEY_BITS>(both(2 * h), table);
    if (KEY_BITS == 2) return decode_levels<KEY_BITS>((both(0) >> (2 * h)) & 0x33333333u, table);
    if (h == 0) return decode_levels<KEY_BITS>(both(0) & 0x77777777u, table);
    const u32 spare = ((w[0] >> 3) & 0x11111111u) | ((w[4 % (4 * KW)] >> 2) & 0x22222222u) |
                      ((w[8 % (4 * KW)] >> 1) & 0x44444444u);
    return decode_levels<KEY_BITS>(prmt(w[8 % (4 * KW)] & 0x77777777u, spare, token), table);
}
#endif

// Levels of the eight codes of slot x of the lane's i-th token. Eight bits are levels already.
__device__ __forceinline__ Levels key_levels(const KeyBlock &t, int x, int i, int c,
                                             const LevelTable &table) {
#if HALF_WORDS
    return half_word_levels(t, x, i, table);
#endif
    const u32 *w = (const u32 *)&t.w[x % KL][0] + i;
    const int q = x / KL;
    if (KEY_BITS == 8) return {w[4 * (2 * q % KW)], w[4 * ((2 * q + 1) % KW)], 0, 0};
    if (D == 64) return decode_levels<KEY_BITS>(nibbles_at<KEY_BITS>(w, x, c >> 1), table);
    return decode_levels<KEY_BITS>(nibbles<KEY_BITS>(w, q), table);
}

// Levels of channels 2 m and 2 m + 1 of slot x, of four tokens each: two pairs, of the tile's first or
// second 16 tokens. Codes are sorted by channel, but for eight bits, which are sorted here.
__device__ __forceinline__ Levels value_levels(const ValueBlock &t, int x, int m, int half, int r,
                                               const LevelTable &table) {
    const u32 *w = (const u32 *)&t.w[x % VL][0] + 2 * half;
    const int q = x / VL;
    if (VALUE_BITS == 8) {
        const u32 *two = w + 4 * ((2 * q + m) % VW);
        return {prmt(two[0], two[1], 0x5410), prmt(two[0], two[1], 0x7632), 0, 0};
    }
    if (D == 64) return decode_levels<VALUE_BITS>(nibbles_at<VALUE_BITS>(w + m, x, r >> 2), table);
    return decode_levels<VALUE_BITS>(nibbles<VALUE_BITS>(w + m, q), table);
}
