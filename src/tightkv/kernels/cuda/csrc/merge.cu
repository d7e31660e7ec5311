// Merge the states of the splits of a sequence.

#include "output.cuh"

#define MERGE_WARPS 8

// One block for each (query, head): weigh the states, rotate those of the pages back, add the exact ones.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
merge(const float *partial, const float *partial_lse, const float *rotation, const u16 *value_center,
      const int *cu_seqlens, u16 *out, float *lse, long long out_n, long long out_h, long long total_rows, int batch,
      int num_splits, int num_partials) {
    __shared__ float sums[MERGE_WARPS][2][DP], weights[MERGE_WARPS];
    grid_dependency_wait();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long row = blockIdx.x, step = total_rows * HQ;
    const bool owned = row < (long long)cu_seqlens[batch] * HQ;
    float peak = NEG_INF;
    if (owned)
        for (int s = lane; s < num_partials; s += 32) peak = fmaxf(peak, partial_lse[s * step + row]);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, bit));
    const float base = peak == NEG_INF ? 0.f : peak;
    float sum = 0.f, pages[DP / 32], exact[DP / 32];
#pragma unroll
    for (int k = 0; k < DP / 32; k++) pages[k] = exact[k] = 0.f;
    if (owned)
#pragma unroll 8
        for (int s = warp; s < num_partials; s += MERGE_WARPS) {
            const float w = exp2_fast(partial_lse[s * step + row] - base);
            const float *o = partial + (s * step + row) * DP;
            sum += w;
#pragma unroll
            for (int k = 0; k < DP / 32; k++) {
                const float x = w * o[lane + 32 * k];
                if (s < num_splits) pages[k] += x; else exact[k] += x;
            }
        }
    if (lane == 0) weights[warp] = sum;
#pragma unroll
    for (int k = 0; k < DP / 32; k++) {
        sums[warp][0][lane + 32 * k] = pages[k];
        sums[warp][1][lane + 32 * k] = exact[k];
    }
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; w++) {
        sum += weights[w];
#pragma unroll
        for (int k = 0; k < DP / 32; k++) {
            pages[k] += sums[w][0][lane + 32 * k];
            exact[k] += sums[w][1][lane + 32 * k];
        }
    }
#pragma unroll
    for (int k = 0; k < DP / 32; k++) {
        sums[0][0][lane + 32 * k] = pages[k];
        sums[0][1][lane + 32 * k] = exact[k];
    }
    const u16 *center = value_center ? value_center + row % HQ / (HQ / HKV) * D : nullptr;
    write_output(sums[0][0], sums[0][1], rotation, center, out + (row / HQ) * out_n + (row % HQ) * out_h,
                 lse + row, lane, peak, sum);
}
