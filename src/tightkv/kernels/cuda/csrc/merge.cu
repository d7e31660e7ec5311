// Merge the states of the splits of a sequence.

#include "output.cuh"

#define MERGE_WARPS 8
#define MERGE_AHEAD (COLS > 8 ? 0 : 4)  // states that a warp loads at once

// One block for each (query, head): weigh the states, rotate those of the pages back, add the exact ones.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
merge(const float *partial, const float *partial_lse, const float *rotation, const u16 *value_center,
      const int *cu_seqlens, u16 *out, float *lse, long long out_n, long long out_h, long long total_rows, int batch,
      int num_splits, int num_partials) {
    __align__(16) __shared__ float sums[MERGE_WARPS][2][DP], weights[MERGE_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float sign[LANE_CHANNELS];
#pragma unroll
    for (int k = 0; k < LANE_CHANNELS; k++) sign[k] = HADAMARD ? rotation[lane + 32 * k] : 1.f;
    grid_dependency_wait();
    const long long row = blockIdx.x, step = total_rows * HQ;
    if (row >= (long long)cu_seqlens[batch] * HQ) num_partials = 0;  // nobody's
    // The first states of a warp are on their way while the LSEs of all are compared.
    float first[MERGE_AHEAD + 1][DP / 32];
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++)
        if (warp + MERGE_WARPS * i < num_partials)
            load_vector(first[i], partial + ((warp + MERGE_WARPS * i) * step + row) * DP + DP / 32 * lane);
    float peak = NEG_INF;
    for (int s = lane; s < num_partials; s += 32) peak = fmaxf(peak, partial_lse[s * step + row]);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, bit));
    const float base = peak == NEG_INF ? 0.f : peak;
    float sum = 0.f, pages[DP / 32], exact[DP / 32];
#pragma unroll
    for (int k = 0; k < DP / 32; k++) pages[k] = exact[k] = 0.f;
    const auto add = [&](int s, const float(&o)[DP / 32]) {
        const float w = exp2_fast(partial_lse[s * step + row] - base);
        sum += w;
#pragma unroll
        for (int k = 0; k < DP / 32; k++)
            if (s < num_splits) pages[k] += w * o[k]; else exact[k] += w * o[k];
    };
#pragma unroll
    for (int i = 0; i < MERGE_AHEAD; i++)
        if (warp + MERGE_WARPS * i < num_partials) add(warp + MERGE_WARPS * i, first[i]);
#pragma unroll 8
    for (int s = warp + MERGE_WARPS * MERGE_AHEAD; s < num_partials; s += MERGE_WARPS) {
        float o[DP / 32];
        load_vector(o, partial + (s * step + row) * DP + DP / 32 * lane);
        add(s, o);
    }
    if (lane == 0) weights[warp] = sum;
    store_vector(sums[warp][0] + DP / 32 * lane, pages);
    store_vector(sums[warp][1] + DP / 32 * lane, exact);
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; w++) {
        sum += weights[w];
        float x[DP / 32], y[DP / 32];
        load_vector(x, sums[w][0] + DP / 32 * lane);
        load_vector(y, sums[w][1] + DP / 32 * lane);
#pragma unroll
        for (int k = 0; k < DP / 32; k++) pages[k] += x[k], exact[k] += y[k];
    }
    store_vector(sums[0][0] + DP / 32 * lane, pages);
    store_vector(sums[0][1] + DP / 32 * lane, exact);
    const u16 *center = value_center ? value_center + row % HQ / (HQ / HKV) * D : nullptr;
    write_output(sums[0][0], sums[0][1], sign, rotation, center, out + (row / HQ) * out_n + (row % HQ) * out_h,
                 lse + row, lane, peak, sum);
}
