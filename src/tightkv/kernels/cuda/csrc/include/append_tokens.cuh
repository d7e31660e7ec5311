// What an append does with a head of a sequence: copy its new tokens to ring and sinks, encode what they touch.
//
// A warp encodes a token, lane l holding channels l + 32 k; codes go through shared memory and are packed
// word by word.
#pragma once

#include "encode.cuh"

#define CODE_BYTES (D > 256 ? 16384 : 32768)  // that fit shared memory
#define ROOM (PAGE * D > CODE_BYTES ? CODE_BYTES / D / 32 * 32 : PAGE)  // tokens

// Where a token's scale is among those of its page.
__device__ __forceinline__ int scale_slot(int t) { return t / 32 * 32 + t % 8 * 4 + t % 32 / 8; }

// A sequence's head, by number, and a side of it; of its pages or copies, every so many-th from `slice` on.
__device__ __forceinline__ void append_tokens(const AppendParams &a, int number, bool is_key, int slice,
                                              int slices) {
    __shared__ union {  // of a mean, which is made first, and codes
        float sums[PARTS][D];
        u8 codes[ROOM][D];
    } room;
    auto &sums = room.sums;
    auto &codes = room.codes;
    __shared__ float mean[D];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int row = number / HKV, head = number % HKV;
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
        const int own = slice * warps + warp, step = slices * warps;
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

    for (int index = before / PAGE + slice; index * PAGE < length; index += slices) {
        const int page_at = index * PAGE;
        const bool complete = page_at + PAGE <= length;
        if (!complete && !a.encode_partial_page) return;
        if (a.encode == 2 && is_key && complete) continue;
        const int id = a.block_table[row * a.table_b + index];
        if (id < 0) continue;  // nobody will read it
        const int exact_from = a.ring_valid_from[row];
        // Values that were coded when they came have the bytes that they would get again.
        const bool again = complete && !(a.encode_partial_page && (!is_key || MEAN_BITS == 0));
        const int low = max(again ? exact_from : before, page_at);
        const int high = min(length, page_at + PAGE);
        u8 *record = a.pages + id * a.page_bytes + head * RECORD;
        const bool has_mean = is_key && complete && MEAN_BITS > 0;

        auto load = [&](int at, float(&x)[N]) {
            const bool fresh = at >= before;  // tokens of the ring are relative already
            const u16 *p = fresh ? source + (begin + at - before) * stride
                                 : ring + (long long)(at % a.ring) * HKV * D;
            const u16 *o = fresh ? center : nullptr;
#pragma unroll
            for (int k = 0; k < N; k++)
                x[k] = THERE(k) ? finite(model_to_float(relative(p[lane + 32 * k], o, lane + 32 * k))) : 0.f;
        };

        if (has_mean && exact_from <= page_at) {
            const int real_from = max(start, page_at), to = page_at + PAGE;
            for (int p = warp; p < PARTS; p += warps) {
                float sum[N];
#pragma unroll
                for (int k = 0; k < N; k++) sum[k] = 0.f;
                for (int at = real_from + p; at < to; at += PARTS) {
                    float x[N];
                    load(at, x);
#pragma unroll
                    for (int k = 0; k < N; k++) sum[k] += x[k];
                }
#pragma unroll
                for (int k = 0; k < N; k++)
                    if (THERE(k)) sums[p][lane + 32 * k] = sum[k];
            }
            __syncthreads();
            if (warp == 0) {
                float sum[N];
#pragma unroll
                for (int k = 0; k < N; k++) {
                    sum[k] = 0.f;
                    if (THERE(k))
                        for (int p = 0; p < PARTS; p++) sum[k] += sums[p][lane + 32 * k];
                }
                mean_of_sum(sum, to - real_from, a.rotation, record, true, mean, lane);
            }
        } else if (has_mean && warp == 0) {
            read_mean(record, mean, lane);
        }
        if (has_mean) __syncthreads();

#pragma unroll 1
        for (int part = page_at; part < page_at + PAGE; part += ROOM) {
            const int from = max(low, part), to = min(high, part + ROOM);
            if (from >= to) continue;
            for (int at = from + warp; at < to; at += warps) {
                const int t = at - page_at;
                float x[N];
                load(at, x);
                rotate(x, a.rotation, lane);
                float scale;
                u16 *scales;
                if (is_key) {
                    bool centered = false;
                    float size;
                    if (has_mean) centered = center_key(x, mean, lane, size);
                    scale = quantize<KEY_BITS, KEY_MODE>(x, codes[t % ROOM], lane);
                    scale = fminf(fmaxf(scale, -65504.f), 65504.f);
                    scale = centered ? -scale : scale;
                    scales = (u16 *)(record + KEY_SCALE_AT);
                } else {
                    scale = quantize<VALUE_BITS, VALUE_MODE>(x, codes[t % ROOM], lane);
                    scale = fminf(fmaxf(scale, -65504.f), 65504.f);
                    scales = (u16 *)(record + VALUE_SCALE_AT);
                }
                if (lane == 0) scales[scale_slot(t)] = float_to_half(scale);
            }
            __syncthreads();

            const int first_block = (from - page_at) / 32, last_block = (to - page_at - 1) / 32;
            if (is_key && D % 32 != 0) {
                constexpr int C = D / 16, BLOCK = KEY_BITS * 32 * C;  // words, of 16 bits
                u16 *plane = (u16 *)record;
                for (int w = first_block * BLOCK + threadIdx.x; w < (last_block + 1) * BLOCK; w += blockDim.x) {
                    const int i = w % 4, c = w / 4 % C, r = w / (4 * C) % 8, j = w / (32 * C) % KEY_BITS;
                    const int t = w / BLOCK * 32 + 8 * i + r;
                    if (page_at + t < from || page_at + t >= to) continue;
                    const u8 *own = codes[t % ROOM] + 16 * c;
                    plane[w] = pack_half_word<KEY_BITS>(j, [&](int k) { return own[k]; });
                }
            } else if (is_key) {
                constexpr int C = D / 32, BLOCK = KEY_BITS * 32 * C;  // words of 32 tokens
                u32 *plane = (u32 *)record;
                for (int w = first_block * BLOCK + threadIdx.x; w < (last_block + 1) * BLOCK; w += blockDim.x) {
                    const int i = w % 4, c = w / 4 % C, r = w / (4 * C) % 8, j = w / (32 * C) % KEY_BITS;
                    const int t = w / BLOCK * 32 + 8 * i + r;
                    if (page_at + t < from || page_at + t >= to) continue;
                    plane[w] = pack<KEY_BITS>(j, [&](int k) { return codes[t % ROOM][32 * c + k]; });
                }
            } else {
                constexpr int C = D / 16, BLOCK = VALUE_BITS * 16 * C;
                u32 *plane = (u32 *)(record + VALUE_AT);
                for (int w = first_block * BLOCK + threadIdx.x; w < (last_block + 1) * BLOCK; w += blockDim.x) {
                    const int i = w % 4, c = w / 4 % 4, ch = w / 16 % C, j = w / (16 * C) % VALUE_BITS;
                    const int t = w / BLOCK * 32 + 2 * (4 * i + c);
                    const bool even = page_at + t >= from && page_at + t < to;
                    const bool odd = page_at + t + 1 >= from && page_at + t + 1 < to;
                    if (!even && !odd) continue;
                    u32 word = pack<VALUE_BITS>(j, [&](int k) {
                        return ((k & 1) ? odd : even) ? codes[(t + (k & 1)) % ROOM][16 * ch + k / 2] : (u8)0;
                    });
                    if (!even || !odd) {
                        u32 own = pack<VALUE_BITS>(j, [&](int k) {
                            return ((k & 1) ? odd : even) ? (u8)((1 << VALUE_BITS) - 1) : (u8)0;
                        });
                        word |= plane[w] & ~own;
                    }
                    plane[w] = word;
                }
            }
            __syncthreads();  // codes are free for what comes next
        }
    }
}

// --- a few tokens, a warp for each head and side ---

// Codes of a page's t-th token, from shared memory to their places in the page.
__device__ __forceinline__ void place_key_codes(u8 *record, const u8 *codes, int t, int lane) {
    constexpr bool halves = D % 32 != 0;  // words of 16 bits, else of 32
    constexpr int C = halves ? D / 16 : D / 32;
    for (int w = lane; w < KEY_BITS * C; w += 32) {
        const int j = w / C, c = w % C, at = (((t / 32 * KEY_BITS + j) * 8 + t % 8) * C + c) * 4 + t % 32 / 8;
        if (halves)
            ((u16 *)record)[at] = pack_half_word<KEY_BITS>(j, [&](int n) { return codes[16 * c + n]; });
        else
            ((u32 *)record)[at] = pack<KEY_BITS>(j, [&](int n) { return codes[32 * c + n]; });
    }
}

__device__ __forceinline__ void place_value_codes(u8 *record, const u8 *codes, int t, int lane) {
    constexpr int C = D / 16;
    u32 *plane = (u32 *)(record + VALUE_AT);
    const int two = t % 32 / 2, odd = t % 2;  // words have codes of two neighbouring tokens in turn
    for (int w = lane; w < VALUE_BITS * C; w += 32) {
        const int j = w / C, c = w % C, at = ((t / 32 * VALUE_BITS + j) * C + c) * 16 + two % 4 * 4 + two / 4;
        const u32 word = pack<VALUE_BITS>(j, [&](int n) { return n % 2 == odd ? codes[16 * c + n / 2] : (u8)0; });
        const u32 own = pack<VALUE_BITS>(j, [&](int n) { return n % 2 == odd ? (u8)((1 << VALUE_BITS) - 1) : (u8)0; });
        plane[at] = (plane[at] & ~own) | word;
    }
}

// A warp copies the new tokens of a sequence's head to ring and sinks, and encodes those of pages that are not
// sealed. Whether they complete a page that all warps have to seal together is returned.
__device__ __forceinline__ bool append_by_warp(const AppendParams &a, int number, bool is_key, u8 *codes, int lane) {
    const int row = number / HKV, head = number % HKV;
    const int begin = load_now(a.cu_seqlens + row), end = load_now(a.cu_seqlens + row + 1), count = end - begin;
    const int length = load_now(a.lengths + row), start = load_now(a.left_pad + row);
    const long long owner = load_now(a.ring_rows + row);
    if (!count || length < count) return false;
    const int before = length - count, full_to = length / PAGE * PAGE;
    // Values that were coded when they came have the bytes that they would get again.
    const bool coded = a.encode_partial_page && (!is_key || MEAN_BITS == 0);
    if (a.encode && before < full_to && !coded && !(is_key && a.encode == 2)) return true;
    const u16 *source = (is_key ? a.key + head * a.key_h : a.value + head * a.value_h);
    const long long stride = is_key ? a.key_n : a.value_n;
    const u16 *center = is_key ? a.key_center : a.value_center;
    if (center) center += head * D;
    u16 *ring = (is_key ? a.ring_key : a.ring_value) + (owner * a.ring * HKV + head) * D;
    u16 *sink = (is_key ? a.sink_key : a.sink_value) + (owner * a.sinks * HKV + head) * D;

#pragma unroll 1
    for (int at = before; at < length; at++) {
        const u16 *p = source + (begin + at - before) * stride;
        u16 own[N];
#pragma unroll
        for (int k = 0; k < N; k++) own[k] = THERE(k) ? relative(p[lane + 32 * k], center, lane + 32 * k) : (u16)0;
        if (at >= length - a.ring) {
            u16 *place = ring + (long long)(at % a.ring) * HKV * D;
#pragma unroll
            for (int k = 0; k < N; k++)
                if (THERE(k)) place[lane + 32 * k] = own[k];
        }
        if (at >= start && at < start + a.sinks) {
            u16 *place = sink + (long long)(at - start) * HKV * D;
#pragma unroll
            for (int k = 0; k < N; k++)
                if (THERE(k)) place[lane + 32 * k] = own[k];
        }
        const bool sealed_apart = is_key && a.encode == 2 && at < full_to;
        if (!a.encode || !a.encode_partial_page || sealed_apart) continue;
        const int id = load_now(a.block_table + row * a.table_b + at / PAGE), t = at % PAGE;
        if (id < 0) continue;  // nobody will read it
        u8 *record = a.pages + id * a.page_bytes + head * RECORD;
        float x[N];
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = finite(model_to_float(own[k]));
        rotate(x, a.rotation, lane);
        const float scale = is_key ? quantize<KEY_BITS, KEY_MODE>(x, codes, lane)
                                   : quantize<VALUE_BITS, VALUE_MODE>(x, codes, lane);
        __syncwarp();
        if (is_key)
            place_key_codes(record, codes, t, lane);
        else
            place_value_codes(record, codes, t, lane);
        u16 *scales = (u16 *)(record + (is_key ? KEY_SCALE_AT : VALUE_SCALE_AT));
        if (lane == 0) scales[scale_slot(t)] = float_to_half(fminf(fmaxf(scale, -65504.f), 65504.f));
        __syncwarp();  // codes are free for the next token
    }
    return false;
}

// A few tokens of the heads from `first` on and before `end`, at most `MOST` and one for each warp.
template <int MOST>
__device__ __forceinline__ void append_few_tokens(const AppendParams &a, int first, int end, bool is_key) {
    __shared__ u8 codes[MOST][D];
    __shared__ int seal[MOST];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (first + warp < end) {
        const bool needed = append_by_warp(a, first + warp, is_key, codes[warp], lane);
        if (lane == 0) seal[warp] = needed;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; first + i < end; i++)
        if (seal[i]) append_tokens(a, first + i, is_key, 0, 1);
}
