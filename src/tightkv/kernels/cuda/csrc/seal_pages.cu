// Seal: encode the pages that an append completes and whose tokens are all at hand, in the ring or new.
//
// A job is a page of one head, its keys or its values, or an equal part of them. A block has every so many-th
// of those that there could be; each lane looks whether one of them is due. Where none is, that is all.

#include "encode_tokens.cuh"
#include "whole_page.cuh"

#define PAGE_THREADS 128
#define PAGE_BLOCKS 8  // a processor: as many as its registers hold

struct PageJob {
    int row, head, part, page_at;
    bool is_key, due;

    // `pages`: the most that a sequence can complete.
    __device__ __forceinline__ PageJob(const AppendParams &a, int n, int batch, int pages, int parts) {
        part = n % parts, head = n / parts % HKV;
        const int nth = n / parts / HKV % pages, owner = n / parts / HKV / pages;
        row = owner % batch, is_key = owner < batch, due = false, page_at = 0;
        if (owner >= 2 * batch) return;
        const int length = a.lengths[row], before = length - (a.cu_seqlens[row + 1] - a.cu_seqlens[row]);
        const int exact_from = a.ring_valid_from[row];
        page_at = (before / PAGE + nth) * PAGE;
        due = before >= 0 && page_at + PAGE <= length && is_sealed_whole(a, is_key, before, exact_from, page_at);
    }
};

struct __align__(16) PageScratch {
    u8 codes[ROOM][D];  // or words of them
    PageTables tables;
    float sums[PARTS][D], mean[MEAN_STRIDE * N];
    // Of the job; registers are for numbers.
    TokenReader all;
    PageReader tokens;
    u8 *record;
    int page_at, real_from, begin, end;  // the first position; of tokens in the page
    int unusual;

    __device__ __forceinline__ void take(const AppendParams &a, const PageJob &job, int parts) {
        all = TokenReader::of(a, job.row, job.head, job.is_key);
        tokens = PageReader::of(all, job.page_at);
        record = a.pages + a.block_table[job.row * a.table_b + job.page_at / PAGE] * a.page_bytes +
                 job.head * RECORD;
        page_at = job.page_at, real_from = max(a.left_pad[job.row] - page_at, 0);
        begin = PAGE / parts * job.part, end = begin + PAGE / parts;
        unusual = 0;
    }
};

template <bool IS_KEY>
__device__ __forceinline__ void seal_part(PageScratch &s, const AppendParams &a, int lane, int warp) {
    constexpr int BITS = IS_KEY ? KEY_BITS : VALUE_BITS, BLOCK = BITS * D / 4;  // vectors of 32 tokens
    constexpr bool HAS_MEAN = IS_KEY && MEAN_BITS > 0;
    s.tables.fill(a.signs, IS_KEY);
    if (HAS_MEAN)
        make_page_mean(s.tokens, s.real_from, a.signs, s.record, s.begin == 0, s.sums, s.mean, lane, warp);
    __syncthreads();
#pragma unroll 1
    for (int from = s.begin; from < s.end; from += ROOM) {
        const int to = min(from + ROOM, s.end);
        if (!encode_page_tokens<IS_KEY>(s.tokens, from, to, s.record, s.mean, s.tables, (u32 *)s.codes, lane, warp,
                                        PAGE_THREADS / 32))
            s.unusual = 1;
        __syncthreads();
        if (s.unusual) break;
        uint4 *plane = (uint4 *)(s.record + (IS_KEY ? 0 : VALUE_AT)) + from / 32 * BLOCK;
        for (int w = threadIdx.x; w < (to - from) / 32 * BLOCK; w += PAGE_THREADS)
            plane[w] = ((uint4 *)s.codes)[w];
        __syncthreads();  // shared memory is free for what comes next
    }
    if (s.unusual)
        encode_tokens(s.all, s.page_at, s.page_at + s.begin, s.page_at + s.end, IS_KEY, HAS_MEAN, a.signs, s.record,
                      s.mean, s.codes, lane, warp, PAGE_THREADS / 32);
}

extern "C" __global__ void __launch_bounds__(PAGE_THREADS, PAGE_BLOCKS)
    seal_pages(const AppendParams a, int batch, int pages, int parts) {
    __shared__ PageScratch s;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = gridDim.x;
    // What is read was there before the append that this follows, and that has begun.
    launch_dependents();
    const int jobs = 2 * batch * pages * HKV * parts;
    for (int first = blockIdx.x; first < jobs; first += 32 * blocks) {
        u32 due = __ballot_sync(~0u, PageJob(a, first + lane * blocks, batch, pages, parts).due);
        for (; due; due &= due - 1) {
            const int n = first + (__ffs(due) - 1) * blocks;
            if (threadIdx.x == 0) s.take(a, PageJob(a, n, batch, pages, parts), parts);
            __syncthreads();
            if (n < jobs / 2)
                seal_part<true>(s, a, lane, warp);
            else
                seal_part<false>(s, a, lane, warp);
            __syncthreads();
        }
    }
    // Who waits for this waits for the append. One block is enough, others make room for attention.
    if (blockIdx.x == blocks - 1) grid_dependency_wait();
}
