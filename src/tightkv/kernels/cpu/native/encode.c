/* The quantizer and the order of bits, as math/quantize.py and pack.py have them. */
#include <float.h>
#include <math.h>

#include "encode.h"

/* Products and sums are rounded one by one, as in math/quantize.py: none are fused. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#define MOST_SCALE 2.0f /* a scale may differ from the norm by this factor */

static double dot(int dim, const float *a, const float *b)
{
    double sum[4] = {0};
    for (int d = 0; d < dim; d += 4)
        for (int k = 0; k < 4; k++)
            sum[k] += (double)a[d + k] * b[d + k];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Nearest centroid: how many thresholds the size exceeds, and the sign. */
static void nearest(const struct side *side, int dim, const float *y, uint8_t *codes)
{
    const int half = 1 << (side->bits - 1);
    for (int d = 0; d < dim; d++)
        codes[d] = y[d] < 0.0f ? (uint8_t)half : 0;
    for (int k = 0; k + 1 < half; k++) {
        const float threshold = side->thresholds[k];
        for (int d = 0; d < dim; d++)
            codes[d] = (uint8_t)(codes[d] + (fabsf(y[d]) > threshold));
    }
}

/* The nearest whole number up to 127, as a two's complement byte; 0 for NaN, as in torch. */
static uint8_t nearest_byte(float x)
{
    const float level = rintf(x);
    return (uint8_t)(int8_t)(level > 127.0f ? 127.0f : level < -127.0f ? -127.0f
                             : level == level ? level : 0.0f);
}

/* Whole multiples of the unit. */
static void nearest_integer(const struct side *side, int dim, const float *y, uint8_t *codes)
{
    const float inverse = (float)(1.0 / side->unit);
    for (int d = 0; d < dim; d++)
        codes[d] = nearest_byte(y[d] * inverse);
}

static float stored_scale(const struct side *side, float norm, float along, float square)
{
    /* A zero vector at 8 bits has a zero direction; its scale is zero. */
    const float size = sqrtf(square);
    switch (side->scale_mode) {
    case SCALE_CORRECTED: return norm / (size < FLT_MIN ? FLT_MIN : size);
    case SCALE_LEAST_SQUARES: return along / (square < FLT_MIN ? FLT_MIN : square);
    case SCALE_UNBIASED: return norm * norm / (along < FLT_MIN ? FLT_MIN : along);
    default: return norm;
    }
}

uint16_t encode_vector(const struct side *side, int dim, const float *y, uint8_t *codes)
{
    const float root = (float)sqrt((double)dim), inverse = (float)(1.0 / sqrt((double)dim));
    const float norm = sqrtf((float)dot(dim, y, y));
    const float least_norm = norm < FLT_MIN ? FLT_MIN : norm;
    float scaled[dim];
    for (int d = 0; d < dim; d++)
        scaled[d] = y[d] / least_norm * root;
    if (side->bits == 8)
        nearest_integer(side, dim, scaled, codes);
    else
        nearest(side, dim, scaled, codes);
    for (int d = 0; d < dim; d++)
        scaled[d] = side->centroids[codes[d]] * inverse;
    float scale = stored_scale(side, norm, (float)dot(dim, y, scaled),
                               (float)dot(dim, scaled, scaled));
    scale = scale > 65504.0f ? 65504.0f : scale < -65504.0f ? -65504.0f : scale;
    return float_to_half(scale);
}

uint16_t encode_exact(int is_value, int dim, const float *y, uint8_t *to)
{
    const float levels = is_value ? 127.0f : 2047.0f;
    uint32_t top = 0; /* bits of the largest magnitude; those of NaN are larger than any */
    for (int d = 0; d < dim; d++) {
        const uint32_t size = to_bits(y[d]) & 0x7fffffffu;
        top = size > top ? size : top;
    }
    const float wanted = from_bits(top) * (1.0f / levels);
    const uint16_t scale = float_to_half(wanted > 65504.0f ? 65504.0f : wanted);
    const float step = half_to_float(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    memset(to, 0, (size_t)(is_value ? dim : dim * 3 / 2));
    for (int d = 0; d < dim; d++) {
        const float level = rintf(y[d] * inverse);
        const int code = (int)(level > levels ? levels : level < -levels ? -levels
                               : level == level ? level : 0.0f);
        to[d] = (uint8_t)(is_value ? code : code >> 4);
        if (!is_value)
            to[dim + d / 8 * 4 + d % 4] |= (uint8_t)((code & 15) << d % 8 / 4 * 4);
    }
    return scale;
}

static void add_multiples(int count, float error, float value, const float *row, float *missed,
                          float *projected)
{
    for (int d = 0; d < count; d++) {
        missed[d] += error * row[d];
        projected[d] += value * row[d];
    }
}

/* Where row `i` of a triangle begins. */
static int64_t row_at(int64_t i, int64_t dim, int packed)
{
    return packed ? i * (i + 1) / 2 : i * dim;
}

uint16_t encode_with_feedback(const struct side *side, int dim, const float *y,
                              const float *factors, int packed, float *work, uint8_t *codes)
{
    const int half = 1 << (side->bits - 1);
    const float width = (float)(side->gain * sqrt((double)dim));
    const float norm = sqrtf((float)dot(dim, y, y));
    const float least_norm = norm < FLT_MIN ? FLT_MIN : norm;
    float *x = work, *missed = x + dim, *projected = missed + dim, *rest = projected + dim;
    for (int d = 0; d < dim; d++)
        x[d] = y[d] / least_norm * width;
    memset(missed, 0, sizeof(float) * 2 * (size_t)dim);
    for (int i = dim - 1; i >= 0; i--) {
        const float target = x[i] + missed[i], size = fabsf(target);
        int code = target < 0.0f ? half : 0;
        for (int k = 0; k + 1 < half; k++)
            code += size > side->thresholds[k];
        const float centroid = side->centroids[code];
        codes[i] = (uint8_t)code;
        rest[i] = target - centroid;
        const float *row = factors + row_at(i, dim, packed);
        add_multiples(i, x[i] - centroid, x[i], row, missed, projected);
    }
    double whole = 0.0, along = 0.0;
    for (int d = 0; d < dim; d++) {
        const double size = x[d] + projected[d], own = factors[row_at(d, dim, packed) + d] * size;
        whole += own * size;
        along += own * (size - rest[d]);
    }
    const float least = (float)along < FLT_MIN ? FLT_MIN : (float)along;
    float ratio = (float)whole / least;
    ratio = ratio > MOST_SCALE ? MOST_SCALE : ratio < 1 / MOST_SCALE ? 1 / MOST_SCALE : ratio;
    const float scale = norm * (float)(1.0 / side->gain) * ratio;
    return float_to_half(scale > 65504.0f ? 65504.0f : scale);
}

/* --- 32 codes <-> `bits` words of 32 bits --- */

static void pack_chunk(int bits, const uint8_t *c, uint32_t *w)
{
    memset(w, 0, sizeof *w * (size_t)bits);
    if (bits == 8) {
        for (int k = 0; k < 32; k++)
            w[k / 4] |= (uint32_t)c[k] << 8 * (k % 4);
    } else if (bits == 4) {
        for (int k = 0; k < 32; k++)
            w[k / 8] |= (uint32_t)c[k] << 4 * (k % 8);
    } else if (bits == 3) {
        for (int k = 0; k < 24; k++)
            w[k / 8] |= (uint32_t)c[k] << 4 * (k % 8);
        for (int k = 0; k < 8; k++)
            for (int j = 0; j < 3; j++)
                w[j] |= (uint32_t)(c[24 + k] >> j & 1) << (4 * k + 3);
    } else {
        for (int k = 0; k < 32; k++)
            w[k / 16] |= (uint32_t)c[k] << (4 * (k % 8) + 2 * (k / 8 % 2));
    }
}

static void unpack_chunk(int bits, const uint32_t *w, uint8_t *c)
{
    if (bits == 8) {
        for (int k = 0; k < 32; k++)
            c[k] = (uint8_t)(w[k / 4] >> 8 * (k % 4));
    } else if (bits == 4) {
        for (int k = 0; k < 32; k++)
            c[k] = w[k / 8] >> 4 * (k % 8) & 15;
    } else if (bits == 3) {
        for (int k = 0; k < 24; k++)
            c[k] = w[k / 8] >> 4 * (k % 8) & 7;
        for (int k = 0; k < 8; k++)
            c[24 + k] = (uint8_t)((w[0] >> (4 * k + 3) & 1) | (w[1] >> (4 * k + 3) & 1) << 1 |
                                  (w[2] >> (4 * k + 3) & 1) << 2);
    } else {
        for (int k = 0; k < 32; k++)
            c[k] = w[k / 16] >> (4 * (k % 8) + 2 * (k / 8 % 2)) & 3;
    }
}

/* Rows that are an odd number of 16 codes have 16-bit words. At 3 bits a word is half of a
   32-bit one whose other half's codes are zero; else two of them are one. */

static void pack_half_chunk(int bits, const uint8_t *c, uint16_t *w)
{
    uint8_t both[32] = {0};
    uint32_t words[8];
    if (bits == 3)
        for (int k = 0; k < 16; k++)
            both[k / 4 * 8 + k % 4] = c[k];
    else
        memcpy(both, c, 16);
    pack_chunk(bits, both, words);
    for (int j = 0; j < bits; j++)
        w[j] = (uint16_t)(bits == 3 ? words[j] : words[j / 2] >> 16 * (j % 2));
}

/* --- where words lie: [block][word j][row r][chunk c][i], values [block][j][chunk][pair][i] --- */

static int64_t key_word(int bits, int chunks, int offset, int j, int c)
{
    int t = offset % BLOCK;
    return (((offset / BLOCK * bits + j) * 8 + t % 8) * (int64_t)chunks + c) * 4 + t / 8;
}

static int64_t value_word(int bits, int chunks, int pair, int j, int c)
{
    int p = pair % (BLOCK / 2);
    return (((pair / (BLOCK / 2) * bits + j) * (int64_t)chunks + c) * 4 + p % 4) * 4 + p / 4;
}

void pack_key(int bits, int dim, int offset, const uint8_t *codes, uint8_t *plane)
{
    uint32_t w[8];
    uint16_t h[8];
    if (dim % 32 == 0) {
        for (int c = 0; c < dim / 32; c++) {
            pack_chunk(bits, codes + 32 * c, w);
            for (int j = 0; j < bits; j++)
                ((word32 *)plane)[key_word(bits, dim / 32, offset, j, c)] = w[j];
        }
        return;
    }
    for (int c = 0; c < dim / 16; c++) {
        pack_half_chunk(bits, codes + 16 * c, h);
        for (int j = 0; j < bits; j++)
            ((word16 *)plane)[key_word(bits, dim / 16, offset, j, c)] = h[j];
    }
}

void pack_values(int bits, int dim, int pair, const uint8_t *codes, uint8_t *plane)
{
    for (int c = 0; c < dim / 16; c++) {
        uint8_t both[32];
        uint32_t w[8];
        for (int n = 0; n < 32; n++)
            both[n] = codes[n % 2 * dim + 16 * c + n / 2];
        pack_chunk(bits, both, w);
        for (int j = 0; j < bits; j++)
            ((word32 *)plane)[value_word(bits, dim / 16, pair, j, c)] = w[j];
    }
}

void unpack_values(int bits, int dim, int pair, const uint8_t *plane, uint8_t *codes)
{
    for (int c = 0; c < dim / 16; c++) {
        uint8_t both[32];
        uint32_t w[8];
        for (int j = 0; j < bits; j++)
            w[j] = ((const word32 *)plane)[value_word(bits, dim / 16, pair, j, c)];
        unpack_chunk(bits, w, both);
        for (int n = 0; n < 32; n++)
            codes[n % 2 * dim + 16 * c + n / 2] = both[n];
    }
}

/* --- the mean of a page, in the rotated frame --- */

void write_mean(const struct layer *layer, uint8_t *record, const float *mean)
{
    const int dim = (int)layer->dim;
    uint8_t *at = record + layer->mean;
    if (layer->mean_bits == 16) {
        write_floats(mean, FLOAT16, dim, at);
        return;
    }
    float top = 0.0f;
    for (int d = 0; d < dim; d++)
        top = fabsf(mean[d]) > top ? fabsf(mean[d]) : top;
    uint16_t half = float_to_half(top / 127.0f);
    float step = half_to_float(half);
    step = step < 0x1p-14f ? 0x1p-14f : step; /* the smallest normal float16 */
    for (int d = 0; d < dim; d++)
        at[d] = nearest_byte(mean[d] / step);
    memcpy(at + dim, &half, 2);
}

void read_mean(const struct layer *layer, const uint8_t *record, float *mean)
{
    const int dim = (int)layer->dim;
    const uint8_t *at = record + layer->mean;
    if (layer->mean_bits == 16) {
        read_floats(at, FLOAT16, dim, mean);
        return;
    }
    uint16_t half;
    memcpy(&half, at + dim, 2);
    float step = half_to_float(half);
    for (int d = 0; d < dim; d++)
        mean[d] = (float)(int8_t)at[d] * step;
}
