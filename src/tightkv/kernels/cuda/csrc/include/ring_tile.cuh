// Tokens of a ring of codes (a window of 8 bits), in the frame of pages: keys of 12 bits, values of 8.
//
// A key is 16 times its bytes plus its nibbles, so a score is made of two int8 products; the queries are those
// of pages, and so are the accumulators.
#pragma once

#include "int8_mma.cuh"
#include "page_codes.cuh"

#define RING_KEY (D * 3 / 2)  // bytes of a key

// Where a sequence's head has them.
struct Ring {
    const u8 *key, *value, *scales;  // of slot 0; scales of key and value are side by side
    int from, count, slots, first_slot;  // position of the first that is read, and its slot
};

struct RingTokens {  // on their way; rows begin in different banks
    u8 key[EXACT_TOKENS][(RING_KEY + 15) / 16 * 16 + 16], value[EXACT_TOKENS][D + 16];
    u32 scales[EXACT_TOKENS];
};

// `BYTES` of each of the group's tokens, to rows at `to`; `slot` is that of token `lane`. Copies are of UNIT bytes.
template <int BYTES, int UNIT>
__device__ __forceinline__ void copy_rows(u32 to, int row_bytes, const u8 *from, int token_bytes, int slot, int lane) {
    constexpr int power = BYTES / UNIT <= 2 ? 2 : BYTES / UNIT <= 4 ? 4 : BYTES / UNIT <= 8 ? 8 : 16;
    constexpr int lanes = BYTES / UNIT == 1 ? 1 : power;  // that copy a row
#pragma unroll
    for (int i = 0; i < EXACT_TOKENS; i += 32 / lanes) {
        const int row = i + lane / lanes;
        const u8 *at = from + (long long)__shfl_sync(~0u, slot, row) * token_bytes;
#pragma unroll
        for (int chunk = 0; chunk < BYTES / UNIT; chunk += lanes) {
            const int n = chunk + lane % lanes;
            if (row >= EXACT_TOKENS || n >= BYTES / UNIT) continue;
            const u32 place = to + row * row_bytes + UNIT * n;
            if (UNIT == 16) cp_async(place, at + 16 * n);
            if (UNIT == 8) cp_async_8(place, at + 8 * n);
            if (UNIT == 4) cp_async_4(place, at);
        }
    }
}

// The group's tokens from the `first`-th on to shared memory; after the last one it again.
__device__ __forceinline__ void copy_ring(u32 to, const Ring &x, int first, int lane) {
    constexpr int unit = D % 32 ? 8 : 16;  // keys of other heads begin at multiples of 8
    constexpr u32 key_row = sizeof(RingTokens::key) / EXACT_TOKENS, value_row = sizeof(RingTokens::value) / EXACT_TOKENS;
    int slot = x.first_slot + min(first + lane % EXACT_TOKENS, x.count - 1);
    if (slot >= x.slots) slot -= x.slots;
    copy_rows<D, unit>(to, key_row, x.key, HKV * RING_KEY, slot, lane);
    copy_rows<D / 2, unit>(to + D, key_row, x.key + D, HKV * RING_KEY, slot, lane);
    to += EXACT_TOKENS * key_row;
    copy_rows<D, 16>(to, value_row, x.value, HKV * D, slot, lane);
    copy_rows<4, 4>(to + EXACT_TOKENS * value_row, 4, x.scales, 4 * HKV, slot, lane);
}
