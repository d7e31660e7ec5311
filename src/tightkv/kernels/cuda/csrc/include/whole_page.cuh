// Encode a whole page of one head, keys or values, from tokens that are all at hand.
//
// A token lies in D / 16 lanes, 16 channels in each, so that sums of a token take few shuffles and its
// codes are packed where they are. A lane has the tokens r, r + 8, r + 16 and r + 24 of 32, whose words
// lie side by side in the page (page_codes.cuh).
#pragma once

#include "encode.cuh"

#define LANES (D / 16)       // of a token
#define TOKENS (32 / LANES)  // of a warp, at once

__device__ __forceinline__ float token_sum(float x) {
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// Channels 16 c to 16 c + 15 of a token.
__device__ __forceinline__ void load16(const u16 *token, int c, float (&x)[16]) {
    float odd = 0.f;
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const uint4 eight = ((const uint4 *)(token + 16 * c))[v];
        const u32 w[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float y = model_to_float((u16)(w[k / 2] >> (16 * (k & 1))));
            x[8 * v + k] = y, odd = fmaf(y, 0.f, odd);
        }
    }
    if (odd != odd)  // some are not finite
#pragma unroll
        for (int k = 0; k < 16; k++) x[k] = finite(x[k]);
}

// As hadamard.cuh, the same sums in the same order.
__device__ __forceinline__ void rotate16(float (&x)[16], const float (&sign)[16], int c) {
#if ROTATED
#pragma unroll
    for (int k = 0; k < 16; k++) x[k] *= sign[k];
#pragma unroll
    for (int bit = 1; bit < 16; bit *= 2)
#pragma unroll
        for (int k = 0; k < 16; k++)
            if (!(k & bit)) {
                const float a = x[k], b = x[k + bit];
                x[k] = a + b, x[k + bit] = a - b;
            }
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) {
        const float own = (c & bit) ? -1.f : 1.f;
#pragma unroll
        for (int k = 0; k < 16; k++) x[k] = fmaf(x[k], own, __shfl_xor_sync(~0u, x[k], bit));
    }
#pragma unroll
    for (int k = 0; k < 16; k++) x[k] *= ROOT;
#endif
}

// The code of one coordinate of unit variance, by bisection.
template <int BITS>
__device__ __forceinline__ u32 nearest_code(float z) {
    typedef Codebook<BITS> Book;
    const float size = fabsf(z);
    const u32 sign = z < 0.f ? 1 << (BITS - 1) : 0;
    if constexpr (BITS == 8) {
        const float level = rintf(z * Book::threshold(0));
        return (u32)(int)fminf(fmaxf(level, -127.f), 127.f) & 255;
    } else if constexpr (BITS == 2) {
        return sign | (size > Book::threshold(0) ? 1 : 0);
    } else if constexpr (BITS == 3) {
        const bool upper = size > Book::threshold(1);
        const bool odd = size > (upper ? Book::threshold(2) : Book::threshold(0));
        return sign | (upper ? 2 : 0) | (odd ? 1 : 0);
    } else {
        const bool high = size > Book::threshold(3);
        const bool upper = size > (high ? Book::threshold(5) : Book::threshold(1));
        const float of_high = upper ? Book::threshold(6) : Book::threshold(4);
        const float of_low = upper ? Book::threshold(2) : Book::threshold(0);
        const bool odd = size > (high ? of_high : of_low);
        return sign | (high ? 4 : 0) | (upper ? 2 : 0) | (odd ? 1 : 0);
    }
}

// 16 codes: nibbles of two words, or bytes of four.
template <int BITS>
struct LaneCodes {
    u32 of[BITS == 8 ? 4 : 2];
};

// Rotated y, whose square is given, of the lanes of a token -> codes and scale. `levels` of all codes.
template <int BITS, int MODE>
__device__ __forceinline__ float quantize16(const float (&y)[16], float square, const float *levels,
                                            LaneCodes<BITS> &codes) {
    constexpr int EACH = BITS == 8 ? 4 : 8, WIDE = BITS == 8 ? 8 : 4;
    const float tiny = 1.1754943508222875e-38f, norm = __fsqrt_rn(square);
    const float width = __fdiv_rn(WIDTH, fmaxf(norm, 1e-30f));
    float yc = 0.f, cc = 0.f;
#pragma unroll
    for (int n = 0; n < 16 / EACH; n++) codes.of[n] = 0;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const u32 code = nearest_code<BITS>(y[k] * width);
        codes.of[k / EACH] |= code << (WIDE * (k % EACH));
        const float level = BITS == 8 ? (float)(int)(signed char)code * levels[0] : levels[code];
        if (MODE > 1) yc = fmaf(y[k], level, yc);
        if (MODE == 1 || MODE == 2) cc = fmaf(level, level, cc);
    }
    if (MODE == 0) return norm;
    if (MODE == 1) return __fdiv_rn(norm, fmaxf(__fsqrt_rn(token_sum(cc)), tiny));
    if (MODE == 2) return __fdiv_rn(token_sum(yc), fmaxf(token_sum(cc), tiny));
    return __fdiv_rn(square, fmaxf(token_sum(yc), tiny));
}

// Four nibbles, one in every second place.
__device__ __forceinline__ u32 spread(u32 x) {
    x = (x | x << 8) & 0x00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0fu;
}

// Nibbles of three bits have the fourth bit for a part of eight further codes.
__device__ __forceinline__ u32 with_spare(u32 word, u32 spare, int j) {
    return word | ((spare >> j) & 0x11111111u) << 3;
}

// Words that a lane stores; `first` is the index of the first of them among those of 32 codes.
template <int BITS>
struct LaneWords {
    static constexpr int COUNT = BITS == 2 ? 1 : BITS == 8 ? 4 : 2;  // of 3 bits, every second lane has one
    u32 of[COUNT];
    int first;
};

template <int BITS>
__device__ __forceinline__ void key_words(const LaneCodes<BITS> &codes, int c, LaneWords<BITS> &w) {
    const int half = c & 1;  // of 32 channels
    w.first = half * (BITS / 2 + (BITS == 3));
    if constexpr (BITS == 8) {
#pragma unroll
        for (int n = 0; n < 4; n++) w.of[n] = codes.of[n];
    } else if constexpr (BITS == 4) {
        w.of[0] = codes.of[0], w.of[1] = codes.of[1];
    } else if constexpr (BITS == 2) {
        w.of[0] = codes.of[0] | codes.of[1] << 2;
    } else {
        const u32 other = __shfl_xor_sync(~0u, codes.of[1], 1), spare = half ? codes.of[1] : other;
        w.of[0] = with_spare(codes.of[0], spare, half ? 2 : 0);
        w.of[1] = with_spare(codes.of[1], spare, 1);
    }
}

// A word of values has both tokens of a pair, which are LANES lanes apart: `odd` is of the second.
template <int BITS>
__device__ __forceinline__ void value_words(const LaneCodes<BITS> &codes, bool odd, LaneWords<BITS> &w) {
    w.first = odd * (BITS / 2 + (BITS == 3));
    if constexpr (BITS == 8) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const u32 got = __shfl_xor_sync(~0u, odd ? codes.of[n] : codes.of[2 + n], LANES);
            const u32 even_one = odd ? got : codes.of[n], odd_one = odd ? codes.of[2 + n] : got;
            w.of[2 * n] = prmt(even_one, odd_one, 0x5140);
            w.of[2 * n + 1] = prmt(even_one, odd_one, 0x7362);
        }
    } else {
        const u32 got = __shfl_xor_sync(~0u, odd ? codes.of[0] : codes.of[1], LANES);
        const u32 even_one = odd ? got : codes.of[0], odd_one = odd ? codes.of[1] : got;
        const u32 low = spread(even_one & 0xffff) | spread(odd_one & 0xffff) << 4;
        const u32 high = spread(even_one >> 16) | spread(odd_one >> 16) << 4;
        if constexpr (BITS == 2) {
            w.of[0] = low | high << 2;
        } else if constexpr (BITS == 4) {
            w.of[0] = low, w.of[1] = high;
        } else {
            const u32 other = __shfl_xor_sync(~0u, high, LANES), spare = odd ? high : other;
            w.of[0] = with_spare(low, spare, odd ? 2 : 0);
            w.of[1] = with_spare(high, spare, 1);
        }
    }
}

// Levels of all codes, in the order of the codes, times ROOT.
template <int BITS>
__device__ __forceinline__ void fill_levels(float *levels) {
    constexpr int HALF = BITS == 8 ? 1 : 1 << (BITS - 1);  // of eight bits, the unit alone
#pragma unroll
    for (int i = 0; i < HALF; i++)
        if (threadIdx.x == i) {
            const float level = Codebook<BITS>::magnitude(i) * ROOT;
            levels[i] = level, levels[HALF + i] = -level;
        }
}

// All tokens of a page from position page_at on. Keys are taken relative to `mean`, if there is one and
// they are nearer to it than to zero.
template <bool IS_KEY>
__device__ __forceinline__ void encode_page(const TokenReader &tokens, int page_at, u8 *record,
                                            const float *signs, const float *mean, const float *levels,
                                            int lane, int warp, int warps) {
    constexpr int BITS = IS_KEY ? KEY_BITS : VALUE_BITS, MODE = IS_KEY ? KEY_MODE : VALUE_MODE;
    constexpr bool CENTER = IS_KEY && MEAN_BITS > 0;
    constexpr int COUNT = LaneWords<BITS>::COUNT;
    const int c = lane % LANES, own = lane / LANES;
    float sign[16], center[16];
#pragma unroll
    for (int k = 0; k < 16; k++) {
        sign[k] = ROTATED ? signs[16 * c + k] : 1.f;
        center[k] = CENTER ? mean[16 * c + k] : 0.f;
    }
    for (int unit = warp; unit < PAGE / 4 / TOKENS; unit += warps) {
        const int block = unit * TOKENS / 8, r = unit * TOKENS % 8 + own;
        u32 words[COUNT][4];
        u32 scales[4];
        int first = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x[16], square = 0.f;
            load16(tokens.at(page_at + 32 * block + 8 * i + r), c, x);
            rotate16(x, sign, c);
#pragma unroll
            for (int k = 0; k < 16; k++) square = fmaf(x[k], x[k], square);
            square = token_sum(square);
            bool centered = false;
            if (CENTER) {
                float rest = 0.f;
#pragma unroll
                for (int k = 0; k < 16; k++) {
                    const float y = x[k] - center[k];
                    rest = fmaf(y, y, rest);
                }
                rest = token_sum(rest);
                centered = rest < square;
                square = centered ? rest : square;
#pragma unroll
                for (int k = 0; k < 16; k++) x[k] -= centered ? center[k] : 0.f;
            }
            LaneCodes<BITS> codes;
            float scale = quantize16<BITS, MODE>(x, square, levels, codes);
            scale = fminf(fmaxf(scale, -65504.f), 65504.f);
            scales[i] = float_to_half(centered ? -scale : scale);
            LaneWords<BITS> w;
            if (IS_KEY)
                key_words<BITS>(codes, c, w);
            else
                value_words<BITS>(codes, own & 1, w);
            first = w.first;
#pragma unroll
            for (int n = 0; n < COUNT; n++) words[n][i] = w.of[n];
        }
        u8 *plane = record + (IS_KEY ? 0 : VALUE_AT);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (BITS == 3 && n && first) continue;  // the lane has one word
            const int j = block * BITS + first + n;
            const int at = IS_KEY ? (j * 8 + r) * (D / 32) + c / 2 : (j * (D / 16) + c) * 4 + r / 2;
            ((uint4 *)plane)[at] = {words[n][0], words[n][1], words[n][2], words[n][3]};
        }
        if (c == 0)
            *(uint2 *)(record + (IS_KEY ? KEY_SCALE_AT : VALUE_SCALE_AT) + 64 * block + 8 * r) =
                make_uint2(scales[0] | scales[1] << 16, scales[2] | scales[3] << 16);
    }
}
