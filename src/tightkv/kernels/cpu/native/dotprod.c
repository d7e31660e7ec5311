/* ARM's 8-bit dot product (SDOT, from ARMv8.2): four products of bytes added to each lane.

   A query is 254 q1 + q0 with bytes q1 and q0 (16 bits and one factor), and so are softmax
   weights. A level is A + F / 254 (F only at 4 bits, for the smallest one, 4.5 halves). Of
   (254 q1 + q0) (A + F / 254) all but q0 F / 254 is added up, in two whole numbers:
   254 (q1 A) + (q0 A + q1 F). docs/cpu.md has the error. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#include "keys16.h"
#include "ops.h"

#define ALWAYS static inline __attribute__((always_inline))

/* A 4-bit code n has its magnitude in byte n / 2 of its word and its sign in byte n % 4. With
   bytes 1 and 2 swapped, the magnitudes of even codes come in the order 0 4 2 6, of odd ones
   1 5 3 7, and so do the signs if bytes of w >> 4 and of w alternate. */
static const uint8_t swapped[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
/* Bytes b of words i become bytes i of words b. */
static const uint8_t across[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
/* The same, and words 1 and 2 swapped. */
static const uint8_t across_swapped[16] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
/* As `across` for 8-bit words j and j + 1 of two channels each: bytes 0 and 2, or 1 and 3. */
static const uint8_t across8[2][16] = {
    {0, 4, 8, 12, 2, 6, 10, 14, 16, 20, 24, 28, 18, 22, 26, 30},
    {1, 5, 9, 13, 3, 7, 11, 15, 17, 21, 25, 29, 19, 23, 27, 31},
};
static const uint8_t swapped_lanes[16] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};

struct tables {
    uint8x16_t whole, part, swapped, across;
};

/* Levels of the even and of the odd codes of a word: A, and F. */
struct levels {
    int8x16_t whole[2], part[2];
};

ALWAYS struct tables tables_of(const struct book *book, const uint8_t *order)
{
    return (struct tables){vld1q_u8((const uint8_t *)book->whole),
                           vld1q_u8((const uint8_t *)book->part), vld1q_u8(order),
                           vld1q_u8(across)};
}

ALWAYS struct levels look_up(const struct tables *t, uint8x16_t even, uint8x16_t odd)
{
    return (struct levels){{vreinterpretq_s8_u8(vqtbl1q_u8(t->whole, even)),
                            vreinterpretq_s8_u8(vqtbl1q_u8(t->whole, odd))},
                           {vreinterpretq_s8_u8(vqtbl1q_u8(t->part, even)),
                            vreinterpretq_s8_u8(vqtbl1q_u8(t->part, odd))}};
}

/* 2 or 3 bits: codes are table indices. */
ALWAYS struct levels plain_levels(const struct tables *t, uint8x16_t w, const int bits)
{
    const uint8x16_t mask = vdupq_n_u8(bits == 3 ? 7 : 3);
    return look_up(t, vandq_u8(w, mask), vandq_u8(vshrq_n_u8(w, 4), mask));
}

/* 4 bits of a key: lanes are tokens. */
ALWAYS struct levels key_levels4(const struct tables *t, uint8x16_t w)
{
    const uint8x16_t mask = vdupq_n_u8(7);
    uint8x16_t high = vshrq_n_u8(w, 4), low = vandq_u8(w, vdupq_n_u8(15));
    uint8x16_t size = vqtbl1q_u8(w, t->swapped);
    return look_up(t, vbslq_u8(mask, size, vtrn1q_u8(high, low)),
                   vbslq_u8(mask, vshrq_n_u8(size, 4), vtrn2q_u8(high, low)));
}

ALWAYS uint8x16_t even_lanes(uint8x16_t a, uint8x16_t b)
{
    return vreinterpretq_u8_u32(vtrn1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

ALWAYS uint8x16_t odd_lanes(uint8x16_t a, uint8x16_t b)
{
    return vreinterpretq_u8_u32(vtrn2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

/* 4 bits of values: lanes become channels, in the order 0 2 1 3, and bytes tokens. */
ALWAYS struct levels value_levels4(const struct tables *t, uint8x16_t w)
{
    const uint8x16_t mask = vdupq_n_u8(7);
    uint8x16_t signs = vqtbl1q_u8(w, t->across), size = vqtbl1q_u8(w, t->swapped);
    uint8x16_t high = vshrq_n_u8(signs, 4), low = vandq_u8(signs, vdupq_n_u8(15));
    return look_up(t, vbslq_u8(mask, size, even_lanes(high, low)),
                   vbslq_u8(mask, vshrq_n_u8(size, 4), odd_lanes(high, low)));
}

/* by: bytes [even 1][odd 1][even 0][odd 0] of a query's or a weight's two bytes. */
ALWAYS void multiply(const struct levels *x, int8x16_t by, const int bits, int32x4_t sum[2])
{
    sum[0] = vdotq_laneq_s32(sum[0], x->whole[0], by, 0);
    sum[1] = vdotq_laneq_s32(sum[1], x->whole[0], by, 2);
    sum[0] = vdotq_laneq_s32(sum[0], x->whole[1], by, 1);
    sum[1] = vdotq_laneq_s32(sum[1], x->whole[1], by, 3);
    if (bits == 4) {
        sum[1] = vdotq_laneq_s32(sum[1], x->part[0], by, 0);
        sum[1] = vdotq_laneq_s32(sum[1], x->part[1], by, 1);
    }
}

ALWAYS float32x4_t join(const int32x4_t sum[2])
{
    return vfmaq_n_f32(vcvtq_f32_s32(sum[1]), vcvtq_f32_s32(sum[0]), BASE);
}

/* The eight codes in the spare top bits of three 3-bit words. */
ALWAYS uint8x16_t spare_of(const uint8_t *at, int step)
{
    uint8x16_t a = vandq_u8(vshrq_n_u8(vld1q_u8(at), 3), vdupq_n_u8(0x11));
    uint8x16_t b = vandq_u8(vshrq_n_u8(vld1q_u8(at + step), 2), vdupq_n_u8(0x22));
    uint8x16_t c = vandq_u8(vshrq_n_u8(vld1q_u8(at + 2 * step), 1), vdupq_n_u8(0x44));
    return vorrq_u8(a, vorrq_u8(b, c));
}

/* The second eight codes of 2-bit words, or the first. */
ALWAYS uint8x16_t shifted(uint8x16_t w, int second) { return second ? vshrq_n_u8(w, 2) : w; }

/* --- scores --- */

/* Group g of a chunk: eight codes of each of four tokens; words are `step` bytes apart. */
ALWAYS struct levels key_levels(const struct tables *t, const uint8_t *at, int step, int g,
                                const int bits)
{
    if (bits == 8)
        return (struct levels){{vld1q_s8((const int8_t *)at + 2 * g * step),
                                vld1q_s8((const int8_t *)at + (2 * g + 1) * step)},
                               {vdupq_n_s8(0), vdupq_n_s8(0)}};
    if (bits == 4)
        return key_levels4(t, vld1q_u8(at + g * step));
    if (bits == 2)
        return plain_levels(t, shifted(vld1q_u8(at + g / 2 * step), g % 2), bits);
    return plain_levels(t, g < 3 ? vld1q_u8(at + g * step) : spare_of(at, step), bits);
}

/* Codes of `groups_of(dim)` groups of 8 a row; query is [row][group][16 bytes]. */
ALWAYS void key_rows(const struct book *book, struct key_shape s, const uint8_t *codes,
                     const int8_t *query, int groups, const float *factor, float *scores,
                     int stride, const int rows, const int bits)
{
    const struct tables t = tables_of(book, swapped);
    const int step = 8 * s.chunks * 16; /* bytes from word j to word j + 1 */
    const int per_chunk = groups / s.chunks;
    for (int r = 0; r < 8; r++) {
        int32x4_t sum[4][2];
        for (int k = 0; k < rows; k++)
            sum[k][0] = sum[k][1] = vdupq_n_s32(0);
        for (int c = 0; c < s.chunks; c++) {
            const uint8_t *at = codes + (r * s.chunks + c) * 16;
            const int8_t *by = query + c * per_chunk * 16;
            for (int g = 0; g < per_chunk; g += 2, by += 32) { /* always an even number */
                const struct levels x[2] = {key_levels(&t, at, step, g, bits),
                                            key_levels(&t, at, step, g + 1, bits)};
                for (int k = 0; k < rows; k++)
                    multiply(&x[0], vld1q_s8(by + k * groups * 16), bits, sum[k]);
                for (int k = 0; k < rows; k++)
                    multiply(&x[1], vld1q_s8(by + 16 + k * groups * 16), bits, sum[k]);
            }
        }
        for (int k = 0; k < rows; k++)
            vst1q_f32(scores + k * stride + 4 * r, vmulq_n_f32(join(sum[k]), factor[k]));
    }
}

ALWAYS void key_bits(const struct book *book, struct key_shape s, const uint8_t *codes,
                     const int8_t *query, int groups, const float *factor, float *scores,
                     int stride, const int rows)
{
    switch (book->bits) {
    case 2: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 2); break;
    case 3: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 3); break;
    case 4: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 4); break;
    default: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 8);
    }
}

static void dot_keys(const struct book *book, int dim, const uint8_t *codes, uint8_t *work,
                     const int8_t *query, const float *factor, int rows, float *scores, int stride)
{
    const struct key_shape s = key_shape(dim, book->bits);
    const int groups = key_groups(dim, book->bits);
    if (s.halves)
        codes = join_halves(dim, book->bits, codes, work);
    for (int r = 0; r < rows; r += 4) {
        const int8_t *q = query + r * groups * 16;
        float *to = scores + r * stride;
        switch (rows - r) {
        case 1: key_bits(book, s, codes, q, groups, factor + r, to, stride, 1); break;
        case 2: key_bits(book, s, codes, q, groups, factor + r, to, stride, 2); break;
        case 3: key_bits(book, s, codes, q, groups, factor + r, to, stride, 3); break;
        default: key_bits(book, s, codes, q, groups, factor + r, to, stride, 4);
        }
    }
}

/* --- values --- */

/* Four channels of eight tokens; words are `step` bytes apart. */
ALWAYS struct levels value_levels(const struct tables *t, const uint8_t *at, int step, int g,
                                  const int bits)
{
    if (bits == 8) {
        uint8x16x2_t w = {{vld1q_u8(at + 2 * g * step), vld1q_u8(at + (2 * g + 1) * step)}};
        return (struct levels){{vreinterpretq_s8_u8(vqtbl2q_u8(w, vld1q_u8(across8[0]))),
                                vreinterpretq_s8_u8(vqtbl2q_u8(w, vld1q_u8(across8[1])))},
                               {vdupq_n_s8(0), vdupq_n_s8(0)}};
    }
    if (bits == 4)
        return value_levels4(t, vld1q_u8(at + g * step));
    uint8x16_t w;
    if (bits == 2)
        w = shifted(vld1q_u8(at + g / 2 * step), g % 2);
    else
        w = g < 3 ? vld1q_u8(at + g * step) : spare_of(at, step);
    return plain_levels(t, vqtbl1q_u8(w, t->across), bits);
}

/* Four channels; weights are [row][block][pair c of 4][16 bytes]. */
ALWAYS void value_rows(const struct book *book, int dim, const uint8_t *const *codes, int blocks,
                       const int8_t *weights, const float *factor, float *sums, const int rows,
                       const int bits)
{
    const struct tables t = tables_of(book, across_swapped);
    const uint8x16_t lanes = vld1q_u8(swapped_lanes);
    const int step = dim / 16 * 64; /* bytes from word j to word j + 1 */
    for (int d = 0; d < dim; d += 4) {
        const int g = d % 16 / 4;
        const int first = d / 16 * 64;
        int32x4_t sum[4][2];
        for (int k = 0; k < rows; k++)
            sum[k][0] = sum[k][1] = vdupq_n_s32(0);
        for (int block = 0; block < blocks; block++)
            for (int c = 0; c < 4; c++) {
                const uint8_t *at = codes[block] + first + c * 16;
                const struct levels x = value_levels(&t, at, step, g, bits);
                const int8_t *by = weights + (block * 4 + c) * 16;
                for (int k = 0; k < rows; k++)
                    multiply(&x, vld1q_s8(by + k * STRIP * 64), bits, sum[k]);
            }
        for (int k = 0; k < rows; k++) {
            float *to = sums + k * dim + d;
            float32x4_t more = join(sum[k]);
            if (bits == 4)
                more = vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(more), lanes));
            vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), more, factor[k]));
        }
    }
}

ALWAYS void value_bits(const struct book *book, int dim, const uint8_t *const *codes, int blocks,
                       const int8_t *weights, const float *factor, float *sums, const int rows)
{
    switch (book->bits) {
    case 2: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 2); break;
    case 3: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 3); break;
    case 4: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 4); break;
    default: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 8);
    }
}

static void dot_values(const struct book *book, int dim, const uint8_t *const *codes, int blocks,
                       const int8_t *weights, const float *factor, int rows, float *sums)
{
    for (int r = 0; r < rows; r += 4) {
        const int8_t *w = weights + r * STRIP * 64;
        float *to = sums + r * dim;
        switch (rows - r) {
        case 1: value_bits(book, dim, codes, blocks, w, factor + r, to, 1); break;
        case 2: value_bits(book, dim, codes, blocks, w, factor + r, to, 2); break;
        case 3: value_bits(book, dim, codes, blocks, w, factor + r, to, 3); break;
        default: value_bits(book, dim, codes, blocks, w, factor + r, to, 4);
        }
    }
}

/* Weights of one row [count], a multiple of 8, as bytes [8 high][8 low]; returns their unit. */
static float split_weights(const float *weights, int count, float top, int8_t *bytes)
{
    const float inverse = top > 0.0f ? LARGEST / top : 0.0f;
    for (int t = 0; t < count; t += 8) {
        int16x4_t high[2], low[2];
        for (int k = 0; k < 2; k++) {
            float32x4_t whole = vmulq_n_f32(vld1q_f32(weights + t + 4 * k), inverse);
            int32x4_t h = vcvtnq_s32_f32(vmulq_n_f32(whole, 1.0f / BASE));
            high[k] = vmovn_s32(h);
            low[k] = vmovn_s32(vmlsq_n_s32(vcvtnq_s32_f32(whole), h, BASE));
        }
        vst1_s8(bytes + 2 * t, vqmovn_s16(vcombine_s16(high[0], high[1])));
        vst1_s8(bytes + 2 * t + 8, vqmovn_s16(vcombine_s16(low[0], low[1])));
    }
    return top / LARGEST;
}

const struct dots dotprod_dots = {dot_keys, dot_values, split_weights};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
