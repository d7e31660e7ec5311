// How many blocks read each sequence of a batch, where lengths differ.
#pragma once

#include "decode_params.cuh"

struct RowSplits {
    int row, splits;  // of a sequence
    int first;  // number of the first of them among all of the batch
};

// Shares of a batch: proportional to lengths, `num_splits` on average. Sequences that are alike get as many each;
// where they are not and that is few, one more, so that blocks are smaller than what a processor has to do.
struct Shares {
    float of_tile;

    __device__ __forceinline__ Shares(const int *lengths, int batch, int num_splits, int lane) {
        int total = 0, most = 0, live = 0;
        for (int row = lane; row < batch; row += 32) {
            const int tiles = (lengths[row] + 63) / 64;
            total += tiles, most = max(most, tiles), live += tiles > 0;
        }
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            total += __shfl_xor_sync(~0u, total, bit);
            most = max(most, __shfl_xor_sync(~0u, most, bit));
            live += __shfl_xor_sync(~0u, live, bit);
        }
        const bool uneven = 2LL * most * live > 3LL * total;
        const int wanted = num_splits + (uneven && num_splits < 4 ? 1 : 0);
        of_tile = total > 0 ? (float)wanted * (float)live / (float)total : 0.f;
    }

    // At least one; none with less than 4 tiles.
    __device__ __forceinline__ int splits(int length) const {
        const int tiles = (length + 63) / 64;
        return max(1, min((int)((float)tiles * of_tile + 0.5f), tiles / 4));
    }
};

// The sequence whose split has the number `n`, or that has the query `n`: by splits or by `cu_seqlens`. False: none.
template <bool BY_QUERY>
__device__ __forceinline__ bool find_row(RowSplits &found, const int *lengths, const int *cu_seqlens, int batch,
                                         int num_splits, int n, int lane) {
    const Shares shares(lengths, batch, num_splits, lane);
    int before = 0;
    for (int base = 0; base < batch; base += 32) {
        const int row = base + lane, own = row < batch ? shares.splits(lengths[row]) : 0;
        int sum = own;  // of the rows up to this lane's
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            const int other = __shfl_sync(~0u, sum, lane - bit);
            sum += lane >= bit ? other : 0;
        }
        const bool is = row < batch && (BY_QUERY ? n < cu_seqlens[row + 1] : n < before + sum);
        const u32 those = __ballot_sync(~0u, is);
        if (those) {
            const int who = __ffs(those) - 1;
            found.row = base + who;
            found.splits = __shfl_sync(~0u, own, who);
            found.first = before + __shfl_sync(~0u, sum - own, who);
            return true;
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return false;
}
