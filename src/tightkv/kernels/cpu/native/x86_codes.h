/* Codes in registers of x86, LANES words at a time, for dots.h. The including file defines LANES
   (8 or 16) and `across`, a shuffle within 16 bytes: lane b gets bytes b of the four words. */

#include "vectors.h"

typedef uint16_t vh __attribute__((vector_size(4 * LANES)));

/* Nibbles; of 8-bit codes the bytes of one word, then of the next. Fewer than four bits have
   others above them. */
struct codes {
    vu first, second;
};

ALWAYS __m128i words_at(const uint8_t *at) { return _mm_loadu_si128((const __m128i *)at); }

#if LANES == 16
ALWAYS vu joined(__m128i a, __m128i b, __m128i c, __m128i d)
{
    __m512i w = _mm512_inserti32x4(_mm512_castsi128_si512(a), b, 1);
    return (vu)_mm512_inserti32x4(_mm512_inserti32x4(w, c, 2), d, 3);
}

/* The sixteen bytes at `at`, `at + step`, ... */
ALWAYS vu gather(const uint8_t *at, int step)
{
    return joined(words_at(at), words_at(at + step), words_at(at + 2 * step),
                  words_at(at + 3 * step));
}

/* Sixteen bytes, four times. */
ALWAYS vu repeated(__m128i x) { return (vu)_mm512_broadcast_i32x4(x); }

ALWAYS vu shuffle(vu x, vu by) { return (vu)_mm512_shuffle_epi8((__m512i)x, (__m512i)by); }

/* Words 0 and 2 of each 16 bytes of both, or words 1 and 3. */
#define PICK(a, b, which) \
    ((vu)_mm512_shuffle_ps((__m512)(a), (__m512)(b), (which) ? 0xdd : 0x88))
#else
ALWAYS vu joined(__m128i a, __m128i b) { return (vu)_mm256_set_m128i(b, a); }

ALWAYS vu gather(const uint8_t *at, int step)
{
    return joined(words_at(at), words_at(at + step));
}

ALWAYS vu repeated(__m128i x) { return (vu)_mm256_broadcastsi128_si256(x); }

ALWAYS vu shuffle(vu x, vu by) { return (vu)_mm256_shuffle_epi8((__m256i)x, (__m256i)by); }

#define PICK(a, b, which) \
    ((vu)_mm256_shuffle_ps((__m256)(a), (__m256)(b), (which) ? 0xdd : 0x88))
#endif

/* The eight codes in the spare top bits of three 3-bit words. */
ALWAYS vu spare_of(vu w0, vu w1, vu w2)
{
    return ((w0 >> 3) & 0x11111111u) | ((w1 >> 2) & 0x22222222u) | ((w2 >> 1) & 0x44444444u);
}

ALWAYS struct codes key_codes_at(const uint8_t *at, int row, int step, int g, const int bits)
{
    if (bits == 8)
        return (struct codes){gather(at + 2 * g * step, row), gather(at + (2 * g + 1) * step, row)};
    const int word = bits == 2 ? g / 2 : bits == 3 ? g % 3 : g;
    vu w = gather(at + word * step, row);
    if (bits == 2 && g % 2)
        w >>= 2;
    if (bits == 3 && g == 3)
        w = spare_of(w, gather(at + step, row), gather(at + 2 * step, row));
    return (struct codes){.first = w};
}

/* LANES / 4 groups of nibbles from group g on, one in each 16 bytes. */
ALWAYS vu value_words(const uint8_t *at, int step, int g, const int bits)
{
    if (bits == 4)
        return gather(at + g * step, step);
    if (bits == 2) {
        const __m128i w = words_at(at + g / 2 * step), more = _mm_srli_epi32(w, 2);
#if LANES == 16
        const __m128i next = words_at(at + step);
        return joined(w, more, next, _mm_srli_epi32(next, 2));
#else
        return joined(w, more);
#endif
    }
    const __m128i w[3] = {words_at(at), words_at(at + step), words_at(at + 2 * step)};
    const __m128i low = _mm_or_si128(
        _mm_and_si128(_mm_srli_epi32(w[0], 3), _mm_set1_epi8(0x11)),
        _mm_and_si128(_mm_srli_epi32(w[1], 2), _mm_set1_epi8(0x22)));
    const __m128i spare =
        _mm_or_si128(low, _mm_and_si128(_mm_srli_epi32(w[2], 1), _mm_set1_epi8(0x44)));
#if LANES == 16
    return joined(w[0], w[1], w[2], spare);
#else
    return g == 0 ? joined(w[0], w[1]) : joined(w[2], spare);
#endif
}

ALWAYS struct codes value_codes_at(vu across, const uint8_t *at, int step, int g, const int bits)
{
    if (bits == 8) { /* words of two channels each: the even tokens of both, then the odd ones */
        const vu a = shuffle(gather(at + 2 * g * step, 2 * step), across);
        const vu b = shuffle(gather(at + (2 * g + 1) * step, 2 * step), across);
        return (struct codes){PICK(a, b, 0), PICK(a, b, 1)};
    }
    return (struct codes){.first = shuffle(value_words(at, step, g, bits), across)};
}
