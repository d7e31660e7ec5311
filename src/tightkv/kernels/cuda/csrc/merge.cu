// Merge the splits of a sequence.

#include "output.cuh"

#define MERGE_WARPS 8
#define MERGE_AHEAD 4  // splits that a warp loads at once

// One query of a sequence, at most `max_queries` of it, and one of its heads: the splits from `first_split` on.
__device__ __forceinline__ void merge_head(const float *partial, const float *partial_lse, const u16 *value_center,
                                           u16 *out, float *lse, int max_queries, int num_splits, int first_split,
                                           int token, int query_head) {
    __align__(16) __shared__ float sums[MERGE_WARPS][DP], weights[MERGE_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long place = ((long long)first_split * max_queries + token) * HQ + query_head, step = max_queries * HQ;
    // The first splits of a warp are on their way while the LSEs of all are compared.
    float first[MERGE_AHEAD][DP / 32], own[MERGE_AHEAD];
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++) {
        const int s = warp + MERGE_WARPS * i;
        own[i] = NEG_INF;
        if (s >= num_splits) continue;
        own[i] = partial_lse[s * step + place];
        load_vector(first[i], partial + (s * step + place) * DP + DP / 32 * lane);
    }
    float peak = NEG_INF;
    for (int s = lane; s < num_splits; s += 32) peak = fmaxf(peak, partial_lse[s * step + place]);
    peak = most_of<32>(peak);
    const float base = peak == NEG_INF ? 0.f : peak;
    float sum = 0.f, o[DP / 32];
#pragma unroll
    for (int k = 0; k < DP / 32; k++) o[k] = 0.f;
    const auto add = [&](float lse, const float(&x)[DP / 32]) {
        const float weight = exp2_fast(lse - base);
        sum += weight;
#pragma unroll
        for (int k = 0; k < DP / 32; k++) o[k] += weight * x[k];
    };
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++)
        if (warp + MERGE_WARPS * i < num_splits) add(own[i], first[i]);
#pragma unroll 1
    for (int s = warp + MERGE_WARPS * MERGE_AHEAD; s < num_splits; s += MERGE_WARPS) {
        float x[DP / 32];
        load_vector(x, partial + (s * step + place) * DP + DP / 32 * lane);
        add(partial_lse[s * step + place], x);
    }
    if (lane == 0) weights[warp] = sum;
    store_vector(sums[warp] + DP / 32 * lane, o);
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) sum += weights[w];
    const float inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
    for (int channel = threadIdx.x; channel < D; channel += 32 * MERGE_WARPS) {
        float x = 0.f;
#pragma unroll
        for (int w = 0; w < MERGE_WARPS; w++) x += sums[w][channel];
        write_channel(out, value_center, query_head / G, channel, x * inverse);
    }
    if (threadIdx.x == 0) write_lse(lse, peak, sum);
    __syncthreads();  // what is in shared memory has been read
}

// A block has a query and `heads` of its heads, one after another: several where there are so many queries that
// most need no merge.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
merge(const float *partial, const float *partial_lse, const u16 *value_center, const int *row_splits,
      const int *cu_seqlens, u16 *out, float *lse, long long out_n, long long out_h, int max_queries, int num_splits,
      int heads) {
    const int blocks = HQ / heads, sequence = blockIdx.x / (max_queries * blocks);
    const int token = blockIdx.x / blocks % max_queries, first_head = blockIdx.x % blocks * heads;
    const int begin = load_now(cu_seqlens + sequence), end = load_now(cu_seqlens + sequence + 1);
    int first_split = sequence * num_splits;
    if (row_splits) {
        first_split = load_now(row_splits + 2 * sequence);
        num_splits = load_now(row_splits + 2 * sequence + 1);
    }
    grid_dependency_wait();
    if (token >= end - begin || num_splits == 1) return;  // nobody's, or there is nothing to merge
    const long long query = begin + token;
#pragma unroll 1
    for (int head = first_head; head < first_head + heads; head++)
        merge_head(partial, partial_lse, value_center, out + query * out_n + head * out_h, lse + query * HQ + head,
                   max_queries, num_splits, first_split, token, head);
}
