// Encode tokens of one page and head, keys or values: a warp each, lane l holding channels l + 32 k. Codes go
// through shared memory and are packed word by word.
#pragma once

#include "encode.cuh"

#define ROOM (PAGE * D > 32768 ? 32768 / D : PAGE)  // tokens whose codes fit shared memory

// Tokens [low, high) of the page from position page_at on, keys relative to its mean if they are nearer to it.
template <class Load>
__device__ __forceinline__ void encode_tokens(const Load &load, int page_at, int low, int high, bool is_key,
                                              bool has_mean, const float *signs, u8 *record, const float *mean,
                                              u8 (&codes)[ROOM][D], int lane, int warp, int warps) {
#pragma unroll 1
    for (int part = page_at; part < page_at + PAGE; part += ROOM) {
        const int from = max(low, part), to = min(high, part + ROOM);
        if (from >= to) continue;
        for (int at = from + warp; at < to; at += warps) {
            const int t = at - page_at;
            float x[N];
            load(at, x);
            rotate(x, signs, lane);
            float scale;
            u16 *scales;
            if (is_key) {
                bool centered = false;
                if (has_mean) {
                    double plain = 0, rest = 0;
                    float y[N];
#pragma unroll
                    for (int k = 0; k < N; k++) {
                        y[k] = __fadd_rn(x[k], -mean[lane + MEAN_STRIDE * k]);
                        plain += (double)x[k] * (double)x[k];
                        rest += (double)y[k] * (double)y[k];
                    }
                    centered = (float)warp_sum(rest) < (float)warp_sum(plain);
#pragma unroll
                    for (int k = 0; k < N; k++) x[k] = centered ? y[k] : x[k];
                }
                scale = quantize<KEY_BITS, KEY_MODE>(x, codes[t % ROOM], lane);
                scale = fminf(fmaxf(scale, -65504.f), 65504.f);
                scale = centered ? -scale : scale;
                scales = (u16 *)(record + KEY_SCALE_AT);
            } else {
                scale = quantize<VALUE_BITS, VALUE_MODE>(x, codes[t % ROOM], lane);
                scale = fminf(fmaxf(scale, -65504.f), 65504.f);
                scales = (u16 *)(record + VALUE_SCALE_AT);
            }
            if (lane == 0) scales[(t / 32) * 32 + (t % 8) * 4 + (t % 32) / 8] = float_to_half(scale);
        }
        __syncthreads();

        const int first_block = (from - page_at) / 32, last_block = (to - page_at - 1) / 32;
        if (is_key) {
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
