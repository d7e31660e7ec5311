/* ARM's 8-bit dot product (SDOT, from ARMv8.2): dots.h in registers of four words.
   A number is 254 q1 + q0 with bytes q1 and q0. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#define LANES 4
#define SETS 1
#define PARTS 2 /* even and odd codes */
#define MOST_DIM 1024 /* sums of bytes are floats exactly */
#define DOTS_NAME dotprod_dots

#include "ops.h"
#include "vectors.h"

/* Bytes b of words i become bytes i of words b. */
static const uint8_t across[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
/* As `across` for 8-bit words j and j + 1 of two channels each: bytes 0 and 2, or 1 and 3. */
static const uint8_t across8[2][16] = {
    {0, 4, 8, 12, 2, 6, 10, 14, 16, 20, 24, 28, 18, 22, 26, 30},
    {1, 5, 9, 13, 3, 7, 11, 15, 17, 21, 25, 29, 19, 23, 27, 31},
};

struct tables {
    uint8x16_t levels, across;
};

typedef int8x16_t vector;

/* Nibbles; of 8-bit codes the levels of even and of odd ones. */
struct codes {
    uint8x16_t first, second;
};

/* Added up: products with high bytes, and with low ones. */
struct sums {
    int32x4_t high, low;
};

ALWAYS struct tables tables_of(const struct book *book)
{
    return (struct tables){vld1q_u8((const uint8_t *)book->byte), vld1q_u8(across)};
}

/* Nibbles are table indices; fewer than four bits have others above them. */
ALWAYS vector levels_of(const struct tables *t, const struct codes *w, int part, const int bits)
{
    if (bits == 8)
        return vreinterpretq_s8_u8(part ? w->second : w->first);
    uint8x16_t index = part ? vshrq_n_u8(w->first, 4) : w->first;
    if (bits < 4 || !part)
        index = vandq_u8(index, vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    return vreinterpretq_s8_u8(vqtbl1q_u8(t->levels, index));
}

ALWAYS struct sums first_sums(const struct tables *t, const struct numbers *n, const int bits)
{
    (void)t, (void)n, (void)bits; /* signed products need no correction */
    return (struct sums){vdupq_n_s32(0), vdupq_n_s32(0)};
}

/* bytes: [even q1][odd q1][even q0][odd q0] */
ALWAYS void multiply(vector x, const int8_t *bytes, int part, struct sums *sum)
{
    const int8x16_t by = vld1q_s8(bytes);
    if (part == 0) {
        sum->high = vdotq_laneq_s32(sum->high, x, by, 0);
        sum->low = vdotq_laneq_s32(sum->low, x, by, 2);
    } else {
        sum->high = vdotq_laneq_s32(sum->high, x, by, 1);
        sum->low = vdotq_laneq_s32(sum->low, x, by, 3);
    }
}

ALWAYS vf join(const struct sums *sum)
{
    return vfmaq_n_f32(vcvtq_f32_s32(sum->low), vcvtq_f32_s32(sum->high), BASE);
}

/* The eight codes in the spare top bits of three 3-bit words. */
ALWAYS uint8x16_t spare_of(const uint8_t *at, int step)
{
    uint8x16_t a = vandq_u8(vshrq_n_u8(vld1q_u8(at), 3), vdupq_n_u8(0x11));
    uint8x16_t b = vandq_u8(vshrq_n_u8(vld1q_u8(at + step), 2), vdupq_n_u8(0x22));
    uint8x16_t c = vandq_u8(vshrq_n_u8(vld1q_u8(at + 2 * step), 1), vdupq_n_u8(0x44));
    return vorrq_u8(a, vorrq_u8(b, c));
}

/* Group g of a chunk's words: eight codes each, in nibbles. */
ALWAYS uint8x16_t nibbles_at(const uint8_t *at, int step, int g, const int bits)
{
    if (bits == 4)
        return vld1q_u8(at + g * step);
    if (bits == 3)
        return g < 3 ? vld1q_u8(at + g * step) : spare_of(at, step);
    const uint8x16_t w = vld1q_u8(at + g / 2 * step);
    return g % 2 ? vshrq_n_u8(w, 2) : w;
}

ALWAYS struct codes key_codes(const struct tables *t, const uint8_t *at, int row, int step, int g,
                              const int bits)
{
    (void)t, (void)row; /* four tokens are one row */
    if (bits == 8)
        return (struct codes){vld1q_u8(at + 2 * g * step), vld1q_u8(at + (2 * g + 1) * step)};
    return (struct codes){.first = nibbles_at(at, step, g, bits)};
}

ALWAYS struct codes value_codes(const struct tables *t, const uint8_t *at, int step, int g,
                                const int bits)
{
    if (bits == 8) {
        uint8x16x2_t w = {{vld1q_u8(at + 2 * g * step), vld1q_u8(at + (2 * g + 1) * step)}};
        return (struct codes){vqtbl2q_u8(w, vld1q_u8(across8[0])),
                              vqtbl2q_u8(w, vld1q_u8(across8[1]))};
    }
    return (struct codes){.first = vqtbl1q_u8(nibbles_at(at, step, g, bits), t->across)};
}

static const uint8_t places[2][8] = {{0, 4, 1, 5, 2, 6, 3, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};

/* As bytes [8 high][8 low]. */
static void split_numbers(const float *x, int count, float factor, int8_t *bytes, int32_t total[2])
{
    (void)total; /* is not used */
    for (int t = 0; t < count; t += 8) {
        int16x4_t high[2], low[2];
        for (int k = 0; k < 2; k++) {
            float32x4_t whole = vmulq_n_f32(vld1q_f32(x + t + 4 * k), factor);
            int32x4_t h = vcvtnq_s32_f32(vmulq_n_f32(whole, 1.0f / BASE));
            high[k] = vmovn_s32(h);
            low[k] = vmovn_s32(vmlsq_n_s32(vcvtnq_s32_f32(whole), h, BASE));
        }
        vst1_s8(bytes + 2 * t, vqmovn_s16(vcombine_s16(high[0], high[1])));
        vst1_s8(bytes + 2 * t + 8, vqmovn_s16(vcombine_s16(low[0], low[1])));
    }
}

#include "dots.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
