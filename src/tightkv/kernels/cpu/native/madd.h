/* dots.h without a dot product of bytes: levels are looked up as 16-bit words, which VPMADDWD
   multiplies with the numbers as they are.

   Of a register of nibbles, the lowest nibble of every 16 bits is an index, with an index of 0
   above it. Codes are exchanged so that code 0 is that of the lowest level, and levels are looked
   up relative to that one: the upper bytes become 0. Sums start at the lowest level times the sum
   of the numbers. The including file defines LANES and ADD_PRODUCTS(sum, a, b). */

#define SETS (LANES == 16 ? 2 : 1) /* as many as the 32 or 16 registers have room for */
#define PARTS 4
#define MOST_DIM 512 /* sums fit into 32 bits */

#include "x86.h"
#include "ops.h"
#include "x86_codes.h"

typedef vu vector;

static const uint8_t words_across[16] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
static const uint8_t places[2][8] = {{0, 4, 2, 6, 1, 5, 3, 7}, {0, 2, 1, 3, 4, 6, 5, 7}};

struct tables {
    vu levels, across, exchange;
    int32_t lowest;
};

struct sums {
    vu all;
};

ALWAYS struct tables tables_of(const struct book *book)
{
    uint8_t levels[16] = {0};
    int at = 0; /* the code of the lowest level */
    for (int k = 1; k < 16 && book->bits < 8; k++)
        at = book->byte[k] < book->byte[at] ? k : at;
    for (int k = 0; k < 16 && book->bits < 8; k++)
        levels[k] = (uint8_t)(book->byte[k ^ at] - book->byte[at]);
    return (struct tables){repeated(words_at(levels)), repeated(words_at(words_across)),
                           (vu){0} + (uint32_t)at * 0x11111111u, book->byte[at]};
}

ALWAYS struct codes exchanged(const struct tables *t, struct codes w, const int bits)
{
    if (bits < 8)
        w.first ^= t->exchange;
    return w;
}

ALWAYS struct codes key_codes(const struct tables *t, const uint8_t *at, int row, int step, int g,
                              const int bits)
{
    return exchanged(t, key_codes_at(at, row, step, g, bits), bits);
}

ALWAYS struct codes value_codes(const struct tables *t, const uint8_t *at, int step, int g,
                                const int bits)
{
    return exchanged(t, value_codes_at(t->across, at, step, g, bits), bits);
}

/* Nibbles 0, 2, 1 and 3 of the halves of each word; of 8-bit codes even and odd bytes. */
ALWAYS vector levels_of(const struct tables *t, const struct codes *w, int part, const int bits)
{
    typedef int16_t signed_half __attribute__((vector_size(4 * LANES)));
    if (bits == 8) {
        const vh x = (vh)(part < 2 ? w->first : w->second);
        return (vu)((signed_half)(part % 2 ? x : x << 8) >> 8);
    }
    vh index = (vh)w->first;
    if (part > 0)
        index >>= part == 1 ? 8 : part == 2 ? 4 : 12;
    if (part < 3)
        index &= 15;
    return shuffle(t->levels, (vu)index);
}

ALWAYS struct sums first_sums(const struct tables *t, const struct numbers *n, const int bits)
{
    return (struct sums){(vu){0} + (bits == 8 ? 0u : (uint32_t)t->lowest * (uint32_t)n->sum[0])};
}

ALWAYS void multiply(vector x, const int8_t *by, int part, struct sums *sum)
{
    const vu two = (vu){0} + *(const word32 *)(by + 4 * part);
    sum->all = (vu)ADD_PRODUCTS(sum->all, x, two);
}

ALWAYS vf join(const struct sums *sum) { return __builtin_convertvector((vi)sum->all, vf); }

/* As words. */
static void split_numbers(const float *x, int count, float factor, int8_t *bytes, int32_t total[2])
{
    vi sum = splat_int(0);
    for (int t = 0; t < count; t += LANES) {
#if LANES == 16
        const __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + t) * splat(factor)));
        _mm256_storeu_si256((__m256i *)(bytes + 2 * t), _mm512_cvtepi32_epi16(whole));
#else
        const __m256i whole = _mm256_cvtps_epi32((__m256)(load(x + t) * splat(factor)));
        const __m128i low = _mm256_castsi256_si128(whole);
        _mm_storeu_si128((__m128i *)(bytes + 2 * t),
                         _mm_packs_epi32(low, _mm256_extracti128_si256(whole, 1)));
#endif
        sum += (vi)whole;
    }
    total[0] = SUM_INTS(sum);
}

#include "dots.h"
