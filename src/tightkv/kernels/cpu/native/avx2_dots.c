/* x86-64 with AVX2: dots.h in registers of eight words. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define LANES 8
#define DOTS_NAME avx2_dots
#define ADD_PRODUCTS(sum, a, b) \
    _mm256_add_epi32((__m256i)(sum), _mm256_madd_epi16((__m256i)(a), (__m256i)(b)))

#include "madd.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
