// How sequences of different lengths are cut: which block of decode.cu reads which split of which sequence. Made
// once for all layers of a step; one block.

#include "ptx.cuh"

#define PLAN_WARPS 32
// As in decode_plan.py:
#define MOST_ROWS 2048
#define MOST_SPLITS 64  // of the longest sequence
#define BLOCK_TILES 6   // as many take as long as a block's setup, and as a merge
#define MERGE_TILES 4

struct PlanParams {
    const int *lengths, *left_pad, *ring_read_from;  // [batch]
    int *blocks;  // [num_blocks, 4]: row, split, splits of the row, and the number of the first of them; row -1: none
    int *rows;    // [batch, 2]: the last two of these
    int batch, num_blocks;
    int heads;  // blocks that read the same split
    int slots;  // blocks that run at a time
    int window;
    int least;  // tiles of a split, of more than one
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

template <class Number>
__device__ __forceinline__ Number sum_of_warp(Number x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// Tiles of 64 tokens of pages, and of 16 exact tokens, which take about as long.
__device__ __forceinline__ int tiles_of(const PlanParams &a, int row) {
    const int length = a.lengths[row], ring = a.ring_read_from[row];
    int low = a.left_pad[row];
    if (a.window > 0) low = max(low, length - a.window);
    return divide_up(max(ring - low, 0), 64) + divide_up(max(length - max(ring, low), 0), 16);
}

// Estimated tiles of time if no split has more than `target` tiles.
__device__ __forceinline__ float time_of(const PlanParams &a, const int *tiles, int target, int lane) {
    int total = 0, splits = 0;
    for (int row = lane; row < a.batch; row += 32) {
        total += tiles[row];
        splits += max(divide_up(tiles[row], target), 1);
    }
    total = sum_of_warp(total), splits = sum_of_warp(splits);
    if (splits > a.num_blocks) return __int_as_float(0x7f800000);
    const float one = target + BLOCK_TILES, merging = splits > a.batch ? MERGE_TILES : 0;
    if (splits * a.heads <= a.slots) return one + merging;
    // Longest first, the last ones end at different times.
    const float each = (float)(total + splits * BLOCK_TILES) * a.heads / a.slots;
    return fmaxf(one, each + 0.5f * one) + merging;
}

extern "C" __global__ void __launch_bounds__(32 * PLAN_WARPS) split_plan(const PlanParams a) {
    __shared__ int tiles[MOST_ROWS], shares[MOST_ROWS], splits[MOST_ROWS], best_target[PLAN_WARPS];
    __shared__ float best_time[PLAN_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    grid_dependency_wait();
    launch_dependents();
    for (int row = threadIdx.x; row < a.batch; row += 32 * PLAN_WARPS) tiles[row] = tiles_of(a, row);
    __syncthreads();
    int longest = 1;
    for (int row = lane; row < a.batch; row += 32) longest = max(longest, tiles[row]);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) longest = max(longest, __shfl_xor_sync(~0u, longest, bit));

    // A warp estimates the times of a few targets; one split each is always allowed.
    int target = longest;
    float time = time_of(a, tiles, longest, lane);
    for (int count = 2 + warp; count <= min(MOST_SPLITS, longest / a.least); count += PLAN_WARPS) {
        const int other = divide_up(longest, count);
        const float found = time_of(a, tiles, other, lane);
        if (found < time) time = found, target = other;
    }
    if (lane == 0) best_target[warp] = target, best_time[warp] = time;
    __syncthreads();
    for (int w = 0; w < PLAN_WARPS; w++)
        if (best_time[w] < time || (best_time[w] == time && best_target[w] > target))
            time = best_time[w], target = best_target[w];

    for (int row = threadIdx.x; row < a.batch; row += 32 * PLAN_WARPS) {
        splits[row] = max(divide_up(tiles[row], target), 1);
        shares[row] = divide_up(tiles[row], splits[row]);
    }
    __syncthreads();
    int last = 0;  // all splits
    for (int row = threadIdx.x; row < a.batch; row += 32 * PLAN_WARPS) {
        int first = 0;
        last = 0;
        for (int other = 0; other < a.batch; other++) {
            const bool before = shares[other] > shares[row] || (shares[other] == shares[row] && other < row);
            first += before ? splits[other] : 0;
            last += splits[other];
        }
        a.rows[2 * row] = first, a.rows[2 * row + 1] = splits[row];
        for (int split = 0; split < splits[row]; split++) {
            int *block = a.blocks + 4 * (first + split);
            block[0] = row, block[1] = split, block[2] = splits[row], block[3] = first;
        }
    }
    if (threadIdx.x >= 32) return;
    last = __shfl_sync(~0u, last, 0);
    for (int n = last + lane; n < a.num_blocks; n += 32) a.blocks[4 * n] = -1;
}
