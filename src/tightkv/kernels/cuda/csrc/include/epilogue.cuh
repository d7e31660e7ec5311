// The epilogue: a block's shared memory, and how the states of its warps become the output or a split's state.
#pragma once

#include "exact_tile.cuh"
#include "hadamard.cuh"
#include "output.cuh"
#include "queries.cuh"
#include "smem_pipeline.cuh"
#include "tile_softmax.cuh"

struct WarpState {  // what a warp found, in one frame
    float acc[COLS][DP + 4], peak[COLS], sum[COLS];
};

union WarpMemory {  // a warp's own memory, or a pair's: first for tiles, then for what it found
#if PAIRS
    PairStages stages;
#else
    Stage stage[STAGES];
#endif
    struct {
        WarpState pages, exact;
    } states;
};

static_assert(!EXACT_APART || (STAGES == 2 && sizeof(WarpState) <= sizeof(Stage)), "what pages gave would be lost");

struct SharedMemory {
    WarpMemory warp[WARPS];
    u32 query[2][COLS][DP / 2 + 4];  // rotated halves, and as they came
    QueryBytes query_bytes;
#if SHARED_QUERIES
    uint2 query_operands[LANE_COLS * KX][32];
#endif
#if PAIRS
    Handover handover[WARPS][2];
    PairBarriers barriers[WARPS];
#else
    u64 barriers[WARPS][STAGES];  // of tiles on their way, where copies are bulk copies
#endif
    float query_top[WARPS];
    u32 negative[DP / 32];  // signs of the rotation, a bit each
    LevelTable tables[2][2];  // of keys, of values; lanes read one of two, or the compiler takes them as uniform
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "kernels/cuda computes another size");

__device__ __forceinline__ float of_all_rows(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    return sum + __shfl_xor_sync(~0u, sum, 16);
}

__device__ __forceinline__ void store_state(const Peaks &f, WarpState &to, int r, int c) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++) {
        const int column = lane_column(j, c);
        const float sum = of_all_rows(f.sum[j]);
        if (r == 0) to.peak[column] = f.peak[j], to.sum[column] = sum;
    }
}

__device__ __forceinline__ void store_state(const Accumulators &f, WarpState &to, int r, int c) {
#pragma unroll
    for (int j = 0; j < LANE_COLS; j++)
#pragma unroll
        for (int x = 0; x < VX; x++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    to.acc[lane_column(j, c)][8 * (4 * x + 2 * m + half) + r] = f.acc[x][m][half][j];
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

#define STATES (WARPS <= 4 ? 8 : WARPS <= 8 ? 16 : 32)  // of a column, or a few more: a lane has one's peak
static_assert(2 * WARPS <= STATES, "too many warps");

// A state of a column, at a weight.
__device__ __forceinline__ void add_state(float (&o)[DP / 32], const float *state, float weight) {
    float x[DP / 32];
    load_vector(x, state);
#pragma unroll
    for (int k = 0; k < DP / 32; k++) o[k] += weight > 0.f ? weight * x[k] : 0.f;
}

// Columns that a warp merges at once: their loads and shuffles wait for one another's.
#define MERGED_COLS (OWN_COLS * DP <= 256 ? OWN_COLS : DP <= 128 ? 256 / DP : 1)

// The i-th of them, or the first again where there are fewer.
__device__ __forceinline__ int own_column(int first, int i) {
    return first + WARPS * i < COLS ? first + WARPS * i : first;
}

// The weights of all states of a warp's columns, state `lane % STATES` of each in a lane; `top` and `sum` are of all.
__device__ __forceinline__ void weigh_states(const SharedMemory &sh, int first, float (&top)[MERGED_COLS],
                                             float (&sum)[MERGED_COLS], float (&weight)[MERGED_COLS], int lane) {
#pragma unroll
    for (int i = 0; i < MERGED_COLS; i++) {
        const int state = lane % STATES, n = own_column(first, i);
        const auto &states = sh.warp[state / 2 % WARPS].states;
        const WarpState &own = state % 2 ? states.exact : states.pages;
        sum[i] = state < 2 * WARPS ? own.sum[n] : 0.f;
        weight[i] = sum[i] > 0.f ? own.peak[n] : LOWEST;  // or what is there is not a number
        top[i] = weight[i];
    }
    most_of<STATES>(top);
#pragma unroll
    for (int i = 0; i < MERGED_COLS; i++) {
        weight[i] = sum[i] > 0.f ? exp2_fast(weight[i] - top[i]) : 0.f;
        sum[i] = sum[i] > 0.f ? weight[i] * sum[i] : 0.f;
    }
    sum_of<STATES>(sum);
}

// The states of a warp's columns at their weights, those of pages and of exact tokens apart; to where the first
// warp's states were.
__device__ __forceinline__ void merge_states(SharedMemory &sh, int first, int end, const float (&weight)[MERGED_COLS],
                                             int lane) {
    float o[MERGED_COLS][DP / 32], e[MERGED_COLS][DP / 32];  // of neighbouring channels
#pragma unroll
    for (int i = 0; i < MERGED_COLS; i++)
#pragma unroll
        for (int k = 0; k < DP / 32; k++) o[i][k] = e[i][k] = 0.f;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) {
        const auto &states = sh.warp[w].states;
#pragma unroll
        for (int i = 0; i < MERGED_COLS; i++) {
            const int n = own_column(first, i);
            add_state(o[i], states.pages.acc[n] + DP / 32 * lane, __shfl_sync(~0u, weight[i], 2 * w));
            add_state(e[i], states.exact.acc[n] + DP / 32 * lane, __shfl_sync(~0u, weight[i], 2 * w + 1));
        }
    }
#pragma unroll
    for (int i = 0; i < MERGED_COLS; i++) {
        const int n = first + WARPS * i;
        if (n >= end) continue;
        store_vector(sh.warp[0].states.pages.acc[n] + DP / 32 * lane, o[i]);
        store_vector(sh.warp[0].states.exact.acc[n] + DP / 32 * lane, e[i]);
    }
    __syncwarp();
}

// What pages gave for a warp's columns, back in the model's frame; but for ROOT and signs of a Hadamard rotation.
__device__ __forceinline__ void rotate_back(const SharedMemory &sh, const float *rotation, int first,
                                            float (&x)[MERGED_COLS][LANE_CHANNELS], int lane) {
#pragma unroll
    for (int i = 0; i < MERGED_COLS; i++) {
        const float *pages = sh.warp[0].states.pages.acc[own_column(first, i)];
#pragma unroll
        for (int k = 0; k < LANE_CHANNELS; k++) x[i][k] = VALUE_UNIT * pages[state_slot(lane + 32 * k)];
    }
#if HADAMARD
    hadamard(x, lane);
#elif DENSE
#pragma unroll
    for (int i = 0; i < MERGED_COLS; i++) multiply<float>(x[i], rotation + D * D, lane);
#endif
}

// A query's head as the state of split `split`.
__device__ __forceinline__ void write_partial(const DecodeParams &a, const float (&x)[LANE_CHANNELS], int split,
                                              int token, int query_head, float top, float sum, int lane) {
    const long long place = ((long long)split * a.max_queries + token) * HQ + query_head;
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++)
        if (THERE(k)) a.partial[place * DP + lane + 32 * k] = x[k];
    if (lane == 0) a.partial_lse[place] = sum > 0.f ? top + log2_fast(sum) : NEG_INF;
}

// A query's head to the output.
__device__ __forceinline__ void write_output(const DecodeParams &a, const float (&x)[LANE_CHANNELS], int query,
                                             int query_head, int head, float top, float sum, int lane) {
    u16 *out = a.out + (long long)query * a.out_n + query_head * a.out_h;
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++)
        if (THERE(k)) write_channel(out, a.value_center, head, lane + 32 * k, x[k]);
    if (lane == 0) write_lse(a.lse + (long long)query * HQ + query_head, top, sum);
}

// Merge the warps of a block: to the output where it has all of a sequence, else to its split's, which has the
// number `split` among those of all sequences. Few instructions: fetching them takes longer than they do.
__device__ __forceinline__ void epilogue(SharedMemory &sh, const DecodeParams &a, int split, int splits, int begin,
                                         int count, int head, int col0, int lane, int warp) {
    const int end = min(COLS, min(count, a.max_queries) * G - col0);  // splits have room for so many queries
    __syncthreads();
#pragma unroll 1
    for (int first = warp; first < end; first += WARPS * MERGED_COLS) {
        float top[MERGED_COLS], sum[MERGED_COLS], weight[MERGED_COLS], x[MERGED_COLS][LANE_CHANNELS];
        weigh_states(sh, first, top, sum, weight, lane);
        merge_states(sh, first, end, weight, lane);
        rotate_back(sh, a.rotation, first, x, lane);
#pragma unroll
        for (int i = 0; i < MERGED_COLS; i++) {
            const int n = first + WARPS * i, token = (col0 + n) / G, query_head = head * G + (col0 + n) % G;
            if (n >= end) break;
            const float *exact = sh.warp[0].states.exact.acc[n];
            const float inverse = sum[i] > 0.f ? __fdividef(1.f, sum[i]) : 0.f;
#pragma unroll
            for (int k = 0; k < LANE_CHANNELS; k++) {
                if (HADAMARD) x[i][k] *= sh.negative[k] >> lane & 1 ? -ROOT : ROOT;
                x[i][k] = (x[i][k] + exact[state_slot(lane + 32 * k)]) * inverse;
            }
            if (splits > 1)
                write_partial(a, x[i], split, token, query_head, top[i], sum[i], lane);
            else
                write_output(a, x[i], begin + token, query_head, head, top[i], sum[i], lane);
        }
    }
}
