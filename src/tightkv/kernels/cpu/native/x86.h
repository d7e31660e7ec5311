/* What the x86 files add to vectors.h, which comes after: operations on neighbouring lanes. GCC
   makes loops over memory of the plain C. */
#include <immintrin.h>
#include <stdint.h>

#if LANES == 16
#define LARGER(a, b) _mm512_max_ps((__m512)(a), (__m512)(b))
#define HALF(x, k) _mm512_extractf32x8_ps((__m512)(x), k)
#define IN_EIGHT(op, x) _mm256_##op##_ps(HALF(x, 0), HALF(x, 1))
#define SUM_INTS(x) _mm512_reduce_add_epi32((__m512i)(x))
#else
#define LARGER(a, b) _mm256_max_ps((__m256)(a), (__m256)(b))
#define IN_EIGHT(op, x) ((__m256)(x))
#define SUM_INTS(x) sum_eight((__m256i)(x))
static inline int32_t sum_eight(__m256i x)
{
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
#endif

#define FOUR_OF(op, y) _mm_##op##_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1))
#define IN_FOUR(op, x) FOUR_OF(op, IN_EIGHT(op, x))
#define SUM_FOUR(to, x)                                                                       \
    _mm_storeu_ps(to, _mm_hadd_ps(_mm_hadd_ps(IN_FOUR(add, (x)[0]), IN_FOUR(add, (x)[1])),      \
                                  _mm_hadd_ps(IN_FOUR(add, (x)[2]), IN_FOUR(add, (x)[3]))))

#define LANES_TO_ONE(name, op)                                                                \
    static inline float name(__m128 x)                                                        \
    {                                                                                         \
        x = _mm_##op##_ps(x, _mm_movehl_ps(x, x));                                            \
        return _mm_cvtss_f32(_mm_##op##_ss(x, _mm_shuffle_ps(x, x, 1)));                      \
    }
LANES_TO_ONE(sum_four, add)
LANES_TO_ONE(largest_four, max)
#define SUM_LANES(x) sum_four(IN_FOUR(add, x))
#define LARGEST_LANE(x) largest_four(IN_FOUR(max, x))
