// The argument of the decode kernel, and what a query sees.
#pragma once

#include "model_dtype.cuh"
#include "ptx.cuh"

#define LOWEST (-1e30f)  // no score yet; finite, so that differences are numbers

struct MaskBounds {
    int low, high;        // positions in [low, high) are read from pages, others there are not
    int first_at;         // position of the first query token
    int causal, window;
    float softcap;
};

// A score in log2 units, with the softcap.
__device__ __forceinline__ float capped(const MaskBounds &v, float s) {
#if SOFTCAP
    // cap * tanh(x / cap) = cap * (1 - 2 / (1 + e^(2 x / cap)))
    const float e = exp2_fast(s * __fdividef(2.f, v.softcap));
    s = v.softcap * 1.4426950408889634f * (1.f - __fdividef(2.f, 1.f + e));
#endif
    return s;
}

__device__ __forceinline__ float masked_score(const MaskBounds &v, int at, int query_at, float s) {
    bool seen = true;
    if (v.causal) seen = at <= query_at;
    if (v.window > 0) seen = seen && at > query_at - v.window;
    return seen ? capped(v, s) : NEG_INF;
}

struct DecodeParams {  // one kernel argument for all pointers and strides
    const void *query;
    const u8 *pages;
    const int *block_table, *lengths, *left_pad, *ring_read_from, *sink_counts, *ring_rows, *cu_seqlens;
    const u16 *ring_key, *ring_value, *sink_key, *sink_value;
    const float *rotation;  // signs [D], or the matrices of the rotation and of its inverse [2, D, D]
    const u16 *value_center;  // [HKV, D] or null
    const int *blocks;  // of split_plan.cu: what blocks read; null: num_splits of each sequence
    float *partial, *partial_lse;  // of splits, where there are several: [split, max_queries, HQ, DP], without DP
    u16 *out;
    float *lse;
    long long query_n, query_h, out_n, out_h, table_b, page_bytes, total_rows;
    float scale, softcap;
    int ring, sinks, num_splits, window, causal;
    int overlaps_append;  // the append right before this may still run, and nothing else
    int table_pages;  // columns of the block table
    int batch, max_queries;
    const u16 *ring_scales;  // of a ring of codes: [rows, ring, HKV, key and value]
};
