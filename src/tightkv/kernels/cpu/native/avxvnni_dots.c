/* x86-64 with AVX2 and AVX-VNNI, which adds up in the same instruction: as avx2_dots.c. */
#include "ops.h"

#if defined(__x86_64__) && defined(HAS_AVXVNNI)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avxvnni")
#endif

#define LANES 8
#define DOTS_NAME avxvnni_dots
#define ADD_PRODUCTS(sum, a, b) \
    _mm256_dpwssd_avx_epi32((__m256i)(sum), (__m256i)(a), (__m256i)(b))

#include "madd.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
