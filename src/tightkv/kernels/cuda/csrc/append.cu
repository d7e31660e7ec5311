// Append: copy the new tokens to ring and sinks, encode what they touch.
//
// Blocks have a sequence, a head and a side (key or value); those of many tokens, every so many-th
// page too. Pages that are complete and at hand are left to seal_pages.cu.

#include "encode_tokens.cuh"

#define MOST_THREADS 256

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 6) append(const AppendParams a) {
    __shared__ u8 codes[ROOM][D];
    __shared__ float mean[MEAN_STRIDE * N];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int row = blockIdx.x / HKV, head = blockIdx.x % HKV;
    const bool is_key = blockIdx.y == 0;
    grid_dependency_wait();
    launch_dependents();  // attention, mostly
    const int begin = a.cu_seqlens[row], count = a.cu_seqlens[row + 1] - begin;
    const int length = a.lengths[row];
    if (!count || length < count) return;
    const int before = length - count, start = a.left_pad[row];
    const long long owner = a.ring_rows[row];
    const u16 *source = is_key ? a.key + head * a.key_h : a.value + head * a.value_h;
    const long long stride = is_key ? a.key_n : a.value_n;
    const u16 *center = is_key ? a.key_center : a.value_center;
    if (center) center += head * D;
    u16 *ring = (is_key ? a.ring_key : a.ring_value) + (owner * a.ring * HKV + head) * D;
    u16 *sink = (is_key ? a.sink_key : a.sink_value) + (owner * a.sinks * HKV + head) * D;

    if (a.copy) {
        const int own = blockIdx.z * warps + warp, step = gridDim.z * warps;
        for (int t = max(count - a.ring, 0) + own; t < count; t += step) {
            const u16 *x = source + (begin + t) * stride;
            u16 *place = ring + (long long)((before + t) % a.ring) * HKV * D;
            for (int d = lane; d < D; d += 32) place[d] = relative(x[d], center, d);
        }
        const int sinks_to = min(length, start + a.sinks);
        for (int at = max(before, start) + own; at < sinks_to; at += step) {
            const u16 *x = source + (begin + at - before) * stride;
            u16 *place = sink + (long long)(at - start) * HKV * D;
            for (int d = lane; d < D; d += 32) place[d] = relative(x[d], center, d);
        }
    }
    if (!a.encode) return;

    for (int index = before / PAGE + blockIdx.z; index * PAGE < length; index += gridDim.z) {
        const int page_at = index * PAGE;
        const bool complete = page_at + PAGE <= length;
        if (!complete && !a.encode_partial_page) return;
        if (FEEDBACK && is_key && complete) continue;  // seal.cu has it
        const int exact_from = a.ring_valid_from[row];
        if (complete && is_sealed_whole(a, is_key, before, exact_from, page_at)) continue;
        const int low = max(complete && (is_key || !a.encode_partial_page) ? exact_from : before, page_at);
        const int high = min(length, page_at + PAGE);
        u8 *record = a.pages + a.block_table[row * a.table_b + index] * a.page_bytes + head * RECORD;
        const bool has_mean = is_key && complete && MEAN_BITS > 0;

        const TokenReader tokens{source + begin * stride, ring, center, stride, before, a.ring};
        if (has_mean) {
            if (warp == 0) read_mean(record, mean, lane);
            __syncthreads();
        }
        encode_tokens(tokens, page_at, low, high, is_key, has_mean, a.signs, record, mean, codes, lane, warp,
                      warps);
    }
}
