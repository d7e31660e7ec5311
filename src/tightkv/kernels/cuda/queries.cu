// The queries of a block: from the model's tensor to both frames in shared memory, to registers.

#define OWN_COLS (COLS / WARPS)  // that a warp prepares: every WARPS-th

struct Queries {  // a lane's part of them
    u16 raw[OWN_COLS][D / 32];
    float sign[D / 32];
};

__device__ __forceinline__ void load(Queries &q, const Rows &a, int begin, int count, int first_at,
                                     int head, int col0, int lane, int warp) {
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++) {
        const int col = col0 + warp + WARPS * i, token = col / G;
        const bool live = token < count && first_at + token >= 0;
        const u16 *at = (const u16 *)a.query + (long long)(begin + token) * a.query_n +
                        (long long)(head * G + col % G) * a.query_h;
#pragma unroll
        for (int k = 0; k < D / 32; k++) q.raw[i][k] = live ? at[lane + 32 * k] : (u16)0;
    }
#pragma unroll
    for (int k = 0; k < D / 32; k++) q.sign[k] = ROTATED ? a.signs[lane + 32 * k] : 1.f;
}

// Both frames of a block's queries to shared memory; returns what rotated scores are to be
// multiplied with to be in log2 units.
template <class Shared>
__device__ __forceinline__ float prepare(const Queries &q, Shared &sh, float scale, int lane,
                                         int warp) {
    float x[OWN_COLS][D / 32];
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++) {
        float top = 0.f;
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            ((u16 *)sh.query[1][warp + WARPS * i])[lane + 32 * k] = q.raw[i][k];
            x[i][k] = model_to_float(q.raw[i][k]) * q.sign[k];
        }
#if ROTATED
        hadamard(x[i], lane);
#endif
#pragma unroll
        for (int k = 0; k < D / 32; k++) top = fmaxf(top, fabsf(x[i][k]));
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
        if (lane == 0) sh.query_top[warp + WARPS * i] = top;
    }
    __syncthreads();
    // One factor for all columns: the largest component becomes 256.
    float top = 0.f;
#pragma unroll
    for (int n = 0; n < COLS; n++) top = fmaxf(top, sh.query_top[n]);
    top = top > 0.f ? top * (1.f / 256.f) : 1.f;
#pragma unroll
    for (int i = 0; i < OWN_COLS; i++)
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            ((u16 *)sh.query[0][warp + WARPS * i])[lane + 32 * k] =
                (u16)pack_half(__fdividef(x[i][k], top), 0.f);
    __syncthreads();
    return top * (ROTATED ? ROOT : 1.f) * scale * 1.4426950408889634f;
}

// A lane's part of the B operand.
__device__ __forceinline__ void load_queries(u32 (&q)[NT][KX][4], const u32 (*shared)[D / 2 + 4],
                                             int r, int c) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int x = 0; x < KX; x++)
#pragma unroll
            for (int k = 0; k < 4; k++)  // pairs 0 2 1 3: see mean_scores
                q[n][x][k] =
                    shared[8 * n + r][key_channel(x, c) / 2 + 2 * (k & 1) + (k >> 1)];
}
