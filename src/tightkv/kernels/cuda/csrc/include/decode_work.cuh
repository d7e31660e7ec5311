// What a block and each of its warps read: a split of a sequence for one KV head, tiles of pages, exact tokens.
#pragma once

#include "decode_params.cuh"
#include "exact_tile.cuh"
#include "ring_tile.cuh"
#include "page_codes.cuh"

struct Split {
    int row, head;            // sequence, KV head
    int index, count, first;  // among the splits of the sequence; number of the first of these among all
};

// False where split_plan.cu has nothing for this block.
__device__ __forceinline__ bool find_split(const DecodeParams &a, Split &x) {
    x.head = blockIdx.x % HKV, x.row = blockIdx.x / HKV;
    x.index = blockIdx.y, x.count = a.num_splits, x.first = x.row * x.count;
    if (a.blocks) {
        const int *own = a.blocks + 4 * blockIdx.y;
        x.row = load_now(own), x.index = load_now(own + 1), x.count = load_now(own + 2), x.first = load_now(own + 3);
        return x.row >= 0;
    }
    return true;
}

struct Sequence {
    int begin, count;  // its queries
    int length, start;
    int ring_read_from, ring_row, sinks_end;
};

__device__ __forceinline__ Sequence load_sequence(const DecodeParams &a, int row) {
    Sequence x;
    x.begin = load_now(a.cu_seqlens + row), x.count = load_now(a.cu_seqlens + row + 1) - x.begin;
    x.length = load_now(a.lengths + row), x.start = load_now(a.left_pad + row);
    x.ring_read_from = load_now(a.ring_read_from + row), x.ring_row = load_now(a.ring_rows + row);
    x.sinks_end = min(x.start + load_now(a.sink_counts + row), x.ring_read_from);
    return x;
}

// Position of the first token that a column sees: pages of those before may be another sequence's.
__device__ __forceinline__ int first_seen(const DecodeParams &a, const Sequence &x, int first_col_at) {
    return a.window > 0 ? max(x.start, first_col_at - a.window + 1) : x.start;
}

__device__ __forceinline__ MaskBounds mask_bounds(const DecodeParams &a, const Sequence &x, int low) {
    MaskBounds v;
    v.first_at = x.length - x.count;
    v.causal = a.causal, v.window = a.window, v.softcap = a.softcap;
    v.low = max(x.sinks_end, low), v.high = x.ring_read_from;
    return v;
}

__device__ __forceinline__ Exact find_exact(const DecodeParams &a, const Sequence &x, int head, int low) {
    Exact exact;
    exact.start = low, exact.ring_from = max(x.ring_read_from, low), exact.ring = a.ring;
    exact.sinks = max(x.sinks_end - low, 0);
    exact.count = exact.sinks + (RING_CODES ? 0 : max(x.length - exact.ring_from, 0));
    exact.first_slot = exact.ring_from % max(a.ring, 1);
    const long long sink_at = ((long long)(x.ring_row * a.sinks + low - x.start) * HKV + head) * D;
    const long long ring_at = ((long long)x.ring_row * a.ring * HKV + head) * D;
    exact.sink_key = a.sink_key + sink_at, exact.sink_value = a.sink_value + sink_at;
    exact.ring_key = a.ring_key + ring_at, exact.ring_value = a.ring_value + ring_at;
    return exact;
}

// The tokens of a ring of codes that are read.
__device__ __forceinline__ Ring find_ring(const DecodeParams &a, const Sequence &x, int head, int low) {
    Ring ring;
    const long long at = (long long)x.ring_row * a.ring * HKV + head;
    ring.from = max(x.ring_read_from, low), ring.count = max(x.length - ring.from, 0), ring.slots = a.ring;
    ring.first_slot = ring.from % max(a.ring, 1);
    ring.key = (const u8 *)a.ring_key + at * (D * 3 / 2), ring.value = (const u8 *)a.ring_value + at * D;
    ring.scales = (const u8 *)(a.ring_scales + 2 * at);
    return ring;
}

// The warps of all splits have a run of tiles each, and take groups of exact tokens in turn.
struct WarpWork {
    int page_from, page_to;      // of the sequence
    int tile, tile_end;          // of the warp
    int group, groups, workers;  // first group of exact tokens, all of them, warps that share them
    int ring_group, ring_groups;  // of a ring of codes

    // So many of its tokens. Sinks are for the warp after the last one of the ring.
    __device__ __forceinline__ void take_ring(int tokens) {
        ring_group = group, ring_groups = (tokens + EXACT_TOKENS - 1) / EXACT_TOKENS;
        group -= ring_groups % workers;
        if (group < 0) group += workers;
    }
};

__device__ __forceinline__ WarpWork find_work(const Split &split, const Exact &exact, int low, int high, int warp) {
    WarpWork x;
    x.page_from = low / PAGE, x.page_to = (high + PAGE - 1) / PAGE;
    const int tile_from = x.page_from * TILES / SPAN, tile_to = (x.page_to * TILES + SPAN - 1) / SPAN;
    x.groups = (exact.count + EXACT_TOKENS - 1) / EXACT_TOKENS;
    const int tiles = x.page_from < x.page_to ? tile_to - tile_from : 0;
    x.workers = split.count * WARPS, x.group = split.index * WARPS + warp;
    x.tile = tile_from + tiles * x.group / x.workers;
    x.tile_end = tile_from + tiles * (x.group + 1) / x.workers;
    return x;
}
