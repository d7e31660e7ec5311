/* x86-64 with AVX-512 VNNI and without VBMI (Cascade Lake, Cooper Lake): levels are looked up with
   VPSHUFB, within 16 bytes. It gives 0 where the top bit of an index is set, hence the mask. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma"))),             \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")
#endif

#define DOTS_NAME avx512_vnni_dots
#define LOOK_UP(levels, index) \
    _mm512_shuffle_epi8(levels, _mm512_and_si512(index, _mm512_set1_epi8(15)))

#include "vnni.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
