// Decode attention over compressed pages: a block has a split of one sequence and KV head.
//
// Each warp has a run of tiles of that split and works alone until the end: the next tile is on its way to
// shared memory (cp.async) while it decodes the present one, multiplies keys with the queries,
// transposes the weights (movmatrix) and multiplies them with the values. Products are of bytes: levels
// of codes are small whole numbers, and as bytes they need no conversion.

#include "accumulate_values.cuh"
#include "epilogue.cuh"
#include "score_tile.cuh"
#include "tile_copies.cuh"

// What a warp needs for scores, through all its tiles.
struct Scorer {
    QueryOperands q;
    SumStart start;
    LevelTable table;
    float key_unit, score_unit;
    WholeTiles whole;
    float bias[SPAN][LANE_COLS];
    bool new_page = true;  // only where a tile is part of one

    // `factor` makes log2 units of scores.
    __device__ __forceinline__ Scorer(SharedMemory &sh, const MaskBounds &v, int col0, int tile_end, float factor,
                                      int lane, int warp)
        : key_unit(KEY_UNIT * factor * BYTE_UNIT), score_unit(SOFTCAP ? 1.f : key_unit),
          whole(whole_tiles(v, col0, tile_end)) {
        load_query_bytes(q, sh, lane, warp);
        start_key_sums(start, q);
        table = reload(sh.tables[0][lane & 1]);
    }

    // The weights of tile t as bytes, and `scale`, which makes those of the accumulators of their sums; `sums` is
    // told where peaks were raised. `meanwhile` is done before the softmax.
    template <class Tile, class Sums, class Meanwhile>
    __device__ __forceinline__ void weigh(Peaks &f, Sums &sums, SharedMemory &sh, const Tile &tile, const MaskBounds &v,
                                          int t, int col0, u32 (&weights)[TB][LANE_COLS][2], float (&scale)[LANE_COLS],
                                          int lane, const Meanwhile &meanwhile) {
        const int r = lane >> 2, c = lane & 3;
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
        score_tile(s, tile, q, start, table, bias, key_unit, r, c, lane);
        if (edge) mask_scores(v, s, t * 32 * TB, col0, r, c);
        meanwhile();
        online_softmax(f, sums, s, score_unit, value_scale, largest_scale, weights, scale);
    }
};

#if PAIRS
// Of a pair of warps the first has the scores of their tiles, and weights, the other the values.
__device__ __forceinline__ void weigh_pages(Peaks &f, SharedMemory &sh, TileCopies &copies, const WarpWork &work,
                                            const MaskBounds &v, int col0, float factor, int lane, int warp) {
    const int r = lane >> 2, c = lane & 3;
    Scorer scorer(sh, v, col0, work.tile_end, factor, lane, warp);
    const u32 barriers = (u32)__cvta_generic_to_shared(&sh.barriers[warp]);
    int stage = 0;
    u32 odd = 0;  // round of the stage
    for (int n = 0; n < work.tile_end - work.tile; n++) {
        // Then the place of these weights is free, and so is that of the values which are copied next.
        if (n >= 2) barrier_wait(barriers + 8 * (VALUE_STAGES + 2) + 8 * (n & 1), ~n >> 1 & 1);
        copies.copy_next(false);
        barrier_wait(barriers + 8 * stage, odd);
        stage = stage + 1 == VALUE_STAGES ? 0 : stage + 1;
        odd ^= stage == 0;
        Shrink shrink;
        shrink.raised = false;
        u32 weights[TB][LANE_COLS][2];
        float scale[LANE_COLS];
        scorer.weigh(f, shrink, sh, sh.warp[warp].stages.keys[n & 1], v, work.tile + n, col0, weights, scale, lane, [] {});
        Handover &to = sh.handover[warp][n & 1];
#pragma unroll
        for (int i = 0; i < WEIGHT_WORDS; i++) to.weights[i][lane] = (&weights[0][0][0])[i];
        if (r == 0)
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) to.scale[c][j] = scale[j];
        if (shrink.raised && r == 0)
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) to.shrink[c][j] = shrink.by[j];
        if (lane == 0) to.raised = shrink.raised;
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers + 8 * VALUE_STAGES + 8 * (n & 1));
    }
}

__device__ __forceinline__ void sum_pages(Accumulators &f, SharedMemory &sh, int tiles, int lane, int warp) {
    const int r = lane >> 2, c = lane & 3;
    const LevelTable table = reload(sh.tables[1][lane & 1]);
    const u32 barriers = (u32)__cvta_generic_to_shared(&sh.barriers[warp]);
    SumStart start;
    clear(start);
    int stage = 0;
    u32 odd = 0;
    for (int n = 0; n < tiles; n++) {
        barrier_wait(barriers + 8 * VALUE_STAGES + 8 * (n & 1), n >> 1 & 1);
        barrier_wait(barriers + 8 * stage, odd);  // what was copied is there for this warp, too
        const ValueTile &tile = sh.warp[warp].stages.values[stage];
        const Handover &from = sh.handover[warp][n & 1];
        stage = stage + 1 == VALUE_STAGES ? 0 : stage + 1;
        odd ^= stage == 0;
        ValueBlock codes[TB];
        load_values(codes, tile, lane);
        u32 weights[TB][LANE_COLS][2];
#pragma unroll
        for (int i = 0; i < WEIGHT_WORDS; i += 4) {
            u32 turned[4];
            load_transposed(turned, from.weights + i, lane);
#pragma unroll
            for (int k = 0; k < 4; k++) (&weights[0][0][0])[i + k] = weight_operand(turned[k]);
        }
        float scale[LANE_COLS];
#pragma unroll
        for (int j = 0; j < LANE_COLS; j++) scale[j] = from.scale[c][j];
        if (from.raised)
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) shrink_column(f, j, from.shrink[c][j]);
        accumulate_values(f, codes, tile, weights, scale, start, table, r, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers + 8 * (VALUE_STAGES + 2) + 8 * (n & 1));
    }
}
#else
// The warp's tiles of pages, in turn. Returns the stage after the last one's.
__device__ __forceinline__ int attend_pages(Peaks &peaks, Accumulators &f, SharedMemory &sh, TileCopies &copies,
                                            const WarpWork &work, const MaskBounds &v, int col0, float factor, int lane,
                                            int warp) {
    Scorer scorer(sh, v, col0, work.tile_end, factor, lane, warp);
    SumStart start;
    clear(start);
    const LevelTable table = VALUE_BITS == KEY_BITS ? scorer.table : reload(sh.tables[1][lane & 1]);
    int stage = 0;
    u32 odd = 0;  // round of the stage
    for (int t = work.tile; t < work.tile_end; t++) {
        copies.copy_next(false);
        copies.wait(stage, odd);
        const Stage &tile = sh.warp[warp].stage[stage];
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        odd ^= stage == 0;
        ValueBlock codes[TB];
        u32 weights[TB][LANE_COLS][2];
        float scale[LANE_COLS];
        scorer.weigh(peaks, f, sh, tile, v, t, col0, weights, scale, lane, [&] { load_values(codes, tile, lane); });
        turn_weights(weights);
        accumulate_values(f, codes, tile, weights, scale, start, table, lane >> 2, lane);
    }
    return stage;
}
#endif

// The warp's groups of exact tokens, the first of which is at `stage`.
__device__ __forceinline__ void attend_exact_groups(ExactAccumulators &st, SharedMemory &sh, TileCopies &copies,
                                                    const WarpWork &work, const Exact &exact, const MaskBounds &v,
                                                    int stage, int col0, float scale, int lane, int warp) {
    const int r = lane >> 2, c = lane & 3;
    if (work.group >= work.groups) return;
    for (int group = work.group; group < work.groups; group += work.workers) {
        if (EXACT_APART) copies.stage = stage = 1;
        if (PAIRS) __syncwarp();  // those before have been read by all lanes
        copies.copy_exact_tokens();
        cp_async_commit();
        cp_async_wait<EXACT_APART || PAIRS ? 0 : STAGES - 1>();  // exact tokens
        __syncwarp();  // lanes read exact tokens that others copied
#if PAIRS
        const ExactTokens &tokens = sh.warp[warp].stages.exact;
#else
        const ExactTokens &tokens = sh.warp[warp].stage[stage].exact;
#endif
        attend_exact(st, tokens, sh.query[1], exact, EXACT_TOKENS * group, v, col0, r, c,
                     scale);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

extern "C" __global__ void __launch_bounds__((1 + PAIRS) * WARPS * 32, MIN_BLOCKS) decode(const DecodeParams a) {
    extern __shared__ __align__(128) char memory[];
    SharedMemory &sh = *(SharedMemory *)memory;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % WARPS;  // or pair of warps
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
    const WarpWork work = find_work(split, exact, low, x.ring_read_from, warp);

#if PAIRS
    if (threadIdx.x >= 32 * WARPS) {
        Accumulators f;
        clear(f);
        for (int k = 0; k < 3; k++) __syncthreads();  // queries and barriers
        sum_pages(f, sh, work.tile_end - work.tile, lane, warp);
        __syncthreads();  // exact tokens have been read, which lie where the accumulators are stored
        store_state(f, sh.warp[warp].states.pages, r, c);
        __syncthreads();
        return;
    }
#endif

    // The first tiles are on their way while the queries are prepared.
    const PageIds ids(table, first_ids, work, lane);
    Queries queries;
    load(queries, a, x.begin, x.count, v.first_at, split.head, col0, lane, warp);
    TileCopies copies(a, work, exact, ids, split.head, &sh.warp[warp], &sh.barriers[warp], lane);
    // Pages are read from here on. The append before may write those of this sequence from the first new token's on;
    // and, of a sequence that has no exact tokens from before yet, any: it may share what another one completes now.
    if (a.overlaps_append && x.ring_read_from > (v.first_at - 1) / PAGE * PAGE) grid_dependency_wait();
#pragma unroll
    for (int k = 0; k < (PAIRS ? 1 : STAGES - 1); k++) copies.copy_next(k == 0);
    if (threadIdx.x < 2) {
        sh.tables[0][lane] = {KEY_TABLE};
        sh.tables[1][lane] = {VALUE_TABLE};
    }
    const float factor = prepare(queries, sh, a.scale, a.rotation, lane, warp);

    Peaks peaks;
    clear(peaks);
#if PAIRS
    const int stage = 0;
    weigh_pages(peaks, sh, copies, work, v, col0, factor, lane, warp);
#else
    Accumulators f;
    clear(f);
    const int stage = attend_pages(peaks, f, sh, copies, work, v, col0, factor, lane, warp);
#endif
    if (a.overlaps_append) grid_dependency_wait();  // outputs are written from here on
    launch_dependents();
    clear_unused_queries(a);
    ExactAccumulators st;
    clear(st);
#if !PAIRS
    if (EXACT_APART) {
        __syncwarp();  // the last tile has been read by all lanes
        store_state(f, sh.warp[warp].states.pages, r, c);
    }
#endif
    attend_exact_groups(st, sh, copies, work, exact, v, stage, col0, a.scale, lane, warp);
#if PAIRS
    __syncthreads();  // values and exact tokens have been read by all warps
#else
    __syncwarp();  // the last tokens have been read by all lanes
    if (!EXACT_APART) store_state(f, sh.warp[warp].states.pages, r, c);
#endif
    store_state(peaks, sh.warp[warp].states.pages, r, c);
    store_state(st, sh.warp[warp].states.exact, r, c);
    epilogue(sh, a, split.first + split.index, split.count, x.begin, x.count, split.head, col0, lane, warp);
}
