/* dots.h with AVX-512 VNNI, in registers of sixteen words. A number is 254 q1 + q0 with bytes q1
   and q0.

   VPDPBUSD multiplies unsigned bytes with signed ones: levels are looked up with 128 added, and
   sums start at -128 times the sum of what they are multiplied with. The including file defines
   DOTS_NAME and LOOK_UP(levels, index), which takes the low four bits of each byte of the index:
   others may be above them. Tables of fewer levels repeat, so two or three bits need no mask. */

#define LANES 16
#define SETS 2
#define PARTS 2 /* even and odd codes */
#define MOST_DIM 1024 /* sums of bytes are floats exactly */

#include "x86.h"
#include "ops.h"
#include "x86_codes.h"

#define OFFSET 128

typedef __m512i vector;

static const uint8_t bytes_across[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
static const uint8_t places[2][8] = {{0, 4, 1, 5, 2, 6, 3, 7}, {0, 1, 2, 3, 4, 5, 6, 7}};

struct tables {
    vu levels, across;
};

/* Added up: products with high bytes, and with low ones. */
struct sums {
    __m512i high, low;
};

ALWAYS struct tables tables_of(const struct book *book)
{
    return (struct tables){repeated(words_at((const uint8_t *)book->byte)) ^ 0x80808080u,
                           repeated(words_at(bytes_across))};
}

ALWAYS struct codes key_codes(const struct tables *t, const uint8_t *at, int row, int step, int g,
                              const int bits)
{
    (void)t;
    return key_codes_at(at, row, step, g, bits);
}

ALWAYS struct codes value_codes(const struct tables *t, const uint8_t *at, int step, int g,
                                const int bits)
{
    return value_codes_at(t->across, at, step, g, bits);
}

ALWAYS vector levels_of(const struct tables *t, const struct codes *w, int part, const int bits)
{
    if (bits == 8)
        return (__m512i)((part ? w->second : w->first) ^ 0x80808080u);
    const __m512i index = part ? _mm512_srli_epi16((__m512i)w->first, 4) : (__m512i)w->first;
    return LOOK_UP((__m512i)t->levels, index);
}

ALWAYS struct sums first_sums(const struct tables *t, const struct numbers *n, const int bits)
{
    (void)t, (void)bits;
    return (struct sums){_mm512_set1_epi32((int)(0 - OFFSET * (uint32_t)n->sum[0])),
                         _mm512_set1_epi32((int)(0 - OFFSET * (uint32_t)n->sum[1]))};
}

ALWAYS __m512i four_bytes(const int8_t *at)
{
    return _mm512_set1_epi32((int)*(const word32 *)at);
}

/* In place: of the intrinsic's result GCC makes copies, as many as there are products. */
ALWAYS void add_products(__m512i *sum, vector x, __m512i by)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(by));
}

/* by: [even q1][odd q1][even q0][odd q0] */
ALWAYS void multiply(vector x, const int8_t *by, int part, struct sums *sum)
{
    add_products(&sum->high, x, four_bytes(by + 4 * part));
    add_products(&sum->low, x, four_bytes(by + 4 * part + 8));
}

ALWAYS vf join(const struct sums *sum)
{
    const __m512 low = _mm512_cvtepi32_ps(sum->low);
    return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum->high), _mm512_set1_ps(BASE), low);
}

/* As bytes [8 high][8 low]. */
static void split_numbers(const float *x, int count, float factor, int8_t *bytes, int32_t total[2])
{
    __m512i highs = _mm512_setzero_si512(), lows = highs;
    for (int t = 0; t < count; t += 16) {
        const __m512 whole = _mm512_mul_ps(_mm512_loadu_ps(x + t), _mm512_set1_ps(factor));
        const __m512i h = _mm512_cvtps_epi32(_mm512_mul_ps(whole, _mm512_set1_ps(1.0f / BASE)));
        /* of the two 16-bit halves of h only the lower one is multiplied */
        const __m512i l = _mm512_sub_epi32(_mm512_cvtps_epi32(whole),
                                           _mm512_madd_epi16(h, _mm512_set1_epi32(BASE)));
        const __m128i high = _mm512_cvtsepi32_epi8(h), low = _mm512_cvtsepi32_epi8(l);
        highs = _mm512_add_epi32(highs, h);
        lows = _mm512_add_epi32(lows, l);
        _mm_storeu_si128((__m128i *)(bytes + 2 * t), _mm_unpacklo_epi64(high, low));
        _mm_storeu_si128((__m128i *)(bytes + 2 * t + 16), _mm_unpackhi_epi64(high, low));
    }
    total[0] = SUM_INTS(highs), total[1] = SUM_INTS(lows);
}

#include "dots.h"
