/* x86-64 with AVX-512 VNNI and VBMI: levels are looked up with VPERMB, which ignores the upper two
   bits of an index; tables repeat every 16 entries or fewer. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma"))),  \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma")
#endif

#define DOTS_NAME vnni_dots
#define LOOK_UP(levels, index) _mm512_permutexvar_epi8(index, levels)

#include "vnni.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
