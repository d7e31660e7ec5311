// Decode attention over compressed pages: a block has a split of one sequence and KV head.
//
// Each warp has a run of tiles of that split and works alone until the end: the next tile is on its way to
// shared memory (cp.async) while it decodes the present one, multiplies keys with the queries,
// transposes the weights (movmatrix) and multiplies them with the values. Products are of bytes: levels
// of codes are small whole numbers, and as bytes they need no conversion.

#include "accumulate_values.cuh"
#include "attend_ring.cuh"
#include "epilogue.cuh"
#include "score_tile.cuh"
#include "tile_copies.cuh"

// The warp's tiles of pages, in turn; `factor` makes log2 units of scores. Returns the stage after the last one's.
__device__ __forceinline__ int attend_pages(Accumulators &f, SharedMemory &sh, TileCopies &copies, const WarpWork &work,
                                            const QueryOperands &q, const MaskBounds &v, int col0, float factor,
                                            int lane, int warp) {
    const int r = lane >> 2, c = lane & 3;
    SumStart key_start, value_start;
    start_key_sums(key_start, q);
    clear(value_start);
    const LevelTable key_table = reload(sh.tables[0][lane & 1]);
    const LevelTable value_table = VALUE_BITS == KEY_BITS ? key_table : reload(sh.tables[1][lane & 1]);
    const float key_unit = KEY_UNIT * factor * BYTE_UNIT, score_unit = SOFTCAP ? 1.f : key_unit;
    const WholeTiles whole = whole_tiles(v, col0, work.tile_end);
    float bias[SPAN][LANE_COLS];
    int stage = 0;
    u32 odd = 0;  // round of the stage
    [[maybe_unused]] bool new_page = true;  // only where a tile is part of one
    for (int t = work.tile; t < work.tile_end; t++) {
        copies.copy_next(false);
        copies.wait(stage, odd);
        const Stage &tile = sh.warp[warp].stage[stage];
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        odd ^= stage == 0;
        const bool edge = t < whole.from || t >= whole.to;
        uint2 value_scale[TB];
#pragma unroll
        for (int b = 0; b < TB; b++) value_scale[b] = tile.page[b / BP].value_scale[b % BP][r];
        if (edge) mask_scales(v, value_scale, t * 32 * TB, r);
        const float largest_scale = max_scale(value_scale);
#if MEAN_BITS > 0
        if (SPAN > 1 || new_page) mean_scores_of_tile(bias, tile, q, sh.query[0], r, c);
#endif
        new_page = (t + 1) % TILES == 0;
        float s[LANE_COLS][4 * TB];
        score_tile(s, tile, q, key_start, key_table, bias, key_unit, r, c, lane);
        if (edge) mask_scores(v, s, t * 32 * TB, col0, r, c);
        ValueBlock codes[TB];
        load_values(codes, tile, lane);
        u32 weights[TB][LANE_COLS][2];
        float scale[LANE_COLS];
        online_softmax(f, s, score_unit, value_scale, largest_scale, weights, scale);
        accumulate_values(f, codes, tile, weights, scale, value_start, value_table, r, lane);
    }
    return stage;
}

// The warp's groups of a ring of codes, the first of which is at `stage`. Returns the stage after the last one's.
__device__ __forceinline__ int attend_ring_groups(Accumulators &f, SharedMemory &sh, TileCopies &copies,
                                                  const WarpWork &work, const QueryOperands &q, const Ring &ring,
                                                  const MaskBounds &v, int stage, int col0, float factor, int lane,
                                                  int warp) {
    for (int group = work.ring_group; group < work.ring_groups; group += work.workers) {
        copies.copy_after_tiles();
        cp_async_commit();
        cp_async_wait<STAGES - 1>();  // tokens of the ring
        __syncwarp();  // lanes read tokens of the ring that others copied
        attend_ring(f, sh.warp[warp].stage[stage].ring, q, ring, EXACT_TOKENS * group, v, col0, factor * BYTE_UNIT,
                    lane >> 2, lane & 3);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    return stage;
}

// The warp's groups of exact tokens, the first of which is at `stage`.
__device__ __forceinline__ void attend_exact_groups(ExactAccumulators &st, SharedMemory &sh, TileCopies &copies,
                                                    const WarpWork &work, const Exact &exact, const MaskBounds &v,
                                                    int stage, int col0, float scale, int lane, int warp) {
    const int r = lane >> 2, c = lane & 3;
    if (work.group >= work.groups) return;
    for (int group = work.group; group < work.groups; group += work.workers) {
        if (EXACT_APART) copies.stage = stage = 1;
        copies.copy_exact_tokens();
        cp_async_commit();
        cp_async_wait<EXACT_APART ? 0 : STAGES - 1>();  // exact tokens
        __syncwarp();  // lanes read exact tokens that others copied
        attend_exact(st, sh.warp[warp].stage[stage].exact, sh.query[1], exact, EXACT_TOKENS * group, v, col0, r, c,
                     scale);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const DecodeParams a) {
    extern __shared__ __align__(128) char memory[];
    SharedMemory &sh = *(SharedMemory *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int r = lane >> 2, c = lane & 3;
    if (!a.overlaps_append) grid_dependency_wait();
    Split split;
    if (!find_split(a, split)) {
        if (a.overlaps_append) grid_dependency_wait();  // the next kernel waits for this one, and so for the append
        return;
    }
    const int *table = a.block_table + split.row * a.table_b;
    const int first_ids = PageIds::load_first(a, table, lane);
    const Sequence x = load_sequence(a, split.row);
    const int col0 = blockIdx.z * COLS;
    if (col0 >= x.count * G) {
        if (a.overlaps_append) grid_dependency_wait();
        clear_unused_queries(a);
        return;
    }
    const int low = first_seen(a, x, x.length - x.count + col0 / G);
    const MaskBounds v = mask_bounds(a, x, low);
    const Exact exact = find_exact(a, x, split.head, low);
    WarpWork work = find_work(split, exact, low, x.ring_read_from, warp);
    Ring ring = {};
    if (RING_CODES) {
        ring = find_ring(a, x, split.head, low);
        work.take_ring(ring.count);
    }

    // The first tiles are on their way while the queries are prepared.
    const PageIds ids(table, first_ids, work, lane);
    Queries queries;
    load(queries, a, x.begin, x.count, v.first_at, split.head, col0, lane, warp);
    TileCopies copies(a, work, exact, ring, ids, split.head, sh.warp[warp].stage, sh.barriers[warp], lane);
    // Pages are read from here on. The append before may write those of this sequence from the first new token's on;
    // and, of a sequence that has no exact tokens from before yet, any: it may share what another one completes now.
    if (a.overlaps_append && x.ring_read_from > (v.first_at - 1) / PAGE * PAGE) grid_dependency_wait();
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) copies.copy_next(k == 0);
    if (threadIdx.x < 2) {
        sh.tables[0][lane] = {KEY_TABLE};
        sh.tables[1][lane] = {VALUE_TABLE};
    }
    const float factor = prepare(queries, sh, a.scale, a.rotation, lane, warp);

    Accumulators f;
    clear(f);
    QueryOperands q;
    load_query_bytes(q, sh, lane, warp);
    int stage = attend_pages(f, sh, copies, work, q, v, col0, factor, lane, warp);
    if (RING_CODES) stage = attend_ring_groups(f, sh, copies, work, q, ring, v, stage, col0, factor, lane, warp);
    if (a.overlaps_append) grid_dependency_wait();  // outputs are written from here on
    launch_dependents();
    clear_unused_queries(a);
    ExactAccumulators st;
    clear(st);
    if (EXACT_APART) {
        __syncwarp();  // the last tile has been read by all lanes
        store_state(f, sh.warp[warp].states.pages, r, c);
    }
    attend_exact_groups(st, sh, copies, work, exact, v, stage, col0, a.scale, lane, warp);
    __syncwarp();  // the last tokens have been read by all lanes
    if (!EXACT_APART) store_state(f, sh.warp[warp].states.pages, r, c);
    store_state(st, sh.warp[warp].states.exact, r, c);
    epilogue(sh, a, split.first + split.index, split.count, x.begin, x.count, split.head, col0, lane, warp);
}
