// Encoders: arguments of an append, the quantizer, the order of bits, a page's mean.
#pragma once

#include "hadamard.cuh"
#include "model_dtype.cuh"

#define PARTS 8  // of a page's sum, however many threads there are: the sum must not depend on it
#define N LANE_CHANNELS

struct AppendParams {
    const u16 *key, *value;
    u8 *pages;
    const int *block_table, *lengths, *left_pad, *ring_rows, *ring_valid_from, *cu_seqlens;
    u16 *ring_key, *ring_value, *sink_key, *sink_value;
    const float *rotation;  // signs [D], or a matrix [D, D]
    const u16 *key_center, *value_center;  // [HKV, D] or null: what new tokens are stored relative to
    long long key_n, key_h, value_n, value_h, table_b, page_bytes;
    int ring, sinks, encode_partial_page;
    int copy, encode;  // whether tokens go to ring and sinks; what of their pages is encoded:
    u16 *ring_scales;  // of a ring of codes: [rows, ring, HKV, key and value]
    int lag;  // tokens that follow a page when it is sealed; 0 where open pages are encoded
};

// KEYS_APART: seal.cu has the keys of complete pages. KEYS_LATER: they are coded as those of other pages now, and
// sealed after this step (seal_layers.cu).
enum { ENCODE_NOTHING, ENCODE_ALL, KEYS_APART, KEYS_LATER };

__device__ __forceinline__ float finite(float x) {
    if (x != x) return 0.f;
    if (x == __int_as_float(0x7f800000)) return 65504.f;
    return x == __int_as_float(0xff800000) ? -65504.f : x;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// The same sums in the same order as math.rotation.
__device__ __forceinline__ void rotate(float (&x)[N], const float *rotation, int lane) {
#if HADAMARD
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= rotation[lane + 32 * k];
    hadamard(x, lane);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= ROOT;
#elif DENSE
    multiply<double>(x, rotation, lane);
#endif
}

// --- a window of 8 bits: docs/layout.md has the rounding ---

// A ring's head, and what its tokens have of it: keys D bytes and D / 2 of nibbles, values D bytes.
struct RingCodes {
    u8 *codes;    // of the row's first token
    u16 *scales;  // keys and values of a token are side by side
    int row_bytes;

    __device__ __forceinline__ RingCodes() {}
    __device__ __forceinline__ RingCodes(const void *ring, const u16 *all_scales, long long first, int head,
                                         bool is_key)
        : codes((u8 *)ring + (first * HKV + head) * (is_key ? D * 3 / 2 : D)),
          scales((u16 *)all_scales + 2 * (first * HKV + head) + !is_key), row_bytes(is_key ? D * 3 / 2 : D) {}
    __device__ __forceinline__ u8 *at(int slot) const { return codes + (long long)slot * HKV * row_bytes; }
    __device__ __forceinline__ u16 &scale(int slot) const { return scales[(long long)slot * HKV * 2]; }
};

// Rotated x -> whole numbers; returns the float16 scale.
__device__ __forceinline__ u16 round_exact(float (&x)[N], bool is_key) {
    const float levels = is_key ? 2047.f : 127.f;
    u32 top = 0;  // bits of the largest magnitude; those of NaN are larger than any
#pragma unroll
    for (int k = 0; k < N; k++) top = max((int)top, __float_as_int(fabsf(x[k])));
    const float wanted = __fmul_rn(__int_as_float(warp_max(top)), is_key ? 1.f / 2047.f : 1.f / 127.f);
    const u16 scale = float_to_half(wanted > 65504.f ? 65504.f : wanted);
    const float step = half_to_float(scale), inverse = __fdiv_rn(1.f, step);
#pragma unroll
    for (int k = 0; k < N; k++)
        x[k] = step > 0.f ? fminf(fmaxf(rintf(__fmul_rn(x[k], inverse)), -levels), levels) : 0.f;
    return scale;
}

__device__ __forceinline__ void scale_exact(float (&x)[N], u16 scale) {
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= half_to_float(scale);
}

// Codes of a token to its place in the ring.
__device__ __forceinline__ void write_codes(u8 *place, const float (&codes)[N], bool is_key, int lane) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int d = lane + 32 * k, code = (int)codes[k], other = __shfl_xor_sync(~0u, code, 4);
        if (!THERE(k)) continue;
        place[d] = (u8)(is_key ? code >> 4 : code);
        if (is_key && !(lane & 4)) place[D + d / 8 * 4 + d % 4] = (u8)(code & 15 | (other & 15) << 4);
    }
}

// A token of the ring, as numbers.
__device__ __forceinline__ void read_codes(const RingCodes &ring, int slot, bool is_key, float (&x)[N], int lane) {
    const u8 *place = ring.at(slot);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int d = lane + 32 * k;
        const int code = THERE(k) ? (signed char)place[d] : 0;
        const int low = THERE(k) && is_key ? place[D + d / 8 * 4 + d % 4] >> (d & 4) & 15 : 0;
        x[k] = (float)(is_key ? code * 16 + low : code);
    }
    scale_exact(x, ring.scale(slot));
}

template <int BITS>
struct Codebook;
template <>
struct Codebook<KEY_BITS> {
    static __device__ __forceinline__ float threshold(int i) {
        const float t[] = {KEY_THRESHOLDS};
        return t[i];
    }
    static __device__ __forceinline__ float magnitude(int i) {
        const float m[] = {KEY_MAGNITUDES};
        return m[i];
    }
};
#if VALUE_BITS != KEY_BITS
template <>
struct Codebook<VALUE_BITS> {
    static __device__ __forceinline__ float threshold(int i) {
        const float t[] = {VALUE_THRESHOLDS};
        return t[i];
    }
    static __device__ __forceinline__ float magnitude(int i) {
        const float m[] = {VALUE_MAGNITUDES};
        return m[i];
    }
};
#endif

// Rotated y of one token -> codes in shared memory, scale (all lanes).
template <int BITS, int MODE>
__device__ __forceinline__ float quantize(const float (&y)[N], u8 *codes, int lane) {
    const float tiny = 1.1754943508222875e-38f;
    double square = 0;
#pragma unroll
    for (int k = 0; k < N; k++) square += (double)y[k] * (double)y[k];
    const float norm = __fsqrt_rn((float)warp_sum(square));
    double yc = 0, cc = 0;
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (!THERE(k)) continue;
        float z = __fdiv_rn(y[k], fmaxf(norm, tiny)) * WIDTH, size = fabsf(z), c;
        int index = 0;
        if constexpr (BITS == 8) {  // whole multiples of a unit
            const float level = fminf(fmaxf(rintf(z * Codebook<BITS>::threshold(0)), -127.f), 127.f);
            index = (int)level, c = level * Codebook<BITS>::magnitude(0);
        } else {
            c = Codebook<BITS>::magnitude(0);
#pragma unroll
            for (int i = 0; i < (1 << (BITS - 1)) - 1; i++)
                if (size > Codebook<BITS>::threshold(i)) index = i + 1, c = Codebook<BITS>::magnitude(i + 1);
            if (z < 0.f) index += 1 << (BITS - 1), c = -c;
        }
        codes[lane + 32 * k] = (u8)index;
        c = c * ROOT;
        yc += (double)y[k] * (double)c;
        cc += (double)c * (double)c;
    }
    if (MODE == 0) return norm;
    if (MODE == 1) return __fdiv_rn(norm, fmaxf(__fsqrt_rn((float)warp_sum(cc)), tiny));
    if (MODE == 2) return __fdiv_rn((float)warp_sum(yc), fmaxf((float)warp_sum(cc), tiny));
    return __fdiv_rn(norm * norm, fmaxf((float)warp_sum(yc), tiny));
}

// Word j of 32 codes code(0..31).
template <int BITS, class F>
__device__ __forceinline__ u32 pack(int j, F code) {
    u32 w = 0;
    if (BITS == 8) {
#pragma unroll
        for (int n = 0; n < 4; n++) w |= (u32)code(4 * j + n) << (8 * n);
    } else if (BITS == 4) {
#pragma unroll
        for (int n = 0; n < 8; n++) w |= (u32)code(8 * j + n) << (4 * n);
    } else if (BITS == 3) {
#pragma unroll
        for (int n = 0; n < 8; n++)
            w |= (u32)code(8 * j + n) << (4 * n) | (((u32)code(24 + n) >> j) & 1) << (4 * n + 3);
    } else {
#pragma unroll
        for (int n = 0; n < 16; n++) w |= (u32)code(16 * j + n) << (4 * (n % 8) + 2 * (n / 8));
    }
    return w;
}

// Word j, of 16 bits, of 16 codes code(0..15).
template <int BITS, class F>
__device__ __forceinline__ u16 pack_half_word(int j, F code) {
    u32 w = 0;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (BITS == 8)
            w |= n < 2 ? (u32)code(2 * j + n) << (8 * n) : 0;
        else
            w |= (u32)code(4 * j + n) << (4 * n);
        if (BITS == 3) w |= (((u32)code(12 + n) >> j) & 1) << (4 * n + 3);
        if (BITS == 2) w |= (u32)code(8 + 4 * j + n) << (4 * n + 2);
    }
    return (u16)w;
}

// The mean key of a page, in the rotated frame, to shared memory, from the sum of `real` tokens that lanes
// hold as `rotate` takes them, or rotated ones where rings have codes; written to the page too, where it is `first`.
__device__ __forceinline__ void mean_of_sum(float (&x)[N], int real, const float *rotation, u8 *record,
                                            bool first, float (&mean)[D], int lane) {
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = __fdiv_rn(x[k], (float)max(real, 1));
    if (!RING_CODES) rotate(x, rotation, lane);
#if MEAN_BITS == 8
    float top = 0.f;
#pragma unroll
    for (int k = 0; k < N; k++) top = fmaxf(top, fabsf(x[k]));
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, bit));
    const u16 half_step = float_to_half(__fdiv_rn(top, 127.f));
    const float step = half_to_float(half_step);
    if (lane == 0 && first) *(u16 *)(record + MEAN_AT + D) = half_step;
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (!THERE(k)) continue;
        float level = rintf(__fdiv_rn(x[k], fmaxf(step, 6.103515625e-05f)));
        level = fminf(fmaxf(level, -127.f), 127.f);
        if (first) ((signed char *)(record + MEAN_AT))[lane + 32 * k] = (signed char)level;
        mean[lane + 32 * k] = level * step;
    }
#else
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (!THERE(k)) continue;
        const u16 h = float_to_half(x[k]);
        if (first) ((u16 *)(record + MEAN_AT))[lane + 32 * k] = h;
        mean[lane + 32 * k] = half_to_float(h);
    }
#endif
}

// A rotated key or what is left of it without its page's mean, whichever is smaller, and its squared size.
__device__ __forceinline__ bool center_key(float (&x)[N], const float (&mean)[D], int lane, float &size) {
    double plain = 0, without = 0;
    float rest[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        rest[k] = THERE(k) ? __fadd_rn(x[k], -mean[lane + 32 * k]) : 0.f;
        plain += (double)x[k] * (double)x[k];
        without += (double)rest[k] * (double)rest[k];
    }
    const float of_rest = (float)warp_sum(without);
    size = (float)warp_sum(plain);
    const bool centered = of_rest < size;
    size = centered ? of_rest : size;
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = centered ? rest[k] : x[k];
    return centered;
}

// The mean that a page has.
__device__ __forceinline__ void read_mean(const u8 *record, float (&mean)[D], int lane) {
    for (int d = lane; d < D; d += 32)
#if MEAN_BITS == 8
        mean[d] = (float)((signed char *)(record + MEAN_AT))[d] *
                  half_to_float(*(u16 *)(record + MEAN_AT + D));
#else
        mean[d] = half_to_float(((u16 *)(record + MEAN_AT))[d]);
#endif
}
