// A warp's copies to shared memory: its tiles of pages, then its exact tokens, each to the next stage.
#pragma once

#include "decode_work.cuh"
#include "smem_pipeline.cuh"

// Page numbers are taken from the block table 32 at a time, one a lane, or with 16 columns, which have fewer registers,
// a tile ahead.
#define PAGES_AHEAD (BULK_COPIES && COLS > 12)
struct PageIds {
    const int *table;
    int window, own;  // first page of the 32, this lane's number

    // Those of a short sequence, which are loaded with its length.
    static __device__ __forceinline__ int load_first(const DecodeParams &a, const int *table, int lane) {
        return a.table_pages ? load_now(table + min(lane, a.table_pages - 1)) : 0;
    }

    __device__ __forceinline__ PageIds(const int *block_table, int first, const WarpWork &work, int lane)
        : table(block_table), window(0) {
        own = __shfl_sync(~0u, first, max(min(lane, work.page_to - 1), work.page_from));
        if (work.page_to > 32) {
            window = work.tile / TILES * SPAN;
            own = work.tile < work.tile_end ? table[max(min(window + lane, work.page_to - 1), work.page_from)] : 0;
        }
    }

    __device__ __forceinline__ void move_to(int page, int page_to, int lane) {
        if (page == window + 32) {
            window += 32;
            own = table[min(window + lane, page_to - 1)];
        }
    }

    __device__ __forceinline__ u32 of(int page) const { return __shfl_sync(~0u, own, page - window); }
};

struct TileCopies {
    const DecodeParams &a;
    const WarpWork &work;
    const Exact &exact;
    const Ring &ring;
    PageIds ids;
    const u8 *pages, *key_base, *value_base;
    u32 page_bytes, first_stage;
    u64 policy;
    int tile, group, stage;  // next tile, next group of exact tokens, and the stage that it goes to
    int ring_group;          // next one
    int lane;
#if BULK_COPIES
    u32 barriers, next[SPAN];  // with 16 columns: page numbers of the next tile
#else
    ScaleCopy scale_copies[3];
#endif

    __device__ __forceinline__ TileCopies(const DecodeParams &a, const WarpWork &work, const Exact &exact,
                                          const Ring &ring, const PageIds &ids, int head, const Stage *stages, const u64 *stage_barriers,
                                          int lane)
        : a(a), work(work), exact(exact), ring(ring), ids(ids), pages(a.pages + head * RECORD),
          key_base(pages + key_lane_offset(lane >> 2, lane & 3)),
          value_base(pages + value_lane_offset(lane >> 2, lane & 3)), page_bytes(a.page_bytes),
          first_stage((u32)__cvta_generic_to_shared(stages)), policy(evict_first_policy()), tile(work.tile),
          group(work.group), stage(0), ring_group(work.ring_group), lane(lane)
#if BULK_COPIES
          , barriers((u32)__cvta_generic_to_shared(stage_barriers)) {
        if (lane < STAGES) barrier_init(barriers + 8 * lane);
        barrier_init_fence();
        if (PAGES_AHEAD) {
            keep(pages);
#pragma unroll
            for (int p = 0; p < SPAN; p++) next[p] = ids.of(tile / TILES * SPAN + p);
        }
    }
#else
          , scale_copies{ScaleCopy(lane), ScaleCopy(lane + 32), ScaleCopy(lane + 64)} {}
#endif

    __device__ __forceinline__ void next_stage() { stage = stage + 1 == STAGES ? 0 : stage + 1; }

    __device__ __forceinline__ void copy_exact_tokens() {
        if (group >= work.groups) return;
        if (a.overlaps_append) grid_dependency_wait();  // rings are read from here on
        __syncwarp();  // the tile that was there has been read by all lanes
        copy_exact(first_stage + stage * sizeof(Stage), exact, EXACT_TOKENS * group, lane);
        group += work.workers;
        next_stage();
    }

    __device__ __forceinline__ void copy_ring_tokens() {
        if (a.overlaps_append) grid_dependency_wait();  // rings are read from here on
        __syncwarp();  // the tile that was there has been read by all lanes
        copy_ring(first_stage + stage * sizeof(Stage), ring, EXACT_TOKENS * ring_group, lane);
        ring_group += work.workers;
        next_stage();
    }

    // What comes after the tiles of pages.
    __device__ __forceinline__ void copy_after_tiles() {
        if (RING_CODES && ring_group < work.ring_groups)
            copy_ring_tokens();
        else if (!EXACT_APART)
            copy_exact_tokens();
    }

    __device__ __forceinline__ void copy_tile(bool first) {
        const int page = tile / TILES * SPAN, block = (tile % TILES) * TB;
        if (!PAGES_AHEAD) ids.move_to(page, work.page_to, lane);
        const u32 to = first_stage + stage * sizeof(Stage);
#if BULK_COPIES
        const u32 barrier = barriers + 8 * stage;
        __syncwarp();  // the tile that was there has been read by all lanes
        if (lane == 0) barrier_expect(barrier, SPAN * PART_BYTES);
#pragma unroll
        for (int p = 0; p < SPAN; p++) {
            const u32 id = PAGES_AHEAD ? next[p] : ids.of(page + p);
            if (lane == 0)
                bulk_copy_part(to + p * sizeof(PagePart), pages + (u64)page_bytes * id, block, barrier, policy);
            if (PAGES_AHEAD) next[p] = ids.table[min((tile + 1) / TILES * SPAN + p, work.page_to - 1)];
        }
#else
        const bool new_page = TILES == 1 || block == 0 || first;
#pragma unroll
        for (int p = 0; p < SPAN; p++) {
            const u64 at = (u64)page_bytes * ids.of(page + p);
            copy_codes(to + p * sizeof(PagePart), key_base + at + block * KEY_BLOCK,
                       value_base + at + block * VALUE_BLOCK, lane, policy);
#pragma unroll
            for (int k = 0; k < SCALE_COPIES; k++) {
                const ScaleCopy &x = scale_copies[k];
                if (x.scale || (new_page && x.mean))
                    cp_async(to + p * sizeof(PagePart) + x.to, pages + at + x.from + (x.scale ? 64 * block : 0), policy);
            }
        }
#endif
        tile++;
        next_stage();
    }

    // A tile while there are any, then exact tokens; `first`: of the warp.
    __device__ __forceinline__ void copy_next(bool first) {
        if (tile < work.tile_end)
            copy_tile(first);
        else
            copy_after_tiles();
        cp_async_commit();
    }

    // Until the tile at `at_stage` is there for all lanes; `odd` is its round.
    __device__ __forceinline__ void wait(int at_stage, u32 odd) const {
#if BULK_COPIES
        barrier_wait(barriers + 8 * at_stage, odd);
#else
        cp_async_wait<STAGES - 1>();  // tiles
        __syncwarp();  // lanes read what others copied
#endif
    }
};
