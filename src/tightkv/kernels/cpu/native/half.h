/* 16-bit floats to float and back, rounding to nearest even as torch does. */
#ifndef TIGHTKV_HALF_H
#define TIGHTKV_HALF_H

#include <stdint.h>
#include <string.h>

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float half_to_float(uint16_t half)
{
    uint32_t size = (uint32_t)(half & 0x7fff) << 13;
    float x = from_bits(size) * 0x1p112f; /* exact, subnormals too */
    uint32_t bits = to_bits(x);
    if (size >= 0x0f800000u) /* infinity and NaN */
        bits = size | 0x7f800000u;
    return from_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t float_to_half(float x)
{
    uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (size >= 0x47800000u) /* 65536 and up */
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000u) { /* subnormal: the sum's rounding is the one wanted */
        float shifted = from_bits(size) + 0.5f;
        return (uint16_t)(sign | (to_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13));
}

static inline float bfloat_to_float(uint16_t x) { return from_bits((uint32_t)x << 16); }

static inline uint16_t float_to_bfloat(float x)
{
    uint32_t bits = to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#endif
