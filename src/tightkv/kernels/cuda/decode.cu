// Decode attention over compressed pages: a block has a share of one sequence and KV head.
//
// Each warp has a run of that share and works alone until the end: the next tile is on its way to
// shared memory (cp.async) while it decodes the present one, multiplies keys with the queries,
// turns the weights (movmatrix) and multiplies them with the values.

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

// A tile at the edge of what is seen: hide scores, and scales that were never written (NaN).
__device__ __forceinline__ void mask_tile(const Bounds &v, const State &st,
                                          float (&s)[NT][2 * TB][4], uint2 (&value_scale)[TB],
                                          int at0, int col0, int r, int c) {
#pragma unroll
    for (int b = 0; b < TB; b++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = at0 + 32 * b + 8 * i + r;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    float *e = &s[n][2 * b + i / 2][k + 2 * (i & 1)];
                    const float base = base_of(st.peak[n][k]);
                    *e = base +
                         seen(v, at, v.first_at + (col0 + 8 * n + 2 * c + k) / G, *e - base, 1);
                }
            if (at < v.low || at >= v.high) {
                u32 &two = i < 2 ? value_scale[b].x : value_scale[b].y;
                two &= (i & 1) ? 0x0000ffffu : 0xffff0000u;
            }
        }
}

// Where the exact tokens of a sequence are: sinks, then the ring.
struct Exact {
    const u16 *sink_key, *sink_value, *ring_key, *ring_value;  // of the sequence and head
    int sinks, count, start, ring_from, ring;
};

__device__ __forceinline__ bool exact_place(const Exact &x, int e, int &at, long long &place) {
    const bool sink = e < x.sinks;
    at = sink ? x.start + e : x.ring_from + e - x.sinks;
    place = (long long)(sink ? e : at % x.ring) * HKV * D;
    return sink;
}

// 16 of them, from the `from`-th on; in their own frame, not rotated.
__device__ __forceinline__ void exact_tokens(State &st, const u32 (&q)[NT][KX][4], const Exact &x,
                                             const Bounds &v, int from, int col0, int r, int c,
                                             float scale) {
    const u16 *keys[2], *values[4];
    int at[2], unused;
    long long place;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int e = from + r + 8 * k;
        keys[k] = (exact_place(x, e, at[k], place) ? x.sink_key : x.ring_key) + place;
        if (e >= x.count) keys[k] = 0;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {  // tokens 2 c, 2 c + 1 and 8 more
        const int e = from + 2 * c + (k & 1) + 8 * (k >> 1);
        values[k] = (exact_place(x, e, unused, place) ? x.sink_value : x.ring_value) + place;
        if (e >= x.count) values[k] = 0;
    }
    const uint4 zero = {0, 0, 0, 0};
    uint4 h[KX], g[KX];
    uint2 w[VX][4];
#pragma unroll
    for (int i = 0; i < KX; i++) {
        h[i] = keys[0] ? *(const uint4 *)(keys[0] + key_channel(i, c)) : zero;
        g[i] = keys[1] ? *(const uint4 *)(keys[1] + key_channel(i, c)) : zero;
    }
#pragma unroll
    for (int i = 0; i < VX; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            w[i][k] = values[k] ? *(const uint2 *)(values[k] + value_channel(i, r))
                                : make_uint2(0, 0);
    float s[NT][1][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) s[n][0][k] = 0.f;
#pragma unroll
    for (int i = 0; i < KX; i++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma_model(s[n][0], h[i].x, g[i].x, h[i].z, g[i].z, q[n][i][0], q[n][i][1]);
            mma_model(s[n][0], h[i].y, g[i].y, h[i].w, g[i].w, q[n][i][2], q[n][i][3]);
        }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int col = col0 + 8 * n + 2 * c + (k & 1);
            const float e = seen(v, at[k >> 1], v.first_at + col / G,
                                 s[n][0][k] * scale * 1.4426950408889634f, 0);
            s[n][0][k] = keys[k >> 1] ? e + base_of(st.peak[n][k & 1]) : NEG_INF;
        }
    softmax_step<1>(st, s);
    u32 p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
            p[n][k] = turn(pack_model(s[n][0][2 * k], s[n][0][2 * k + 1]));
#pragma unroll
    for (int i = 0; i < VX; i++) {
        u32 a[4], b[4];  // channel y: tokens (2c, 2c+1), and the 8 later
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const u32 pick = (y & 1) ? 0x7632 : 0x5410;
            a[y] = y < 2 ? __byte_perm(w[i][0].x, w[i][1].x, pick)
                         : __byte_perm(w[i][0].y, w[i][1].y, pick);
            b[y] = y < 2 ? __byte_perm(w[i][2].x, w[i][3].x, pick)
                         : __byte_perm(w[i][2].y, w[i][3].y, pick);
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma_model(st.acc[n][i][0], a[0], a[1], b[0], b[1], p[n][0], p[n][1]);
            mma_model(st.acc[n][i][1], a[2], a[3], b[2], b[3], p[n][0], p[n][1]);
        }
    }
}

struct Queries {  // a lane's part of the columns its warp prepares: every fourth
    u16 raw[COLS / WARPS][D / 32];
    float sign[D / 32];
};

__device__ __forceinline__ void load(Queries &q, const Rows &a, int begin, int count, int first_at,
                                     int head, int col0, int lane, int warp) {
#pragma unroll
    for (int i = 0; i < COLS / WARPS; i++) {
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
__device__ __forceinline__ float prepare(const Queries &q, Shared &sh, float scale, int lane,
                                         int warp) {
    float x[COLS / WARPS][D / 32];
#pragma unroll
    for (int i = 0; i < COLS / WARPS; i++) {
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
    for (int i = 0; i < COLS / WARPS; i++)
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            ((u16 *)sh.query[0][warp + WARPS * i])[lane + 32 * k] =
                (u16)pack_half(__fdividef(x[i][k], top), 0.f);
    __syncthreads();
    return top * (ROTATED ? ROOT : 1.f) * scale * 1.4426950408889634f;
}

// Queries after those of the last sequence, which no block and no merge answers.
__device__ __forceinline__ void clear_unowned(const Rows &a) {
    for (long long n = a.first[gridDim.x / HKV]; n < a.total_rows; n++)
        for (int i = threadIdx.x; i < HQ * D; i += WARPS * 32) {
            a.out[n * a.out_n + i / D * a.out_h + i % D] = 0;
            if (i % D == 0) a.lse[n * HQ + i / D] = NEG_INF;
        }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_BLOCKS) decode(const Rows a) {
    extern __shared__ __align__(16) char memory[];
    Shared &sh = *(Shared *)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int r = lane >> 2, c = lane & 3;
    const int split = blockIdx.y, row = blockIdx.x / HKV, head = blockIdx.x % HKV;
    wait_for_previous();
    const int begin = a.first[row], count = a.first[row + 1] - begin;
    const int length = a.lengths[row], start = a.starts[row], ring_start = a.ring_starts[row];
    const int sinks_end = min(start + a.sink_counts[row], ring_start), owner = a.ring_rows[row];
    const int col0 = blockIdx.z * COLS;
    if (a.splits == 1 && blockIdx.x == 0 && blockIdx.z == 0) clear_unowned(a);
    if (col0 >= count * G) return;

    Bounds v;
    v.low = max(sinks_end, start), v.high = ring_start;
    v.first_at = length - count;
    v.causal = a.causal, v.window = a.window, v.softcap = a.softcap;
    const int first_col_at = v.first_at + col0 / G;  // tokens up to here are seen by every column
    int low = start;
    if (v.window > 0) low = max(low, first_col_at - v.window + 1);
    Exact exact;
    exact.start = start, exact.ring_from = max(ring_start, start), exact.ring = a.ring;
    exact.sinks = max(sinks_end - start, 0);
    exact.count = exact.sinks + max(length - exact.ring_from, 0);

    // Work comes in units: 16 exact tokens, or a tile of pages. Each warp has a run of them.
    const int page_from = low / PAGE, page_to = (ring_start + PAGE - 1) / PAGE;
    const int tile_from = page_from * TILES / SPAN, tile_to = (page_to * TILES + SPAN - 1) / SPAN;
    const int groups = (exact.count + 15) / 16;
    const int units = groups + max(tile_to - tile_from, 0);
    const int block_each = (units + a.splits - 1) / a.splits;
    const int block_to = min(units, (split + 1) * block_each);
    const int warp_each = (max(block_to - split * block_each, 0) + WARPS - 1) / WARPS;
    const int unit = split * block_each + warp * warp_each, unit_to = min(block_to, unit + warp_each);
    const int tile0 = tile_from - groups;
    int t = tile0 + max(unit, groups);
    const int t_end = tile0 + unit_to;

    // The first tiles are on their way while the queries are prepared. Page numbers are taken
    // from the table 32 at a time, one a lane.
    const int *table = a.block_table + row * a.table_b;
    int window = t / TILES * SPAN;
    int page_ids = t < t_end ? table[min(window + lane, page_to - 1)] : 0;
    Queries queries;
    load(queries, a, begin, count, v.first_at, head, col0, lane, warp);
    const u8 *pages = a.pages + head * RECORD;
    const u8 *key_base = pages + key_lane(r, c), *value_base = pages + value_lane(r, c);
    const Number numbers[2] = {Number(lane), Number(lane + 32)};
    const u32 page_bytes = a.page_bytes;
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const Stage *stages = sh.warp[warp].stage;
    const u32 first_stage = (u32)__cvta_generic_to_shared(stages);
    u32 to = first_stage;
    int ahead = t;  // the next tile to be copied
    auto copy_next = [&]() {
        if (ahead < t_end) {
            const int page = ahead / TILES * SPAN, block = (ahead % TILES) * TB;
            if (page == window + 32) {
                window += 32;
                page_ids = table[min(window + lane, page_to - 1)];
            }
            const bool new_page = TILES == 1 || block == 0 || ahead == t;
#pragma unroll
            for (int p = 0; p < SPAN; p++) {
                const u64 at = (u64)page_bytes * (u32)__shfl_sync(~0u, page_ids, page + p - window);
                copy_codes(to, p, key_base + at + block * KEY_BLOCK,
                           value_base + at + block * VALUE_BLOCK, lane, policy);
#pragma unroll
                for (int k = 0; k < NUMBERS; k++) {
                    const Number &x = numbers[k];
                    if (x.scale || (new_page && x.mean))
                        copy(to + x.to + p * x.to_next,
                             pages + at + x.from + (x.scale ? 64 * block : 0), policy);
                }
            }
            ahead++;
            to += sizeof(Stage);
            if (to == first_stage + STAGES * sizeof(Stage)) to = first_stage;
        }
        end_of_copies();
    };
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) copy_next();
    if (threadIdx.x == 0) {
        sh.tables[0] = KEY_LOW, sh.tables[1] = KEY_HIGH;
        sh.tables[2] = VALUE_LOW, sh.tables[3] = VALUE_HIGH;
    }
    const float factor = prepare(queries, sh, a.scale, lane, warp);

    State st;
    clear(st);
    u32 q[NT][KX][4];
    load_queries(q, sh.query[0], r, c);
    {
        // Read back from shared memory: constants would be made again for every use.
        const volatile u32 *kept = sh.tables;
        const u32 key_low = kept[0], key_high = kept[1];
#if VALUE_BITS == KEY_BITS
        const u32 value_low = key_low, value_high = key_high;
#else
        const u32 value_low = kept[2], value_high = kept[3];
#endif
        const float key_unit = KEY_UNIT * factor;
        // tiles in [whole_from, whole_to) are wholly seen by every column
        const int newest = v.first_at + (col0 + COLS - 1) / G;
        int seen_from = v.low, seen_to = v.high;
        if (v.window > 0) seen_from = max(seen_from, newest - v.window + 1);
        if (v.causal) seen_to = min(seen_to, first_col_at + 1);
        const int whole_from = SOFTCAP ? t_end : (seen_from + 32 * TB - 1) / (32 * TB);
        const int whole_to = seen_to / (32 * TB);
        float bias[SPAN][NT][2];
        [[maybe_unused]] bool new_page = true;  // only where a tile is part of one
        int at_stage = 0;
        for (; t < t_end; t++) {
            copy_next();
            wait_for_copies<STAGES - 1>();
            __syncwarp();  // lanes read what others copied
            const Stage &tile = stages[at_stage];
            at_stage = at_stage + 1 == STAGES ? 0 : at_stage + 1;
#if MEAN_BITS > 0
#if SPAN == 1
            if (new_page) mean_scores(bias[0], q, tile.mean[0], c, factor);
#else
#pragma unroll
            for (int p = 0; p < SPAN; p += 2)
                mean_scores_of_two(bias[p], bias[p + 1], q, tile.mean[p], tile.mean[p + 1], c, factor);
#endif
#endif
            new_page = (t + 1) % TILES == 0;

            float s[NT][2 * TB][4];
            uint2 key_scale[TB], value_scale[TB];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int g = 0; g < 2 * TB; g++)
#pragma unroll
                    for (int k = 0; k < 4; k++) s[n][g][k] = 0.f;
#pragma unroll
            for (int b = 0; b < TB; b++) {
                KeyBlock codes;
#pragma unroll
                for (int k = 0; k < KL * KW; k++) (&codes.w[0][0])[k] = tile.key[b][k][lane];
                key_scale[b] = tile.key_scale[b][r];
                value_scale[b] = tile.value_scale[b][r];
#pragma unroll
                for (int x = 0; x < KX; x++) {
                    u32 h[4][4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        levels<KEY_BITS>(key_word(codes, x, i, c), key_low, key_high, h[i]);
#pragma unroll
                    for (int k = 0; k < 2; k++)  // neighbours do not wait for each other
#pragma unroll
                        for (int i = 0; i < 4; i += 2)
#pragma unroll
                            for (int n = 0; n < NT; n++)
                                mma(s[n][2 * b + i / 2], h[i][k], h[i + 1][k], h[i][k + 2],
                                    h[i + 1][k + 2], q[n][x][2 * k], q[n][x][2 * k + 1]);
                }
            }
            // scores relative to the peak: mostly negative or little above it, and then it stays
            float base[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 2; k++) base[n][k] = base_of(st.peak[n][k]);
#pragma unroll
            for (int b = 0; b < TB; b++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 two = i < 2 ? key_scale[b].x : key_scale[b].y;
                    const float size =
                        fabsf(half_to_float((u16)(two >> (16 * (i & 1))))) * key_unit;
                    const float centered = one_if_negative((i & 1) ? two + 1 : two * 65536 + 1);
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int k = 0; k < 2; k++) {
                            float *e = &s[n][2 * b + i / 2][k + 2 * (i & 1)];
                            if (MEAN_BITS > 0)
                                *e = *e * size + (centered * bias[b / BP][n][k] + base[n][k]);
                            else
                                *e = *e * size + base[n][k];
                        }
                }
            if (t < whole_from || t >= whole_to)
                mask_tile(v, st, s, value_scale, t * 32 * TB, col0, r, c);
            softmax_step<2 * TB>(st, s);

#pragma unroll
            for (int b = 0; b < TB; b++) {
                ValueBlock codes;
#pragma unroll
                for (int k = 0; k < VL * VW; k++) (&codes.w[0][0])[k] = tile.value[b][k][lane];
                u32 p[NT][4];
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float *e = s[n][2 * b], *f = s[n][2 * b + 1];
                    p[n][0] = turn(scaled<0>(pack_half(e[0], e[1]), value_scale[b].x));
                    p[n][1] = turn(scaled<1>(pack_half(e[2], e[3]), value_scale[b].x));
                    p[n][2] = turn(scaled<0>(pack_half(f[0], f[1]), value_scale[b].y));
                    p[n][3] = turn(scaled<1>(pack_half(f[2], f[3]), value_scale[b].y));
                }
#pragma unroll
                for (int x = 0; x < VX; x++)
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        u32 h[4], g[4];
                        levels<VALUE_BITS>(value_word(codes, x, i, r), value_low, value_high, h);
                        levels<VALUE_BITS>(value_word(codes, x, i + 1, r), value_low, value_high, g);
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            mma(st.acc[n][x][0], h[0], h[1], g[0], g[1], p[n][i], p[n][i + 1]);
                            mma(st.acc[n][x][1], h[2], h[3], g[2], g[3], p[n][i], p[n][i + 1]);
                        }
                    }
            }
        }
    }
    let_next_start();
    __syncwarp();  // the last tile has been read by all lanes
    stash(st, sh.warp[warp].found.pages, lane);
    if (unit < min(groups, unit_to)) {
        const long long sink_at = ((long long)owner * a.sinks * HKV + head) * D;
        const long long ring_at = ((long long)owner * a.ring * HKV + head) * D;
        exact.sink_key = a.sink_key + sink_at, exact.sink_value = a.sink_value + sink_at;
        exact.ring_key = a.ring_key + ring_at, exact.ring_value = a.ring_value + ring_at;
        load_queries(q, sh.query[1], r, c);
        clear(st);
        for (int group = unit; group < min(groups, unit_to); group++)
            exact_tokens(st, q, exact, v, 16 * group, col0, r, c, a.scale);
        stash(st, sh.warp[warp].found.exact, lane);
    } else if (lane < COLS) {
        sh.warp[warp].found.exact.sum[lane] = 0.f;
    }
    join(sh, a, split, begin, count, head, col0, lane, warp);
}
