// What a query sees, the kernel's argument, and how shares of a sequence become an answer.

#define MERGE_WARPS 8
#define LOWEST (-1e30f)  // no score yet; finite, so that differences are numbers

struct Bounds {
    int low, high;        // positions in [low, high) are read from pages, others there are not
    int first_at;         // position of the first query token
    int causal, window;
    float softcap;
};

__device__ __forceinline__ float seen(const Bounds &v, int at, int query_at, float s, int page) {
#if SOFTCAP
    // s is in log2 units: cap * tanh(x / cap) = cap * (1 - 2 / (1 + e^(2 x / cap)))
    const float e = exp2_fast(s * __fdividef(2.f, v.softcap));
    s = v.softcap * 1.4426950408889634f * (1.f - __fdividef(2.f, 1.f + e));
#endif
    bool ok = true;
    if (page) ok = at >= v.low && at < v.high;
    if (v.causal) ok = ok && at <= query_at;
    if (v.window > 0) ok = ok && at > query_at - v.window;
    return ok ? s : NEG_INF;
}

struct Rows {  // one kernel argument for all pointers and strides
    const void *query;
    const u8 *pages;
    const int *block_table, *lengths, *starts, *ring_starts, *sink_counts, *ring_rows, *first;
    const u16 *ring_key, *ring_value, *sink_key, *sink_value;
    const float *signs;
    float *partial, *partial_lse;  // of shares, where there are several
    u16 *out;
    float *lse;
    long long query_n, query_h, out_n, out_h, table_b, page_bytes, total_rows;
    float scale, softcap;
    int ring, sinks, splits, exact_shares, window, causal;
    int appended;  // the append right before this may still run, and nothing else
};

// Where in a stashed row a channel lies: the lanes of a store then have banks of their own.
__device__ __forceinline__ int place_of(int channel) {
    int r, x;
    if (D == 64) {
        r = ((channel >> 4) & 3) | (channel & 4);
        x = (channel >> 3) & 1;
    } else if (D == 128) {
        r = channel >> 4;
        x = (channel >> 2) & 3;
    } else {
        r = (channel >> 4) & 7;
        x = (channel >> 7) | ((channel >> 1) & 6);
    }
    return 8 * (4 * x + (channel & 3)) + r;
}

// A share's mean value and LSE (in log2 units) of one query.
__device__ __forceinline__ void write_share(const Rows &a, int share, long long row, int lane,
                                            const float (&o)[D / 32], float peak, float sum,
                                            float unit) {
    const long long place = (long long)share * a.total_rows * HQ + row;
    if (lane == 0) a.partial_lse[place] = sum > 0.f ? peak + log2f(sum) : NEG_INF;
    const float inverse = sum > 0.f ? unit / sum : 0.f;
#pragma unroll
    for (int k = 0; k < D / 32; k++) a.partial[place * D + lane + 32 * k] = o[k] * inverse;
}

// Sums over pages and over exact tokens, both in the order of `place_of` -> the answer.
__device__ __forceinline__ void write_answer(float *pages, float *exact, const float *signs,
                                             u16 *out, float *lse, int lane, float peak,
                                             float sum) {
    float x[D / 32], y[D / 32];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        const int place = place_of(lane + 32 * k);
        x[k] = pages[place], y[k] = exact[place];
    }
#if ROTATED
    hadamard(x, lane);
#pragma unroll
    for (int k = 0; k < D / 32; k++) x[k] *= ROOT * signs[lane + 32 * k];
#endif
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll
    for (int k = 0; k < D / 32; k++)
        out[lane + 32 * k] = (u16)pack_model((x[k] + y[k]) * inverse, 0.f);
    if (lane == 0) *lse = sum > 0.f ? (peak + log2f(sum)) * 0.6931471805599453f : NEG_INF;
}

// Queries after those of the last sequence, which no block and no merge answers.
__device__ __forceinline__ void clear_unowned(const Rows &a) {
    if (a.splits > 1 || blockIdx.x || blockIdx.z) return;
    for (long long n = a.first[gridDim.x / HKV]; n < a.total_rows; n++)
        for (int i = threadIdx.x; i < HQ * D; i += 32 * WARPS) {
            a.out[n * a.out_n + i / D * a.out_h + i % D] = 0;
            if (i % D == 0) a.lse[n * HQ + i / D] = NEG_INF;
        }
}

// A block a (query, head): weigh the shares, rotate those of the pages back, add the exact ones.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
merge(const float *partial, const float *partial_lse, const float *signs, const int *first,
      u16 *out, float *lse, long long out_n, long long out_h, long long total_rows, int batch,
      int splits, int shares) {
    __shared__ float sums[MERGE_WARPS][2][D], weights[MERGE_WARPS];
    wait_for_previous();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long row = blockIdx.x, step = total_rows * HQ;
    const bool owned = row < (long long)first[batch] * HQ;
    float peak = NEG_INF;
    if (owned)
        for (int s = lane; s < shares; s += 32) peak = fmaxf(peak, partial_lse[s * step + row]);
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, bit));
    const float base = peak == NEG_INF ? 0.f : peak;
    float sum = 0.f, pages[D / 32], exact[D / 32];
#pragma unroll
    for (int k = 0; k < D / 32; k++) pages[k] = exact[k] = 0.f;
    if (owned)
#pragma unroll 8
        for (int s = warp; s < shares; s += MERGE_WARPS) {
            const float w = exp2_fast(partial_lse[s * step + row] - base);
            const float *o = partial + (s * step + row) * D;
            sum += w;
#pragma unroll
            for (int k = 0; k < D / 32; k++) {
                const float x = w * o[lane + 32 * k];
                if (s < splits) pages[k] += x; else exact[k] += x;
            }
        }
    if (lane == 0) weights[warp] = sum;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        sums[warp][0][lane + 32 * k] = pages[k];
        sums[warp][1][lane + 32 * k] = exact[k];
    }
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; w++) {
        sum += weights[w];
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            pages[k] += sums[w][0][lane + 32 * k];
            exact[k] += sums[w][1][lane + 32 * k];
        }
    }
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        sums[0][0][lane + 32 * k] = pages[k];
        sums[0][1][lane + 32 * k] = exact[k];
    }
    write_answer(sums[0][0], sums[0][1], signs, out + (row / HQ) * out_n + (row % HQ) * out_h,
                 lse + row, lane, peak, sum);
}
