// The epilogue: a block's shared memory, and how the states of its warps become the output or a split's state.
#pragma once

#include "exact_tile.cuh"
#include "output.cuh"
#include "queries.cuh"
#include "smem_pipeline.cuh"
#include "tile_softmax.cuh"

struct WarpState {  // what a warp found, in one frame
    float acc[COLS][DP + 4], peak[COLS], sum[COLS];
};

union WarpMemory {  // a warp's own memory: first for tiles, then for what it found
    Stage stage[STAGES];
    struct {
        WarpState pages, exact;
    } states;
};

struct SharedMemory {
    WarpMemory warp[WARPS];
    u32 query[2][COLS][DP / 2 + 4];  // rotated halves, and as they came
    QueryBytes query_bytes;
#if SHARED_QUERIES
    uint2 query_operands[LANE_COLS * KX][32];
#endif
    u64 barriers[WARPS][STAGES];  // of tiles on their way, where copies are bulk copies
    float query_top[COLS];
    u32 negative[DP / 32];  // signs of the rotation, a bit each
    LevelTable tables[2][2];  // of keys, of values; lanes read one of two, or the compiler takes them as uniform
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "kernels/cuda computes another size");

__device__ __forceinline__ float of_all_rows(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    return sum + __shfl_xor_sync(~0u, sum, 16);
}

__device__ __forceinline__ void store_state(const Accumulators &f, WarpState &to, int r, int c) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        const int column = lane_column(j, c);
        const float sum = of_all_rows(f.sum[j]);
        if (r == 0) to.peak[column] = f.peak[j], to.sum[column] = sum;
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    to.acc[column][8 * (4 * x + 2 * m + half) + r] = f.acc[x][m][half][j];
    }
}

__device__ __forceinline__ void store_state(const ExactAccumulators &st, WarpState &to, int r, int c) {
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int column = 8 * n + 2 * c + k;
            const float sum = of_all_rows(st.sum[n][k]);
            if (column >= COLS) continue;
            if (r == 0) to.peak[column] = st.peak[n][k], to.sum[column] = sum;
#pragma unroll
            for (int x = 0; x < VX; x++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        to.acc[column][8 * (4 * x + 2 * m + half) + r] =
                            st.acc[n][x][m][k + 2 * half];
        }
}

// A column of all warps: their sum relative to the highest peak, which is returned with the weight. A lane
// has neighbouring channels. Few columns wait for memory together: nothing is a branch.
#define MANY_COLUMNS (COLS > 8)
template <bool EXACT>
__device__ __forceinline__ void reduce_warps(const SharedMemory &sh, int n, int lane, float (&o)[DP / 32],
                                       float &peak, float &sum) {
    float found[WARPS], weight[WARPS];
    peak = LOWEST, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const WarpState &from = EXACT ? sh.warp[w].states.exact : sh.warp[w].states.pages;
        found[w] = from.sum[n];
        weight[w] = found[w] > 0.f ? from.peak[n] : LOWEST;
        peak = fmaxf(peak, weight[w]);
    }
#pragma unroll
    for (int k = 0; k < DP / 32; k++) o[k] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const WarpState &from = EXACT ? sh.warp[w].states.exact : sh.warp[w].states.pages;
        const bool some = found[w] > 0.f;  // or what is there is not a number
        if (MANY_COLUMNS && !some) continue;
        weight[w] = exp2_fast(weight[w] - peak);
        sum += some ? weight[w] * found[w] : 0.f;
        float x[DP / 32];
        load_vector(x, from.acc[n] + DP / 32 * lane);
#pragma unroll
        for (int k = 0; k < DP / 32; k++) o[k] += some ? weight[w] * x[k] : 0.f;
    }
}

// Merge the warps of a block: to the output where it has all of a sequence, else to its split's state.
__device__ __forceinline__ void epilogue(SharedMemory &sh, const DecodeParams &a, int split, int begin,
                                         int count, int head, int col0, int lane, int warp) {
    __syncthreads();
    float sign[LANE_CHANNELS];
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) sign[k] = sh.negative[k] >> lane & 1 ? -1.f : 1.f;
    constexpr int together = MANY_COLUMNS ? 1 : OWN_COLS < 2 ? OWN_COLS : 2;
#pragma unroll together
    for (int i = 0; i < OWN_COLS; i++) {
        const int n = warp + WARPS * i, col = col0 + n, token = col / G;
        if (!is_own(warp, i) || token >= count) continue;
        const int query_head = head * G + col % G;
        const long long row = (long long)(begin + token) * HQ + query_head;
        float o[DP / 32], e[DP / 32], peak, sum, exact_peak, exact_sum;
        reduce_warps<false>(sh, n, lane, o, peak, sum);
        reduce_warps<true>(sh, n, lane, e, exact_peak, exact_sum);
        if (a.num_splits > 1) {
            write_split(a, split, row, lane, o, peak, sum, VALUE_UNIT);
            if (split < a.num_exact_splits)
                write_split(a, a.num_splits + split, row, lane, e, exact_peak, exact_sum, 1.f);
            continue;
        }
        const float top = fmaxf(peak, exact_peak);
        const float w = sum > 0.f ? exp2_fast(peak - top) : 0.f;
        const float v = exact_sum > 0.f ? exp2_fast(exact_peak - top) : 0.f;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            sh.warp[0].states.pages.acc[n][DP / 32 * lane + k] = w * VALUE_UNIT * o[k];
            sh.warp[0].states.exact.acc[n][DP / 32 * lane + k] = v * e[k];
        }
        const u16 *center = a.value_center ? a.value_center + head * D : nullptr;
        write_output(sh.warp[0].states.pages.acc[n], sh.warp[0].states.exact.acc[n], sign, a.rotation, center,
                     a.out + (long long)(begin + token) * a.out_n + query_head * a.out_h,
                     a.lse + row, lane, top, w * sum + v * exact_sum);
    }
}
