/* x86-64 with AVX2, FMA and F16C: eight levels are one register, looked up by the low three bits
   of each lane. Of 4-bit codes these are the magnitudes. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define LANES 8
#define COLUMNS 2
#define OPS_NAME avx2_ops

#include "x86.h"
#include "ops.h"
#include "vectors.h"

struct table {
    __m256 level;
};

static inline struct table table_of(const struct book *book)
{
    return (struct table){_mm256_loadu_ps(book->level)};
}

static inline vf look_up(const struct table *t, vu index)
{
    return (vf)_mm256_permutevar8x32_ps(t->level, (__m256i)index);
}

static inline vf look_up4(const struct table *t, vu index)
{
    return (vf)((vu)look_up(t, index) ^ (index << 28 & 0x80000000u));
}

static inline vu gather_words(const word32 *at, int step)
{
    __m128i a = _mm_loadu_si128((const __m128i *)at);
    __m128i b = _mm_loadu_si128((const __m128i *)(at + step));
    return (vu)_mm256_set_m128i(b, a);
}

static inline void put_parts(vf x, int part, float *tile, int dim)
{
    _mm_storeu_ps(tile + part * dim, _mm256_castps256_ps128((__m256)x));
    _mm_storeu_ps(tile + (4 + part) * dim, _mm256_extractf128_ps((__m256)x, 1));
}

static inline vf half_vector(const word16 *in)
{
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)in));
}

static inline vf bfloat_vector(const word16 *in)
{
    const __m128i x = _mm_loadu_si128((const __m128i *)in);
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}

static inline vi byte_vector(const int8_t *in)
{
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)in));
}

static inline vu spread_words(const word32 *in) { return (vu)_mm256_set1_epi32((int)in[0]); }

#include "decode.h"
#include "simd_attend.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
