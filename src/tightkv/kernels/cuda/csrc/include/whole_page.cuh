// Encode a whole page of one head, keys or values, from tokens that are all at hand.
//
// A token lies in D / 32 lanes, 32 channels in each, which are what a word of keys has codes of. Bytes are
// those of encode_tokens.cuh, found without a division or a double for each coordinate.
#pragma once

#include "encode.cuh"

#define TOKEN_LANES (D / 32)
#define WARP_TOKENS (32 / TOKEN_LANES)  // at once
#define LARGEST_SQUARE 1e37f            // sums of squares above it may overflow
#define SUM_ERROR 1e-6f                 // of a plain sum over a token, relative to it, at most

#define FLIP_STRIDE 20  // words from the flips of 32 channels to the next: as MEAN_STRIDE

struct __align__(16) PageTables {  // of a block
    u32 flips[FLIP_STRIDE * N];  // sign bits of two channels each
    float levels[8];             // magnitudes of codes, times ROOT
    __device__ __forceinline__ void fill(const float *signs, bool is_key) {
        for (int d = threadIdx.x; d < D / 2; d += blockDim.x)
            flips[d / 16 * FLIP_STRIDE + d % 16] =
                ROTATED ? (signs[2 * d] < 0.f ? 0x8000u : 0) | (signs[2 * d + 1] < 0.f ? 0x80000000u : 0) : 0;
        fill_levels<KEY_BITS>(is_key);
        fill_levels<VALUE_BITS>(!is_key);
    }
    template <int BITS>
    __device__ __forceinline__ void fill_levels(bool own) {
#pragma unroll
        for (int i = 0; i < (BITS == 8 ? 1 : 1 << (BITS - 1)); i++)
            if (own && threadIdx.x == i) levels[i] = __fmul_rn(Codebook<BITS>::magnitude(i), ROOT);
    }
};

__device__ __forceinline__ float token_sum(float x) {
#pragma unroll
    for (int bit = 1; bit < TOKEN_LANES; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// Of the numbers of a token, to SUM_ERROR.
template <class F>
__device__ __forceinline__ float sum_of_squares(F number) {
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < 32; k++) {
        const float x = number(k);
        sums[k % 4] = fmaf(x, x, sums[k % 4]);
    }
    return token_sum(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// A power of two, at least twice x.
__device__ __forceinline__ float power_above(float x) {
    return __int_as_float((__float_as_int(x) & 0x7f800000) + 0x01000000);
}

// A sum of positive products in two floats: whole multiples of `start` * 2^-23, and the rest. `start` is a
// power of two above the sum. It is as good as a sum of doubles, but for one in 10^5 that is next to a tie.
struct TwoFloatSum {
    float high, low, start;
    __device__ __forceinline__ explicit TwoFloatSum(float start) : high(start), low(0.f), start(start) {}
    __device__ __forceinline__ void add(float x, float y) {
        const float next = __fmaf_rn(x, y, high), added = __fadd_rn(next, -high);
        low = __fadd_rn(low, __fmaf_rn(x, y, -added));
        high = next;
    }
    __device__ __forceinline__ float total() const {  // of the lanes of a token
        return __fadd_rn(token_sum(__fadd_rn(high, -start)), token_sum(low));
    }
};

// Tokens of one page, by their place in it.
struct PageReader {
    const u16 *fresh, *ring, *center;
    long long stride;
    int first_fresh, first_slot, slots;

    static __device__ __forceinline__ PageReader of(const TokenReader &x, int page_at) {
        return {x.fresh + (page_at - x.before) * x.stride, x.ring, x.center, x.stride,
                x.before - page_at, page_at % x.slots, x.slots};
    }
    __device__ __forceinline__ const u16 *at(int t) const {
        const int slot = first_slot + t;
        return t >= first_fresh ? fresh + t * stride
                                : ring + (long long)(slot >= slots ? slot - slots : slot) * HKV * D;
    }
    // Eight channels of the token t that lies at `token`.
    __device__ __forceinline__ uint4 load8(const u16 *token, int t, int channel) const {
        uint4 x = *(const uint4 *)(token + channel);
        if (center && t >= first_fresh) {
            const u16 *o = center + channel;
            x.x = relative2(x.x, o), x.y = relative2(x.y, o + 2);
            x.z = relative2(x.z, o + 4), x.w = relative2(x.w, o + 6);
        }
        return x;
    }
    static __device__ __forceinline__ u32 relative2(u32 x, const u16 *o) {
        return relative((u16)x, o, 0) | (u32)relative((u16)(x >> 16), o, 1) << 16;
    }
};

// The mean of the keys of a page from its token `from` on: see make_mean.
__device__ __forceinline__ void make_page_mean(const PageReader &tokens, int from, const float *signs, u8 *record,
                                               bool first, float (&sums)[PARTS][D], float *mean, int lane,
                                               int warp) {
    for (int item = threadIdx.x; item < PARTS * D / 8; item += blockDim.x) {
        const int p = item / (D / 8), channel = item % (D / 8) * 8;
        float part[8];
#pragma unroll 1
        for (bool clean = false;; clean = true) {
#pragma unroll
            for (int k = 0; k < 8; k++) part[k] = 0.f;
#pragma unroll 8
            for (int t = from + p; t < PAGE; t += PARTS) {
                const uint4 eight = tokens.load8(tokens.at(t), t, channel);
                const u32 w[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const float x = model_to_float((u16)(w[k / 2] >> (16 * (k & 1))));
                    part[k] += clean ? finite(x) : x;
                }
            }
            float some = 0.f;  // NaN if there is one, or an infinity
#pragma unroll
            for (int k = 0; k < 8; k++) some = fmaf(part[k], 0.f, some);
            if (clean || some == 0.f) break;
        }
#pragma unroll
        for (int k = 0; k < 8; k++) sums[p][channel + k] = part[k];
    }
    __syncthreads();
    finish_mean(PAGE - from, signs, record, first, sums, mean, lane, warp);
}

// Channels 32 c to 32 c + 31 of token t, rotated. Where some is NaN or infinite, so are sums of them.
__device__ __forceinline__ void load_rotated(const PageReader &tokens, int t, const u32 *flips, int c, bool clean,
                                             float (&x)[32]) {
    const u16 *token = tokens.at(t);
#pragma unroll
    for (int v = 0; v < 4; v++) {
        const uint4 eight = tokens.load8(token, t, 32 * c + 8 * v);
        const uint4 flip = *(const uint4 *)(flips + FLIP_STRIDE * c + 4 * v);
        const u32 w[4] = {eight.x ^ flip.x, eight.y ^ flip.y, eight.z ^ flip.z, eight.w ^ flip.w};
#pragma unroll
        for (int k = 0; k < 8; k++) x[8 * v + k] = model_to_float((u16)(w[k / 2] >> (16 * (k & 1))));
    }
    if (clean)
#pragma unroll
        for (int k = 0; k < 32; k++) x[k] = finite(x[k]);
#if ROTATED  // the same sums in the same order as hadamard.cuh
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int k = 0; k < 32; k++)
            if (!(k & bit)) {
                const float a = x[k], b = x[k + bit];
                x[k] = a + b, x[k + bit] = a - b;
            }
#pragma unroll
    for (int bit = 1; bit < TOKEN_LANES; bit *= 2) {
        const float own = (c & bit) ? -1.f : 1.f;
#pragma unroll
        for (int k = 0; k < 32; k++) x[k] = __fmaf_rn(x[k], own, __shfl_xor_sync(~0u, x[k], bit));
    }
#endif
#pragma unroll
    for (int k = 0; k < 32; k++) x[k] = __fmaf_rn(x[k], ROTATED ? ROOT : 1.f, 0.f);  // no -0
}

// 32 codes: nibbles of four words, or bytes of eight.
template <int BITS>
struct LaneCodes {
    static constexpr int EACH = BITS == 8 ? 4 : 8, WIDTH_BITS = 32 / EACH;
    u32 of[32 / EACH];
};

// Bounds that |y| must exceed for each next magnitude: the largest y for which the quotient by the norm,
// rounded, times WIDTH, rounded, is not above the threshold. Quotients next to it are never a tie.
template <int BITS>
__device__ __forceinline__ void code_bounds(float norm, float (&bound)[(1 << (BITS - 1)) - 1]) {
#pragma unroll
    for (int i = 0; i < (1 << (BITS - 1)) - 1; i++)
        bound[i] = __fmaf_rd(Codebook<BITS>::quotient(i), norm, norm * Codebook<BITS>::half_step(i));
}

// 4 times the index of the magnitude of a coordinate.
template <int BITS>
__device__ __forceinline__ u32 magnitude_offset(float size, const float (&b)[(1 << (BITS - 1)) - 1]) {
    if constexpr (BITS == 2) {
        return size > b[0] ? 4 : 0;
    } else if constexpr (BITS == 3) {
        const bool upper = size > b[1], odd = size > (upper ? b[2] : b[0]);
        return (upper ? 8 : 0) + (odd ? 4 : 0);
    } else {
        const bool high = size > b[3], upper = size > (high ? b[5] : b[1]);
        const float of_high = upper ? b[6] : b[4], of_low = upper ? b[2] : b[0];
        const bool odd = size > (high ? of_high : of_low);
        return (high ? 16 : 0) + (upper ? 8 : 0) + (odd ? 4 : 0);
    }
}

// Sign bits of eight numbers, each the highest of a nibble.
__device__ __forceinline__ u32 sign_nibbles(const float *y) {
    const auto top_bytes = [&](int first) {
        const u32 a = prmt(__float_as_int(y[first]), __float_as_int(y[first + 2]), 0x73);
        const u32 b = prmt(__float_as_int(y[first + 4]), __float_as_int(y[first + 6]), 0x73);
        return prmt(a, b, 0x5410) & 0x80808080u;
    };
    return top_bytes(0) >> 4 | top_bytes(1);
}

// The level of a code, without its sign.
template <int BITS>
__device__ __forceinline__ float level_of(const LaneCodes<BITS> &codes, int k, const float *levels) {
    const u32 code = codes.of[k / LaneCodes<BITS>::EACH] >> (32 / LaneCodes<BITS>::EACH * (k % LaneCodes<BITS>::EACH));
    if (BITS == 8) return __fmul_rn(__fmul_rn(fabsf((float)(signed char)code), Codebook<BITS>::magnitude(0)), ROOT);
    return levels[code & ((1 << (BITS - 1)) - 1)];
}

// The scale of a token from its norm, y.c and c.c.
template <int MODE>
__device__ __forceinline__ float scale_of(float norm, float along, float whole) {
    const float tiny = 1.1754943508222875e-38f;
    if (MODE == 0) return norm;
    if (MODE == 1) return __fdiv_rn(norm, fmaxf(__fsqrt_rn(whole), tiny));
    if (MODE == 2) return __fdiv_rn(along, fmaxf(whole, tiny));
    return __fdiv_rn(__fmul_rn(norm, norm), fmaxf(along, tiny));
}

// Rotated y, whose square is given, of the lanes of a token -> codes and scale, as a half.
template <int BITS, int MODE>
__device__ __forceinline__ u16 quantize_lanes(const float (&y)[32], float square, const float *levels,
                                              LaneCodes<BITS> &codes) {
    const float norm = __fsqrt_rn(square), divisor = fmaxf(norm, 1.1754943508222875e-38f);
    constexpr int EACH = LaneCodes<BITS>::EACH;
    float along[4] = {0.f, 0.f, 0.f, 0.f}, whole[4] = {0.f, 0.f, 0.f, 0.f};
    const auto add = [&](int k, float y, float c) {
        if (MODE >= 2) along[k % 4] = fmaf(y, c, along[k % 4]);
        if (MODE == 1 || MODE == 2) whole[k % 4] = fmaf(c, c, whole[k % 4]);
    };
    if constexpr (BITS == 8) {
#pragma unroll
        for (int n = 0; n < 32 / EACH; n++) codes.of[n] = 0;
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const float z = __fmul_rn(__fdiv_rn(y[k], divisor), WIDTH);
            const float level = fminf(fmaxf(rintf(z * Codebook<BITS>::threshold(0)), -127.f), 127.f);
            codes.of[k / EACH] |= ((u32)(int)level & 255) << (8 * (k % EACH));
            add(k, y[k], level * levels[0]);
        }
    } else {
        float bounds[(1 << (BITS - 1)) - 1];
        code_bounds<BITS>(divisor, bounds);
#pragma unroll
        for (int n = 0; n < 32 / EACH; n++) {
            u32 word = sign_nibbles(y + EACH * n) >> (4 - BITS);
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const float size = fabsf(y[EACH * n + k]);
                const u32 offset = magnitude_offset<BITS>(size, bounds);
                word += k ? offset << (4 * k - 2) : offset >> 2;
                add(k, size, *(const float *)((const char *)levels + offset));
            }
            codes.of[n] = word;
        }
    }
    // Where the error of these sums could round the scale to another half, they are made again, in two floats
    // each.
    float scale = scale_of<MODE>(norm, token_sum(along[0] + along[1] + (along[2] + along[3])),
                                 token_sum(whole[0] + whole[1] + (whole[2] + whole[3])));
    const float doubt = MODE ? 2.f * SUM_ERROR : 0.f;
    if (__any_sync(~0u, float_to_half(scale * (1.f - doubt)) != float_to_half(scale * (1.f + doubt)))) {
        TwoFloatSum exact_along(2.f * power_above(norm)), exact_whole(16.f);
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const float c = level_of<BITS>(codes, k, levels);
            if (MODE >= 2) exact_along.add(fabsf(y[k]), c);
            if (MODE == 1 || MODE == 2) exact_whole.add(c, c);
        }
        scale = scale_of<MODE>(norm, exact_along.total(), exact_whole.total());
    }
    return float_to_half(fminf(fmaxf(scale, -65504.f), 65504.f));
}

// Four nibbles, one in every second place.
__device__ __forceinline__ u32 spread(u32 x) {
    x = (x | x << 8) & 0x00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0fu;
}

// Codes of a token -> those of a pair of tokens in turn, of 16 channels: the first 16 of the lane if its
// token is the first of the pair, else the others.
template <int BITS>
__device__ __forceinline__ void pair_up(LaneCodes<BITS> &codes, bool second) {
    constexpr int HALF = 16 / LaneCodes<BITS>::EACH;
    u32 one[HALF], two[HALF];
#pragma unroll
    for (int n = 0; n < HALF; n++) {
        const u32 other = __shfl_xor_sync(~0u, second ? codes.of[n] : codes.of[HALF + n], TOKEN_LANES);
        one[n] = second ? other : codes.of[n];
        two[n] = second ? codes.of[HALF + n] : other;
    }
#pragma unroll
    for (int n = 0; n < HALF; n++) {
        if constexpr (BITS == 8) {
            codes.of[2 * n] = prmt(one[n], two[n], 0x5140);
            codes.of[2 * n + 1] = prmt(one[n], two[n], 0x7362);
        } else {
            codes.of[2 * n] = spread(one[n] & 0xffff) | spread(two[n] & 0xffff) << 4;
            codes.of[2 * n + 1] = spread(one[n] >> 16) | spread(two[n] >> 16) << 4;
        }
    }
}

// `pack` of encode.cuh.
template <int BITS>
__device__ __forceinline__ u32 packed_word(const LaneCodes<BITS> &codes, int j) {
    if (BITS == 2) return codes.of[2 * j] | codes.of[2 * j + 1] << 2;
    if (BITS == 3) return codes.of[j] | ((codes.of[3] >> j) & 0x11111111u) << 3;
    return codes.of[j];
}

// Tokens [from, to) of a page: codes to `plane`, in shared memory, scales to the page. Keys are taken relative to
// `mean` if they are nearer to it than to zero. False where numbers are too large for this.
template <bool IS_KEY>
__device__ __forceinline__ bool encode_page_tokens(const PageReader &tokens, int from, int to, u8 *record,
                                                   const float *mean, const PageTables &tables, u32 *plane,
                                                   int lane, int warp, int warps) {
    constexpr int BITS = IS_KEY ? KEY_BITS : VALUE_BITS, MODE = IS_KEY ? KEY_MODE : VALUE_MODE;
    const int c = lane % TOKEN_LANES, own = lane / TOKEN_LANES;
    u16 *scales = (u16 *)(record + (IS_KEY ? KEY_SCALE_AT : VALUE_SCALE_AT));
#pragma unroll 1
    for (int first = from + warp * WARP_TOKENS; first < to; first += warps * WARP_TOKENS) {
        const int t = first + own;
        float x[32], square;
#pragma unroll 1
        for (bool clean = false;; clean = true) {
            load_rotated(tokens, t, tables.flips, c, clean, x);
            square = sum_of_squares([&](int k) { return x[k]; });
            if (clean || !__any_sync(~0u, !(square <= LARGEST_SQUARE))) break;
        }
        bool centered = false, unusual = !(square <= LARGEST_SQUARE);
        if (IS_KEY && MEAN_BITS > 0) {
            const float *center = mean + MEAN_STRIDE * c;
            const float rest = sum_of_squares([&](int k) { return __fadd_rn(x[k], -center[k]); });
            centered = rest < square;
            unusual |= !(rest <= LARGEST_SQUARE);
            if (__any_sync(~0u, fabsf(rest - square) <= 2.f * SUM_ERROR * square)) {  // better sums decide
                __syncwarp();  // the mean is read again: registers are few
                TwoFloatSum plain(power_above(square)), other(power_above(rest));
#pragma unroll
                for (int k = 0; k < 32; k++) {
                    const float y = __fadd_rn(x[k], -center[k]);
                    plain.add(x[k], x[k]), other.add(y, y);
                }
                centered = other.total() < plain.total();
            }
            square = centered ? rest : square;
            const float taken = centered ? -1.f : 0.f;
#pragma unroll
            for (int k = 0; k < 32; k++) x[k] = __fmaf_rn(center[k], taken, x[k]);
        }
        if (__any_sync(~0u, unusual)) return false;
        TwoFloatSum sum(power_above(square));
#pragma unroll
        for (int k = 0; k < 32; k++) sum.add(x[k], x[k]);
        LaneCodes<BITS> codes;
        const u16 scale = quantize_lanes<BITS, MODE>(x, sum.total(), tables.levels, codes);
        if (c == 0) scales[t / 32 * 32 + t % 8 * 4 + t % 32 / 8] = centered ? scale | 0x8000 : scale;
        if (!IS_KEY) pair_up<BITS>(codes, own & 1);
        const int block = (t - from) / 32 * BITS;
#pragma unroll
        for (int j = 0; j < BITS; j++)
            if (IS_KEY)
                plane[(((block + j) * 8 + t % 8) * (D / 32) + c) * 4 + t % 32 / 8] = packed_word(codes, j);
            else
                plane[((block + j) * (D / 16) + 2 * c + (own & 1)) * 16 + t % 8 / 2 * 4 + t % 32 / 8] =
                    packed_word(codes, j);
    }
    return true;
}
