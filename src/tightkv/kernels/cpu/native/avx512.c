/* x86-64 with AVX-512 F, BW, DQ and VL: as avx2.c, with sixteen lanes. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

#define LANES 16
#define COLUMNS 2
#define OPS_NAME avx512_ops

#include "x86.h"
#include "ops.h"
#include "vectors.h"

struct table {
    __m512 level;
};

static inline struct table table_of(const struct book *book)
{
    return (struct table){_mm512_loadu_ps(book->level)};
}

static inline vf look_up(const struct table *t, vu index)
{
    return (vf)_mm512_permutexvar_ps((__m512i)index, t->level);
}

#define look_up4 look_up

static inline vu gather_words(const word32 *at, int step)
{
    __m512i w = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
    w = _mm512_inserti32x4(w, _mm_loadu_si128((const __m128i *)(at + step)), 1);
    w = _mm512_inserti32x4(w, _mm_loadu_si128((const __m128i *)(at + 2 * step)), 2);
    return (vu)_mm512_inserti32x4(w, _mm_loadu_si128((const __m128i *)(at + 3 * step)), 3);
}

static inline void put_parts(vf x, int part, float *tile, int dim)
{
    __m512 v = (__m512)x;
    _mm_storeu_ps(tile + (2 * part) * dim, _mm512_castps512_ps128(v));
    _mm_storeu_ps(tile + (2 * part + 4) * dim, _mm512_extractf32x4_ps(v, 1));
    _mm_storeu_ps(tile + (2 * part + 1) * dim, _mm512_extractf32x4_ps(v, 2));
    _mm_storeu_ps(tile + (2 * part + 5) * dim, _mm512_extractf32x4_ps(v, 3));
}

static inline vf half_vector(const word16 *in)
{
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)in));
}

static inline vf bfloat_vector(const word16 *in)
{
    const __m256i x = _mm256_loadu_si256((const __m256i *)in);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}

static inline vi byte_vector(const int8_t *in)
{
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)in));
}

static inline vu spread_words(const word32 *in)
{
    const __m512i first = _mm512_set1_epi32((int)in[0]);
    return (vu)_mm512_inserti64x4(first, _mm256_set1_epi32((int)in[1]), 1);
}

#include "decode.h"
#include "simd_attend.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
