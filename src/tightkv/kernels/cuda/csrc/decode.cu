// Decode attention over compressed pages: a block has a split of one sequence and KV head.
//
// Each warp has a run of tiles of that split and works alone until the end: the next tile is on its way to
// shared memory (cp.async) while it decodes the present one, multiplies keys with the queries,
// transposes the weights (movmatrix) and multiplies them with the values. Products are of bytes: levels
// of codes are small whole numbers, and as bytes they need no conversion.

#include "epilogue.cuh"
#include "page_mean.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const DecodeParams a) {
    extern __shared__ __align__(128) char memory[];
    SharedMemory &sh = *(SharedMemory *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int r = lane >> 2, c = lane & 3;
    if (!a.overlaps_append) grid_dependency_wait();
    const int head = blockIdx.x % HKV;
    int row = blockIdx.x / HKV, split = blockIdx.y, splits = a.num_splits, first_split = row * splits;
    if (a.blocks) {
        const int *own = a.blocks + 4 * blockIdx.y;
        row = load_now(own), split = load_now(own + 1), splits = load_now(own + 2), first_split = load_now(own + 3);
        if (row < 0) {
            if (a.overlaps_append) grid_dependency_wait();  // who waits for this waits for the append
            return;
        }
    }
    // Page numbers are taken from the table 32 at a time, one a lane; those of a short sequence with its length.
    const int *table = a.block_table + row * a.table_b;
    const int first_ids = a.table_pages ? load_now(table + min(lane, a.table_pages - 1)) : 0;
    const int begin = load_now(a.cu_seqlens + row), end = load_now(a.cu_seqlens + row + 1), count = end - begin;
    const int length = load_now(a.lengths + row), start = load_now(a.left_pad + row);
    const int ring_read_from = load_now(a.ring_read_from + row), owner = load_now(a.ring_rows + row);
    const int sinks_end = min(start + load_now(a.sink_counts + row), ring_read_from);
    const int col0 = blockIdx.z * COLS;
    if (col0 >= count * G) {
        if (a.overlaps_append) grid_dependency_wait();
        clear_unused_queries(a);
        return;
    }

    MaskBounds v;
    v.first_at = length - count;
    v.causal = a.causal, v.window = a.window, v.softcap = a.softcap;
    const int first_col_at = v.first_at + col0 / G;  // tokens up to here are seen by every column
    int low = start;  // tokens before are seen by no column, and their pages may be another sequence's
    if (v.window > 0) low = max(low, first_col_at - v.window + 1);
    v.low = max(sinks_end, low), v.high = ring_read_from;
    Exact exact;
    exact.start = low, exact.ring_from = max(ring_read_from, low), exact.ring = a.ring;
    exact.sinks = max(sinks_end - low, 0);
    exact.count = exact.sinks + max(length - exact.ring_from, 0);
    exact.first_slot = exact.ring_from % max(a.ring, 1);
    const long long sink_at = ((long long)(owner * a.sinks + low - start) * HKV + head) * D;
    const long long ring_at = ((long long)owner * a.ring * HKV + head) * D;
    exact.sink_key = a.sink_key + sink_at, exact.sink_value = a.sink_value + sink_at;
    exact.ring_key = a.ring_key + ring_at, exact.ring_value = a.ring_value + ring_at;

    // The warps of all splits have a run of tiles each, and take exact tokens in turn, a few at a time.
    const int page_from = low / PAGE, page_to = (ring_read_from + PAGE - 1) / PAGE;
    const int tile_from = page_from * TILES / SPAN, tile_to = (page_to * TILES + SPAN - 1) / SPAN;
    const int groups = (exact.count + EXACT_TOKENS - 1) / EXACT_TOKENS, tiles = page_from < page_to ? tile_to - tile_from : 0;
    const int workers = splits * WARPS, worker = split * WARPS + warp;
    int t = tile_from + tiles * worker / workers;
    const int t_end = tile_from + tiles * (worker + 1) / workers;

    // The first tiles are on their way while the queries are prepared.
    int window = 0, page_ids = __shfl_sync(~0u, first_ids, max(min(lane, page_to - 1), page_from));
    if (page_to > 32) {
        window = t / TILES * SPAN;
        page_ids = t < t_end ? table[max(min(window + lane, page_to - 1), page_from)] : 0;
    }
    Queries queries;
    load(queries, a, begin, count, v.first_at, head, col0, lane, warp);
    const u8 *pages = a.pages + head * RECORD;
    const u8 *key_base = pages + key_lane_offset(r, c), *value_base = pages + value_lane_offset(r, c);
    const u32 page_bytes = a.page_bytes;
    const u64 policy = evict_first_policy();
    const Stage *stages = sh.warp[warp].stage;
    const u32 first_stage = (u32)__cvta_generic_to_shared(stages);
    int ahead = t, ahead_stage = 0;  // the next tile to be copied, and where to
    int ahead_group = worker;  // of exact tokens
    const auto copy_exact_next = [&]() {
        if (ahead_group >= groups) return;
        if (a.overlaps_append) grid_dependency_wait();  // rings are read from here on
        __syncwarp();  // the tile that was there has been read by all lanes
        copy_exact(first_stage + ahead_stage * sizeof(Stage), exact, EXACT_TOKENS * ahead_group, lane);
        ahead_group += workers;
        ahead_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
    };
#if BULK_COPIES
    const u32 barriers = (u32)__cvta_generic_to_shared(sh.barriers[warp]);
    if (lane < STAGES) barrier_init(barriers + 8 * lane);
    barrier_init_fence();
#else
    const ScaleCopy scale_copies[3] = {ScaleCopy(lane), ScaleCopy(lane + 32), ScaleCopy(lane + 64)};
#endif
    auto copy_next = [&]() {
        if (ahead < t_end) {
            const int page = ahead / TILES * SPAN, block = (ahead % TILES) * TB;
            if (page == window + 32) {
                window += 32;
                page_ids = table[min(window + lane, page_to - 1)];
            }
            const u32 to = first_stage + ahead_stage * sizeof(Stage);
#if BULK_COPIES
            const u32 barrier = barriers + 8 * ahead_stage;
            __syncwarp();  // the tile that was there has been read by all lanes
            if (lane == 0) barrier_expect(barrier, SPAN * PART_BYTES);
#pragma unroll
            for (int p = 0; p < SPAN; p++) {
                const u32 id = __shfl_sync(~0u, page_ids, page + p - window);
                if (lane == 0)
                    bulk_copy_part(to + p * sizeof(PagePart), pages + (u64)page_bytes * id, block, barrier,
                                   policy);
            }
#else
            const bool new_page = TILES == 1 || block == 0 || ahead == t;
#pragma unroll
            for (int p = 0; p < SPAN; p++) {
                const u64 at = (u64)page_bytes * (u32)__shfl_sync(~0u, page_ids, page + p - window);
                copy_codes(to + p * sizeof(PagePart), key_base + at + block * KEY_BLOCK,
                           value_base + at + block * VALUE_BLOCK, lane, policy);
#pragma unroll
                for (int k = 0; k < SCALE_COPIES; k++) {
                    const ScaleCopy &x = scale_copies[k];
                    if (x.scale || (new_page && x.mean))
                        cp_async(to + p * sizeof(PagePart) + x.to,
                             pages + at + x.from + (x.scale ? 64 * block : 0), policy);
                }
            }
#endif
            ahead++;
            ahead_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
        } else if (!EXACT_APART) {
            copy_exact_next();
        }
        cp_async_commit();
    };
    // Pages are read from here on. The append before may write those of this sequence from the first new token's on;
    // and, of a sequence that has no exact tokens from before yet, any: it may share what another one completes now.
    if (a.overlaps_append && ring_read_from > (v.first_at - 1) / PAGE * PAGE) grid_dependency_wait();
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) copy_next();
    if (threadIdx.x < 2) {
        sh.tables[0][lane] = {KEY_TABLE};
        sh.tables[1][lane] = {VALUE_TABLE};
    }
    const float factor = prepare(queries, sh, a.scale, a.rotation, lane, warp);

    Accumulators f;
    clear(f);
    int at_stage = 0;
    {
        QueryOperands q;
        load_query_bytes(q, sh, lane, warp);
        SumStart key_start, value_start;
        clear(key_start), clear(value_start);
        if (KEY_OFFSET)
#pragma unroll
            for (int x = 0; x < KX; x++)
#pragma unroll
                for (int n = 0; n < LANE_COLS; n++) take_off_offset<false>(key_start, n, q(n, x));
        const LevelTable key_table = reload(sh.tables[0][lane & 1]);
        const LevelTable value_table = VALUE_BITS == KEY_BITS ? key_table : reload(sh.tables[1][lane & 1]);
        const float key_unit = KEY_UNIT * factor * BYTE_UNIT, score_unit = SOFTCAP ? 1.f : key_unit;
        // tiles in [whole_from, whole_to) are wholly seen by every column
        const int newest = v.first_at + (col0 + COLS - 1) / G;
        int seen_from = v.low, seen_to = v.high;
        if (v.window > 0) seen_from = max(seen_from, newest - v.window + 1);
        if (v.causal) seen_to = min(seen_to, first_col_at + 1);
        const int whole_from = SOFTCAP ? t_end : (seen_from + 32 * TB - 1) / (32 * TB);
        const int whole_to = seen_to / (32 * TB);
        float bias[SPAN][LANE_COLS];
        [[maybe_unused]] u32 odd = 0;  // round of the stage
        [[maybe_unused]] bool new_page = true;  // only where a tile is part of one
        for (; t < t_end; t++) {
            copy_next();
#if BULK_COPIES
            barrier_wait(barriers + 8 * at_stage, odd);
#else
            cp_async_wait<STAGES - 1>();  // tiles
            __syncwarp();  // lanes read what others copied
#endif
            const Stage &tile = stages[at_stage];
            at_stage = at_stage + 1 == STAGES ? 0 : at_stage + 1;
            odd ^= at_stage == 0;
            const bool edge = t < whole_from || t >= whole_to;
            uint2 value_scale[TB];
#pragma unroll
            for (int b = 0; b < TB; b++) value_scale[b] = tile.page[b / BP].value_scale[b % BP][r];
            if (edge) mask_scales(v, value_scale, t * 32 * TB, r);
            const float value_most = max_scale(value_scale);
            float s[LANE_COLS][4 * TB];
#if MEAN_BITS > 0
            if (SPAN > 1 || new_page)
#pragma unroll
                for (int p = 0; p < SPAN; p += MEAN_BITS == 16 ? 1 : 2)
#if MEAN_BITS == 16
                    mean_scores(bias[p], sh.query[0], tile.page[p].mean, r, c, 1.f / (KEY_UNIT * BYTE_UNIT));
#else
                    mean_scores(bias[p], bias[min(p + 1, SPAN - 1)], q, tile.page[p].mean,
                                tile.page[min(p + 1, SPAN - 1)].mean, c, 1.f / KEY_UNIT);
#endif
#endif
            new_page = (t + 1) % TILES == 0;

            // keys with queries
#pragma unroll
            for (int b = 0; b < TB; b++) {
                const auto &keys = tile.page[b / BP].key[b % BP];
                KeyBlock codes;
                if (!WIDE_KEYS)
#pragma unroll
                    for (int k = 0; k < KL * KW; k++) (&codes.w[0][0])[k] = keys[k][lane];
                const uint2 key_scale = tile.page[b / BP].key_scale[b % BP][r];
                Int8Sums sums[2];  // 16 tokens each
                float first[LANE_COLS][4];  // of the slots before, where there are more than one sum can have
#pragma unroll keys_at_once
                for (int x = 0; x < KX; x++) {
                    if (KX > SUM_SLOTS && x == SUM_SLOTS)
#pragma unroll
                        for (int i = 0; i < 4; i++)
#pragma unroll
                            for (int j = 0; j < LANE_COLS; j++) first[j][i] = sums[i / 2].column(j, i & 1);
                    Levels of[4];
                    if (WIDE_KEYS) {
                        const uint4 own = keys[x % KL * KW + x / KL][lane];
                        of[0] = decode_levels<KEY_BITS>(own.x, key_table);
                        of[1] = decode_levels<KEY_BITS>(own.y, key_table);
                        of[2] = decode_levels<KEY_BITS>(own.z, key_table);
                        of[3] = decode_levels<KEY_BITS>(own.w, key_table);
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; i++) of[i] = key_levels(codes, x, i, c, key_table);
                    }
#pragma unroll
                    for (int n = 0; n < LANE_COLS; n++) {
                        const uint2 operand = q(n, x);
                        const int(&start)[2] = key_start.of[n];
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const Levels &one = of[2 * h], &two = of[2 * h + 1];
                            mma_accumulate<KEY_OFFSET, false>(sums[h].of[n], one.low, two.low, one.high,
                                                              two.high, operand, start, x % SUM_SLOTS == 0);
                            if (KEY_PRODUCTS == 2)
                                mma_accumulate<false, false>(
                                    sums[h].of[n], one.negative_low, two.negative_low,
                                    one.negative_high, two.negative_high, operand, start, false);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float scale = half_at(key_scale, i);
                    const bool centered = MEAN_BITS > 0 && __float_as_int(scale) < 0;
#pragma unroll
                    for (int j = 0; j < LANE_COLS; j++) {
                        const float sum = sums[i / 2].column(j, i & 1) + (KX > SUM_SLOTS ? first[j][i] : 0.f);
                        s[j][4 * b + i] = fmaf(sum, fabsf(scale), centered ? bias[b / BP][j] : 0.f);
                        if (SOFTCAP) s[j][4 * b + i] *= key_unit;
                    }
                }
            }
            if (edge) mask_scores(v, s, t * 32 * TB, col0, r, c);

            // values with weights
            ValueBlock codes[TB];
            const auto load_values = [&](int b, int k) {
                uint4 w = tile.page[b / BP].value[b % BP][k][lane];
                if (VALUE_BITS < 8) {
                    sort_by_channel(w.x, w.y);
                    sort_by_channel(w.z, w.w);
                }
                (&codes[b].w[0][0])[k] = w;
            };
            if (!WIDE_VALUES)  // early
#pragma unroll
                for (int b = 0; b < TB; b++)
#pragma unroll
                    for (int k = 0; k < VL * VW; k++) load_values(b, k);
            const float weight_unit = value_most > 0.f ? value_most * (1.f / MOST_WEIGHT) : 1.f;
            float top[LANE_COLS], sum[LANE_COLS], scale[LANE_COLS];
            u32 weights[TB][LANE_COLS][2];
            tile_tops(s, score_unit, top);
            raise_peaks(f, top, scale);
            softmax_weights(s, score_unit, value_scale, weight_unit, top, weights, sum);
#pragma unroll
            for (int j = 0; j < LANE_COLS; j++) {
                f.sum[j] += sum[j] * scale[j];
                scale[j] *= weight_unit;
            }
            if (VALUE_OFFSET) {
                clear(value_start);
#pragma unroll
                for (int b = 0; b < TB; b++)
#pragma unroll
                    for (int n = 0; n < LANE_COLS; n++)
                        take_off_offset<true>(value_start, n, make_uint2(weights[b][n][0], weights[b][n][1]));
            }
#pragma unroll
            for (int x = 0; x < VX; x++) {
                Int8Sums sums[2];  // channels 0, 1 and 2, 3
#pragma unroll
                for (int b = 0; b < TB; b++) {
                    if (WIDE_VALUES) load_values(b, x % VL * VW + x / VL);
                    Levels of[2][2];  // channel pair; tokens 0..15, 16..31
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int m = 0; m < 2; m++)
                            of[m][h] = value_levels(codes[b], x, m, h, r, value_table);
#pragma unroll
                    for (int n = 0; n < LANE_COLS; n++) {
                        const uint2 operand = make_uint2(weights[b][n][0], weights[b][n][1]);
                        const int(&start)[2] = value_start.of[n];
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            const Levels &one = of[m][0], &two = of[m][1];
                            mma_accumulate<VALUE_OFFSET, true>(sums[m].of[n], one.low, one.high, two.low,
                                                               two.high, operand, start, b == 0);
                            if (VALUE_PRODUCTS == 2)
                                mma_accumulate<false, true>(
                                    sums[m].of[n], one.negative_low, one.negative_high,
                                    two.negative_low, two.negative_high, operand, start, false);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int j = 0; j < LANE_COLS; j++)
                            f.acc[x][m][half][j] += sums[m].column(j, half) * scale[j];
            }
        }
    }
    if (a.overlaps_append) grid_dependency_wait();  // outputs are written from here on
    launch_dependents();
    clear_unused_queries(a);
    ExactAccumulators st;
    clear(st);
    if (EXACT_APART) {
        __syncwarp();  // the last tile has been read by all lanes
        store_state(f, sh.warp[warp].states.pages, r, c);
    }
    if (worker < groups) {
        for (int group = worker; group < groups; group += workers) {
            if (EXACT_APART) ahead_stage = at_stage = 1;
            copy_exact_next();
            cp_async_commit();
            cp_async_wait<EXACT_APART ? 0 : STAGES - 1>();  // exact tokens
            __syncwarp();  // lanes read exact tokens that others copied
            attend_exact(st, stages[at_stage].exact, sh.query[1], exact, EXACT_TOKENS * group, v, col0, r, c, a.scale);
            at_stage = at_stage + 1 == STAGES ? 0 : at_stage + 1;
        }
    }
    __syncwarp();  // the last tokens have been read by all lanes
    if (!EXACT_APART) store_state(f, sh.warp[warp].states.pages, r, c);
    store_state(st, sh.warp[warp].states.exact, r, c);
    epilogue(sh, a, first_split + split, splits, begin, count, head, col0, lane, warp);
}
