// Counters of a static cache, kept on the device: where the new tokens go and what attention reads.
// The same rules as cpu/native/static_cache.c; one block, a thread for each row.

#include "ptx.cuh"

#define STATE_WORDS 5  // length, ring_valid_from, ring_read_from, sink_count, left_pad

struct StepParams {
    const long long *position, *new_left_pad;  // [count], [batch] or null
    long long *state;                          // [batch, STATE_WORDS]
    int *lengths, *left_pad, *ring_read_from, *sink_counts, *ring_valid_from;  // [batch]
    int *cu_seqlens;                           // [batch + 1]
    int *refused;                              // set where a step is refused
    int count, batch, max_tokens, page_size, exact_pages, ring, sinks, ring_slack;
    int ring_window;  // the sliding window of a layer without pages, or 0
    int window_step;  // tokens by which the window moves on
};

struct Row {
    long long length, exact, ring, sinks, start;
};

__device__ __forceinline__ long long least(long long a, long long b) { return a < b ? a : b; }
__device__ __forceinline__ long long most(long long a, long long b) { return a > b ? a : b; }

// The window of token `at`: its page and the ones before, or as many tokens up to it.
__device__ void set_window(const StepParams &a, Row &row, long long at) {
    const long long end = at >= 0 ? (at / a.window_step + 1) * a.window_step : 0;
    row.ring = most(row.exact, end - (long long)a.exact_pages * a.page_size);
}

__device__ bool is_valid(const StepParams &a, const Row &row) {
    const long long pages = (a.max_tokens + a.page_size - 1) / a.page_size - a.exact_pages;  // that are read
    return row.length >= 0 && row.length <= a.max_tokens && row.exact >= 0 &&
           row.exact >= row.length - a.ring && row.exact <= row.ring &&
           row.ring <= least(row.length, most(pages, 0) * a.page_size) && row.sinks >= 0 && row.sinks <= a.sinks &&
           row.start >= 0 && row.start <= a.max_tokens;
}

// The row before this step, cropped to where it begins; false: refused.
__device__ bool read_row(const StepParams &a, int b, long long from, Row &row) {
    const long long *state = a.state + b * STATE_WORDS;
    const long long *pad = a.new_left_pad ? a.new_left_pad + b : nullptr;
    row = {0, 0, 0, 0, 0};
    if (from > 0) {
        row = {state[0], state[1], state[2], state[3], state[4]};
        if (!is_valid(a, row)) return false;
    } else if (pad) {
        row.start = *pad;
    }
    if (row.start < 0 || row.start > a.max_tokens || (pad && *pad != row.start)) return false;
    if (from > row.length) return false;
    if (from < row.length) {
        row.length = from;
        row.exact = least(row.exact, from);
        set_window(a, row, from - 1);
        row.sinks = least(row.sinks, most(from - row.start, 0));
    }
    if (a.ring_window > 0 && row.ring > most(from - a.ring_window + 1, 0)) return false;  // forgotten
    return true;
}

__device__ void grow(const StepParams &a, Row &row) {
    const long long old = row.length, now = old + a.count;
    row.length = now;
    row.exact = most(row.exact, now - a.ring);
    set_window(a, row, a.count <= a.ring_slack ? old : now - 1);
    if (most(old - row.start, 0) <= row.sinks)  // no gap before the new ones
        row.sinks = most(row.sinks, least(now, row.start + a.sinks) - row.start);
}

extern "C" __global__ void static_step(const StepParams a) {
    __shared__ int bad;
    grid_dependency_wait();
    const int thread = threadIdx.x, threads = blockDim.x;
    if (thread == 0) bad = 0;
    __syncthreads();
    const long long from = a.position[0];
    if (from < 0 || from > a.max_tokens - a.count) bad = 1;
    for (int k = thread; k < a.count; k += threads)
        if (a.position[k] != from + k) bad = 1;
    Row row;
    for (int b = thread; b < a.batch; b += threads)
        if (!read_row(a, b, from, row)) bad = 1;
    __syncthreads();
    if (bad && thread == 0) *(volatile int *)a.refused = 1;
    for (int b = thread; b < a.batch; b += threads) {
        long long *state = a.state + b * STATE_WORDS;
        if (bad) {  // no step is taken from here until position 0
            state[0] = -1;
            a.lengths[b] = a.left_pad[b] = a.ring_read_from[b] = 0;
            a.sink_counts[b] = a.ring_valid_from[b] = 0;
        } else {
            read_row(a, b, from, row);
            a.ring_valid_from[b] = (int)row.exact;
            grow(a, row);
            a.lengths[b] = (int)row.length, a.left_pad[b] = (int)row.start;
            a.sink_counts[b] = (int)row.sinks;
            // the start of a page where there are none: attention reads the page that it lies in
            a.ring_read_from[b] = (int)(a.ring_window > 0 ? row.ring / a.page_size * a.page_size : row.ring);
            state[0] = row.length, state[1] = row.exact, state[2] = row.ring;
            state[3] = row.sinks, state[4] = row.start;
        }
    }
    for (int b = thread; b <= a.batch; b += threads) a.cu_seqlens[b] = bad ? 0 : b * a.count;
}
