/* ARM's 8-bit dot product (SDOT, from ARMv8.2): dots.h in registers of four words. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#define LANES 4
#define DOTS_NAME dotprod_dots
#define ORDER4 {0, 2, 1, 3}

#include "ops.h"
#include "vectors.h"

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

/* Added up: q1 A, and q0 A + q1 F. */
struct sums {
    int32x4_t high, low;
};

ALWAYS struct tables tables_of(const struct book *book, const uint8_t *order)
{
    return (struct tables){vld1q_u8((const uint8_t *)book->whole),
                           vld1q_u8((const uint8_t *)book->part), vld1q_u8(order),
                           vld1q_u8(across)};
}

ALWAYS struct tables key_tables(const struct book *book) { return tables_of(book, swapped); }

ALWAYS struct tables value_tables(const struct book *book)
{
    return tables_of(book, across_swapped);
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

ALWAYS struct sums first_sums(const int8_t *bytes, int count, const int bits)
{
    (void)bytes, (void)count, (void)bits; /* signed products need no correction */
    return (struct sums){vdupq_n_s32(0), vdupq_n_s32(0)};
}

ALWAYS void multiply(const struct levels *x, const int8_t *bytes, const int bits, struct sums *sum)
{
    const int8x16_t by = vld1q_s8(bytes);
    sum->high = vdotq_laneq_s32(sum->high, x->whole[0], by, 0);
    sum->low = vdotq_laneq_s32(sum->low, x->whole[0], by, 2);
    sum->high = vdotq_laneq_s32(sum->high, x->whole[1], by, 1);
    sum->low = vdotq_laneq_s32(sum->low, x->whole[1], by, 3);
    if (bits == 4) {
        sum->low = vdotq_laneq_s32(sum->low, x->part[0], by, 0);
        sum->low = vdotq_laneq_s32(sum->low, x->part[1], by, 1);
    }
}

ALWAYS vf join(const struct sums *sum)
{
    return vfmaq_n_f32(vcvtq_f32_s32(sum->low), vcvtq_f32_s32(sum->high), BASE);
}

ALWAYS vf join_values(const struct sums *sum, const int bits)
{
    const uint8x16_t more = vreinterpretq_u8_f32(join(sum)), lanes = vld1q_u8(swapped_lanes);
    return vreinterpretq_f32_u8(bits == 4 ? vqtbl1q_u8(more, lanes) : more);
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

ALWAYS struct levels key_levels(const struct tables *t, const uint8_t *at, int row, int step,
                                int g, const int bits)
{
    (void)row; /* four tokens are one row */
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

#include "dots.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
