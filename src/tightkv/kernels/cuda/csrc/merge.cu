// Merge the splits of each query and head.

#include "output.cuh"

#define MERGE_WARPS 8

// What splits gave for a query and a head, `step` of them apart.
struct Splits {
    const float *partial, *lse;
    int count;  // at most 64: a lane has the LSEs of two
    long long step;
};

// Sum of the splits from `from` on, every `stride`-th; a lane has neighbouring channels. Weights are relative to the
// largest LSE of all, `sum` is that of all weights. Few instructions: fetching them takes longer than they do.
__device__ __forceinline__ void merge_splits(const Splits &x, int from, int stride, int lane, float (&o)[DP / 32],
                                             float &sum, float &peak) {
    float first[MERGE_AHEAD][DP / 32];  // on their way while LSEs are compared
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++)
        if (from + stride * i < x.count)
            load_vector(first[i], x.partial + (from + stride * i) * x.step * DP + DP / 32 * lane);
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) weight[i] = lane + 32 * i < x.count ? x.lse[(lane + 32 * i) * x.step] : NEG_INF;
    float top[1] = {fmaxf(weight[0], weight[1])};
    most_of<32>(top);
    peak = top[0];
    const float base = peak == NEG_INF ? 0.f : peak;
#pragma unroll
    for (int i = 0; i < 2; i++) weight[i] = exp2_fast(weight[i] - base);
    float all[1] = {weight[0] + weight[1]};
    sum_of<32>(all);
    sum = all[0];
#pragma unroll
    for (int k = 0; k < DP / 32; k++) o[k] = 0.f;
    const auto add = [&](int split, const float(&one)[DP / 32]) {
        const float own = __shfl_sync(~0u, split < 32 ? weight[0] : weight[1], split & 31);
#pragma unroll
        for (int k = 0; k < DP / 32; k++) o[k] += own * one[k];
    };
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++)
        if (from + stride * i < x.count) add(from + stride * i, first[i]);
#pragma unroll 1
    for (int s = from + stride * MERGE_AHEAD; s < x.count; s += stride) {
        float one[DP / 32];
        load_vector(one, x.partial + s * x.step * DP + DP / 32 * lane);
        add(s, one);
    }
}

// A block has a query, which is the `token`-th of at most `max_queries` of its sequence, and `heads` of its heads:
// a warp has one of them if splits are few, else all warps have one after another.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32, DP <= 128 ? 4 : 2)
merge(const float *partial, const float *partial_lse, const u16 *value_center, const int *row_splits,
      const int *cu_seqlens, u16 *out, float *lse, long long out_n, long long out_h, int max_queries, int num_splits,
      int heads) {
    __align__(16) __shared__ float sums[MERGE_WARPS][DP];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
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
    const long long query = begin + token, first_place = ((long long)first_split * max_queries + token) * HQ;
    const bool few = num_splits <= MERGE_AHEAD;
#pragma unroll 1
    for (int head = first_head + (few ? warp : 0); head < first_head + heads; head += few ? MERGE_WARPS : 1) {
        const Splits splits = {partial + (first_place + head) * DP, partial_lse + first_place + head, num_splits,
                               (long long)max_queries * HQ};
        float o[DP / 32], sum, peak;
        merge_splits(splits, few ? 0 : warp, few ? 1 : MERGE_WARPS, lane, o, sum, peak);
        store_vector(sums[warp] + DP / 32 * lane, o);
        if (few)
            __syncwarp();
        else
            __syncthreads();
        const float inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
        u16 *to = out + query * out_n + head * out_h;
        for (int channel = few ? lane : threadIdx.x; channel < D; channel += few ? 32 : 32 * MERGE_WARPS) {
            float x = 0.f;
            if (few) {
                x = sums[warp][channel];
            } else {
#pragma unroll
                for (int w = 0; w < MERGE_WARPS; w++) x += sums[w][channel];
            }
            write_channel(to, value_center, head / G, channel, x * inverse);
        }
        if (few ? lane == 0 : threadIdx.x == 0) write_lse(lse + query * HQ + head, peak, sum);
        if (few)  // what is in shared memory has been read
            __syncwarp();
        else
            __syncthreads();
    }
}
