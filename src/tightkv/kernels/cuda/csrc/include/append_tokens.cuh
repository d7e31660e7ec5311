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

// Keys or values of a sequence's head: where new ones are, and where they are kept exact.
struct HeadSide {
    const u16 *source, *center;  // the first new token; what it is stored relative to, or null
    u16 *ring, *sink;
    long long stride;  // of new tokens
    RingCodes codes;   // in place of `ring`, with a window of 8 bits
    bool is_key;
};

__device__ __forceinline__ HeadSide head_side(const AppendParams &a, int head, long long owner, bool is_key) {
    HeadSide x;
    x.source = is_key ? a.key + head * a.key_h : a.value + head * a.value_h;
    x.stride = is_key ? a.key_n : a.value_n;
    x.center = is_key ? a.key_center : a.value_center;
    if (x.center) x.center += head * D;
    x.ring = (is_key ? a.ring_key : a.ring_value) + (owner * a.ring * HKV + head) * D;
    x.sink = (is_key ? a.sink_key : a.sink_value) + (owner * a.sinks * HKV + head) * D;
    if (RING_CODES) x.codes = RingCodes(is_key ? a.ring_key : a.ring_value, a.ring_scales, owner * a.ring, head, is_key);
    x.is_key = is_key;
    return x;
}

// New tokens of a sequence: positions [before, length), the first of them at `begin` in the batch.
struct NewTokens {
    int begin, count, before, length, start;
};

// Channels of the token at a position: a new one, or one of the ring, which is relative already.
__device__ __forceinline__ void load_token(const AppendParams &a, const HeadSide &side, const NewTokens &tokens,
                                           int at, float (&x)[N], int lane) {
    const bool fresh = at >= tokens.before;
    const u16 *p = fresh ? side.source + (tokens.begin + at - tokens.before) * side.stride
                         : side.ring + (long long)(at % a.ring) * HKV * D;
    const u16 *o = fresh ? side.center : nullptr;
#pragma unroll
    for (int k = 0; k < N; k++)
        x[k] = THERE(k) ? finite(model_to_float(relative(p[lane + 32 * k], o, lane + 32 * k))) : 0.f;
}

// A token rotated, as it is coded: with a window of 8 bits rounded first, as the ring has it.
__device__ __forceinline__ void load_rotated(const AppendParams &a, const HeadSide &side, const NewTokens &tokens,
                                             int at, float (&x)[N], int lane) {
    if (RING_CODES && at < tokens.before) {
        read_codes(side.codes, at % a.ring, side.is_key, x, lane);
        return;
    }
    load_token(a, side, tokens, at, x, lane);
    rotate(x, a.rotation, lane);
    if (RING_CODES) scale_exact(x, round_exact(x, side.is_key));
}

// Every step-th of the new tokens, from the `own`-th on: those that the ring still has afterwards, then the sinks.
__device__ __forceinline__ void copy_to_ring(const AppendParams &a, const HeadSide &side, const NewTokens &tokens,
                                             int own, int step, int lane) {
    for (int t = max(tokens.count - a.ring, 0) + own; t < tokens.count; t += step) {
        if (RING_CODES) {
            const int slot = (tokens.before + t) % a.ring;
            float x[N];
            load_token(a, side, tokens, tokens.before + t, x, lane);
            rotate(x, a.rotation, lane);
            const u16 scale = round_exact(x, side.is_key);
            if (lane == 0) side.codes.scale(slot) = scale;
            write_codes(side.codes.at(slot), x, side.is_key, lane);
            continue;
        }
        const u16 *x = side.source + (tokens.begin + t) * side.stride;
        u16 *place = side.ring + (long long)((tokens.before + t) % a.ring) * HKV * D;
        for (int d = lane; d < D; d += 32) place[d] = relative(x[d], side.center, d);
    }
    const int sinks_to = min(tokens.length, tokens.start + a.sinks);
    for (int at = max(tokens.before, tokens.start) + own; at < sinks_to; at += step) {
        const u16 *x = side.source + (tokens.begin + at - tokens.before) * side.stride;
        u16 *place = side.sink + (long long)(at - tokens.start) * HKV * D;
        for (int d = lane; d < D; d += 32) place[d] = relative(x[d], side.center, d);
    }
}

// The mean of keys [from, to) of a page, to its record and to shared memory, by way of `sums`.
__device__ __forceinline__ void page_mean(const AppendParams &a, const HeadSide &side, const NewTokens &tokens,
                                          int from, int to, u8 *record, float (&sums)[PARTS][D], float (&mean)[D],
                                          int lane, int warp) {
    const int warps = blockDim.x >> 5;
    for (int p = warp; p < PARTS; p += warps) {
        float sum[N];
#pragma unroll
        for (int k = 0; k < N; k++) sum[k] = 0.f;
        for (int at = from + p; at < to; at += PARTS) {
            float x[N];
            if (RING_CODES)
                load_rotated(a, side, tokens, at, x, lane);
            else
                load_token(a, side, tokens, at, x, lane);
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
        mean_of_sum(sum, to - from, a.rotation, record, true, mean, lane);
    }
}

// A rotated token -> its codes in shared memory, and its scale. `mean`: of keys that have one.
__device__ __forceinline__ float encode_token(float (&x)[N], u8 *codes, const float (&mean)[D], bool has_mean,
                                              bool is_key, int lane) {
    if (!is_key) return fminf(fmaxf(quantize<VALUE_BITS, VALUE_MODE>(x, codes, lane), -65504.f), 65504.f);
    bool centered = false;
    float size;
    if (has_mean) centered = center_key(x, mean, lane, size);
    const float scale = fminf(fmaxf(quantize<KEY_BITS, KEY_MODE>(x, codes, lane), -65504.f), 65504.f);
    return centered ? -scale : scale;
}

// Codes of slots [from, to) of a page, from shared memory to their words in the page, by all threads.
__device__ __forceinline__ void pack_keys(u8 *record, const u8 (&codes)[ROOM][D], int from, int to) {
    constexpr bool halves = D % 32 != 0;  // words of 16 bits, else of 32
    constexpr int C = halves ? D / 16 : D / 32, BLOCK = KEY_BITS * 32 * C;  // words of 32 tokens
    const int first = from / 32, last = (to - 1) / 32;
    for (int w = first * BLOCK + threadIdx.x; w < (last + 1) * BLOCK; w += blockDim.x) {
        const int i = w % 4, c = w / 4 % C, r = w / (4 * C) % 8, j = w / (32 * C) % KEY_BITS;
        const int t = w / BLOCK * 32 + 8 * i + r;
        if (t < from || t >= to) continue;
        const u8 *own = codes[t % ROOM];
        if (halves)
            ((u16 *)record)[w] = pack_half_word<KEY_BITS>(j, [&](int k) { return own[16 * c + k]; });
        else
            ((u32 *)record)[w] = pack<KEY_BITS>(j, [&](int k) { return own[32 * c + k]; });
    }
}

// A word has codes of two neighbouring tokens in turn; those of a token outside stay.
__device__ __forceinline__ void pack_values(u8 *record, const u8 (&codes)[ROOM][D], int from, int to) {
    constexpr int C = D / 16, BLOCK = VALUE_BITS * 16 * C;
    const int first = from / 32, last = (to - 1) / 32;
    u32 *plane = (u32 *)(record + VALUE_AT);
    for (int w = first * BLOCK + threadIdx.x; w < (last + 1) * BLOCK; w += blockDim.x) {
        const int i = w % 4, c = w / 4 % 4, ch = w / 16 % C, j = w / (16 * C) % VALUE_BITS;
        const int t = w / BLOCK * 32 + 2 * (4 * i + c);
        const bool even = t >= from && t < to, odd = t + 1 >= from && t + 1 < to;
        if (!even && !odd) continue;
        u32 word = pack<VALUE_BITS>(j, [&](int k) {
            return ((k & 1) ? odd : even) ? codes[(t + (k & 1)) % ROOM][16 * ch + k / 2] : (u8)0;
        });
        if (!even || !odd) {
            const u32 own = pack<VALUE_BITS>(
                j, [&](int k) { return ((k & 1) ? odd : even) ? (u8)((1 << VALUE_BITS) - 1) : (u8)0; });
            word |= plane[w] & ~own;
        }
        plane[w] = word;
    }
}

struct Room {
    union {  // of a mean, which is made first, and codes
        float sums[PARTS][D];
        u8 codes[ROOM][D];
    };
    float mean[D];
};

// Codes of positions [low, high) of a page of a head, by all threads. A complete page's keys are relative to its
// mean, which is made where all its tokens are exact; `exact_from`: the first that is.
__device__ __forceinline__ void encode_page(Room &room, const AppendParams &a, const HeadSide &side,
                                            const NewTokens &tokens, u8 *record, int page_at, int low, int high,
                                            int exact_from, bool complete, bool is_key) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const bool has_mean = is_key && complete && MEAN_BITS > 0;
    if (has_mean && exact_from <= page_at)
        page_mean(a, side, tokens, max(tokens.start, page_at), page_at + PAGE, record, room.sums, room.mean, lane, warp);
    else if (has_mean && warp == 0)
        read_mean(record, room.mean, lane);
    if (has_mean) __syncthreads();

#pragma unroll 1
    for (int part = page_at; part < page_at + PAGE; part += ROOM) {
        const int from = max(low, part), to = min(high, part + ROOM);
        if (from >= to) continue;
        for (int at = from + warp; at < to; at += warps) {
            const int t = at - page_at;
            float x[N];
            load_rotated(a, side, tokens, at, x, lane);
            const float scale = encode_token(x, room.codes[t % ROOM], room.mean, has_mean, is_key, lane);
            u16 *scales = (u16 *)(record + (is_key ? KEY_SCALE_AT : VALUE_SCALE_AT));
            if (lane == 0) scales[scale_slot(t)] = float_to_half(scale);
        }
        __syncthreads();
        if (is_key)
            pack_keys(record, room.codes, from - page_at, to - page_at);
        else
            pack_values(record, room.codes, from - page_at, to - page_at);
        __syncthreads();  // codes are free for what comes next
    }
}

// Keys or values of a sequence's head, by number; of its pages or copies, every `slices`-th from `slice` on.
__device__ __forceinline__ void append_tokens(const AppendParams &a, int number, bool is_key, int slice,
                                              int slices) {
    __shared__ Room room;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int row = number / HKV, head = number % HKV;
    const int begin = a.cu_seqlens[row], count = a.cu_seqlens[row + 1] - begin;
    const int length = a.lengths[row];
    if (!count || length < count) return;
    const NewTokens tokens = {begin, count, length - count, length, a.left_pad[row]};
    const HeadSide side = head_side(a, head, a.ring_rows[row], is_key);
    if (a.copy) copy_to_ring(a, side, tokens, slice * warps + warp, slices * warps, lane);
    if (a.encode == ENCODE_NOTHING) return;

    for (int index = max(tokens.before - a.lag, 0) / PAGE + slice; index * PAGE < length - a.lag; index += slices) {
        const int page_at = index * PAGE;
        const bool complete = page_at + PAGE <= length - a.lag;
        if (!complete && !a.encode_partial_page) return;
        if (a.encode == KEYS_APART && is_key && complete) continue;
        const int id = a.block_table[row * a.table_b + index];
        if (id < 0) continue;  // nobody will read it
        const int exact_from = a.ring_valid_from[row];
        // Values that were coded when they came have the bytes that they would get again.
        const bool again = complete && !(a.encode_partial_page && (!is_key || MEAN_BITS == 0));
        const int low = max(again ? exact_from : tokens.before, page_at);
        const int high = min(length, page_at + PAGE);
        u8 *record = a.pages + id * a.page_bytes + head * RECORD;
        encode_page(room, a, side, tokens, record, page_at, low, high, exact_from, complete, is_key);
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
    const int before = length - count, full_to = max(length - a.lag, 0) / PAGE * PAGE;
    // Values that were coded when they came have the bytes that they would get again.
    const bool coded = a.encode_partial_page && (!is_key || MEAN_BITS == 0);
    if (a.encode && max(before - a.lag, 0) < full_to && !coded && !(is_key && a.encode >= KEYS_APART)) return true;
    const HeadSide side = head_side(a, head, owner, is_key);

#pragma unroll 1
    for (int at = before; at < length; at++) {
        const u16 *p = side.source + (begin + at - before) * side.stride;
        u16 own[N];
#pragma unroll
        for (int k = 0; k < N; k++) own[k] = THERE(k) ? relative(p[lane + 32 * k], side.center, lane + 32 * k) : (u16)0;
        float x[N];
        if (RING_CODES) {
#pragma unroll
            for (int k = 0; k < N; k++) x[k] = finite(model_to_float(own[k]));
            rotate(x, a.rotation, lane);
            const u16 scale = round_exact(x, is_key);
            const int slot = at % a.ring;
            if (at >= length - a.ring) {
                if (lane == 0) side.codes.scale(slot) = scale;
                write_codes(side.codes.at(slot), x, is_key, lane);
            }
            scale_exact(x, scale);
        } else if (at >= length - a.ring) {
            u16 *place = side.ring + (long long)(at % a.ring) * HKV * D;
#pragma unroll
            for (int k = 0; k < N; k++)
                if (THERE(k)) place[lane + 32 * k] = own[k];
        }
        if (at >= start && at < start + a.sinks) {
            u16 *place = side.sink + (long long)(at - start) * HKV * D;
#pragma unroll
            for (int k = 0; k < N; k++)
                if (THERE(k)) place[lane + 32 * k] = own[k];
        }
        const bool sealed_apart = is_key && a.encode == KEYS_APART && at < full_to;
        if (!a.encode || !a.encode_partial_page || sealed_apart) continue;
        const int id = load_now(a.block_table + row * a.table_b + at / PAGE), t = at % PAGE;
        if (id < 0) continue;  // nobody will read it
        u8 *record = a.pages + id * a.page_bytes + head * RECORD;
        if (!RING_CODES) {
#pragma unroll
            for (int k = 0; k < N; k++) x[k] = finite(model_to_float(own[k]));
            rotate(x, a.rotation, lane);
        }
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
