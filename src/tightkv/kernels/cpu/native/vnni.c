/* x86-64 with AVX-512 VNNI and VBMI: int8_dot.h in registers of sixteen words.

   VPDPBUSD multiplies unsigned bytes with signed ones: levels are looked up with 128 added, and
   sums start at -128 times the sum of what they are multiplied with. VPERMB ignores the upper two
   bits of an index, and tables repeat every 16 entries or fewer, so those bits need no mask. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma"))),  \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma")
#endif
#include <immintrin.h>

#define LANES 16
#define DOTS_NAME vnni_dots

#include "ops.h"
#include "vectors.h"

#define OFFSET 128
#define SELECT 0xCA /* a ternary operation: where the first is 1 the second, else the third */

/* Bytes b of words i become bytes i of words b. */
static const uint8_t across[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

struct tables {
    __m512i levels, across;
};

/* Levels of the even and of the odd codes of a word, with 128 added. */
struct levels {
    __m512i even, odd;
};

/* Added up: products with high bytes, and with low ones. */
struct sums {
    __m512i high, low;
};

/* Sixteen bytes, four times. */
ALWAYS __m512i repeated(const void *from)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
}

ALWAYS __m512i offset(__m512i x)
{
    return _mm512_xor_si512(x, _mm512_set1_epi8((char)OFFSET));
}

ALWAYS struct tables tables_of(const struct book *book)
{
    return (struct tables){offset(repeated(book->byte)), repeated(across)};
}

ALWAYS __m512i words_at(const uint8_t *at)
{
    return _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
}

/* The sixteen bytes at `at`, `at + step`, ... */
ALWAYS __m512i gather(const uint8_t *at, int step)
{
    __m512i w = words_at(at);
    w = _mm512_inserti32x4(w, _mm_loadu_si128((const __m128i *)(at + step)), 1);
    w = _mm512_inserti32x4(w, _mm_loadu_si128((const __m128i *)(at + 2 * step)), 2);
    return _mm512_inserti32x4(w, _mm_loadu_si128((const __m128i *)(at + 3 * step)), 3);
}

/* Indices may have anything above their four bits. */
ALWAYS struct levels look_up(const struct tables *t, __m512i even, __m512i odd)
{
    return (struct levels){_mm512_permutexvar_epi8(even, t->levels),
                           _mm512_permutexvar_epi8(odd, t->levels)};
}

/* 8 bits: levels are there. */
ALWAYS struct levels bytes_of(__m512i even, __m512i odd)
{
    return (struct levels){offset(even), offset(odd)};
}

/* The eight codes in the spare top bits of three 3-bit words. */
ALWAYS __m512i spare_of(__m512i w0, __m512i w1, __m512i w2)
{
    __m512i a = _mm512_srli_epi16(w0, 3), b = _mm512_srli_epi16(w1, 2);
    __m512i low = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x11), a, b, SELECT);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x44), _mm512_srli_epi16(w2, 1), low,
                                     SELECT);
}

ALWAYS struct levels key_levels(const struct tables *t, const uint8_t *at, int row, int step,
                                int g, const int bits)
{
    if (bits == 8)
        return bytes_of(gather(at + 2 * g * step, row), gather(at + (2 * g + 1) * step, row));
    const int word = bits == 2 ? g / 2 : bits == 3 ? g % 3 : g;
    __m512i w = gather(at + word * step, row);
    if (bits == 2 && g % 2)
        w = _mm512_srli_epi16(w, 2);
    if (bits == 3 && g == 3)
        w = spare_of(w, gather(at + step, row), gather(at + 2 * step, row));
    return look_up(t, w, _mm512_srli_epi16(w, 4));
}

/* Four groups of words, one in each 16 bytes. */
ALWAYS __m512i value_words(const uint8_t *at, int step, const int bits)
{
    if (bits == 4)
        return gather(at, step);
    const __m512i w0 = words_at(at), w1 = words_at(at + step);
    if (bits == 2) {
        const __m512i lanes = _mm512_set_epi32(2, 2, 2, 2, 0, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0);
        return _mm512_srlv_epi32(_mm512_shuffle_i32x4(w0, w1, 0), lanes);
    }
    const __m512i w2 = words_at(at + 2 * step);
    __m512i w = _mm512_inserti32x4(w0, _mm512_castsi512_si128(w1), 1);
    w = _mm512_inserti32x4(w, _mm512_castsi512_si128(w2), 2);
    return _mm512_inserti32x4(w, _mm512_castsi512_si128(spare_of(w0, w1, w2)), 3);
}

/* Two words of two channels each: words 0 and 2, or 1 and 3, of both. */
ALWAYS struct levels value_bytes(__m512i first, __m512i second)
{
    const __m512 a = _mm512_castsi512_ps(first), b = _mm512_castsi512_ps(second);
    return bytes_of(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                    _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
}

ALWAYS struct levels value_levels(const struct tables *t, const uint8_t *at, int step, int g,
                                  const int bits)
{
    (void)g; /* all four at once */
    if (bits == 8)
        return value_bytes(_mm512_shuffle_epi8(gather(at, 2 * step), t->across),
                           _mm512_shuffle_epi8(gather(at + step, 2 * step), t->across));
    const __m512i w = _mm512_shuffle_epi8(value_words(at, step, bits), t->across);
    return look_up(t, w, _mm512_srli_epi16(w, 4));
}

ALWAYS struct sums first_sums(const int8_t *bytes, int count)
{
    const __m512i by = _mm512_set1_epi8((char)OFFSET), zero = _mm512_setzero_si512();
    __m512i all = zero; /* words of 16 bytes: even high, odd high, even low, odd low */
    for (int k = 0; k < count; k += 64) {
        const __mmask64 some = count - k < 64 ? ((__mmask64)1 << (count - k)) - 1 : ~(__mmask64)0;
        all = _mm512_dpbusd_epi32(all, by, _mm512_maskz_loadu_epi8(some, bytes + k));
    }
    all = _mm512_add_epi32(all, _mm512_shuffle_i32x4(all, all, 0x4e));
    all = _mm512_add_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
    all = _mm512_add_epi32(all, _mm512_shuffle_epi32(all, 0xb1));
    all = _mm512_sub_epi32(zero, all);
    return (struct sums){_mm512_shuffle_epi32(all, 0x00), _mm512_shuffle_epi32(all, 0xaa)};
}

ALWAYS __m512i four_bytes(const int8_t *at)
{
    return _mm512_set1_epi32((int)*(const word32 *)at);
}

ALWAYS void multiply(const struct levels *x, const int8_t *by, struct sums *sum)
{
    sum->high = _mm512_dpbusd_epi32(sum->high, x->even, four_bytes(by));
    sum->low = _mm512_dpbusd_epi32(sum->low, x->even, four_bytes(by + 8));
    sum->high = _mm512_dpbusd_epi32(sum->high, x->odd, four_bytes(by + 4));
    sum->low = _mm512_dpbusd_epi32(sum->low, x->odd, four_bytes(by + 12));
}

ALWAYS vf join(const struct sums *sum)
{
    const __m512 low = _mm512_cvtepi32_ps(sum->low);
    return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum->high), _mm512_set1_ps(BASE), low);
}

/* Weights of one row [count], a multiple of 16, as bytes [8 high][8 low]; returns their unit. */
static float split_weights(const float *weights, int count, float top, int8_t *bytes)
{
    const __m512 inverse = _mm512_set1_ps(top > 0.0f ? LARGEST / top : 0.0f);
    for (int t = 0; t < count; t += 16) {
        const __m512 whole = _mm512_mul_ps(_mm512_loadu_ps(weights + t), inverse);
        const __m512i h = _mm512_cvtps_epi32(_mm512_mul_ps(whole, _mm512_set1_ps(1.0f / BASE)));
        const __m512i l = _mm512_sub_epi32(_mm512_cvtps_epi32(whole),
                                           _mm512_mullo_epi32(h, _mm512_set1_epi32(BASE)));
        const __m128i high = _mm512_cvtsepi32_epi8(h), low = _mm512_cvtsepi32_epi8(l);
        _mm_storeu_si128((__m128i *)(bytes + 2 * t), _mm_unpacklo_epi64(high, low));
        _mm_storeu_si128((__m128i *)(bytes + 2 * t + 16), _mm_unpackhi_epi64(high, low));
    }
    return top / LARGEST;
}

#include "int8_dot.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
