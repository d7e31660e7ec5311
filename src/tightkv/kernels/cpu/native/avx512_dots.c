/* x86-64 with AVX-512 F and BW: dots.h in registers of sixteen words. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

#define LANES 16
#define DOTS_NAME avx512_dots
#define ADD_PRODUCTS(sum, a, b) \
    _mm512_add_epi32((__m512i)(sum), _mm512_madd_epi16((__m512i)(a), (__m512i)(b)))

#include "madd.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
