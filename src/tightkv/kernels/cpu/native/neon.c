/* ARM NEON, part of every 64-bit ARM. Byte tables (TBL) turn codes into the two upper bytes of
   floats; a second TBL, over two registers, sets those bytes in place in four lanes at once. */
#if defined(__aarch64__)
#include <arm_neon.h>

#include "ops.h"
#include "key_block.h"

#define LANES 4
#define COLUMNS 2 /* more, and compilers move sums from register to register */
#define OPS_NAME neon_ops
#define LARGER vmaxq_f32
#define BY_LANE(sum, x, y, lane) vfmaq_f32(sum, x, vdupq_n_f32((y)[lane]))

#define SUM_FOUR(to, x)                                                                       \
    vst1q_f32(to, vpaddq_f32(vpaddq_f32((x)[0], (x)[1]), vpaddq_f32((x)[2], (x)[3])))

#define X 255 /* out of the table's range: gives a zero byte */
/* Byte b of each of the four words of a register pair (high bytes, low bytes), as four floats. */
static const uint8_t across_words[4][16] = {
    {X, X, 16, 0, X, X, 20, 4, X, X, 24, 8, X, X, 28, 12},
    {X, X, 17, 1, X, X, 21, 5, X, X, 25, 9, X, X, 29, 13},
    {X, X, 18, 2, X, X, 22, 6, X, X, 26, 10, X, X, 30, 14},
    {X, X, 19, 3, X, X, 23, 7, X, X, 27, 11, X, X, 31, 15},
};
/* The four bytes of word i, as four floats. */
static const uint8_t within_word[4][16] = {
    {X, X, 16, 0, X, X, 17, 1, X, X, 18, 2, X, X, 19, 3},
    {X, X, 20, 4, X, X, 21, 5, X, X, 22, 6, X, X, 23, 7},
    {X, X, 24, 8, X, X, 25, 9, X, X, 26, 10, X, X, 27, 11},
    {X, X, 28, 12, X, X, 29, 13, X, X, 30, 14, X, X, 31, 15},
};
struct tables {
    uint8x16_t high, low, place[4];
};

static inline struct tables tables_of(const struct book *book, const uint8_t place[4][16])
{
    struct tables t = {vld1q_u8(book->high), vld1q_u8(book->low), {{0}}};
    for (int k = 0; k < 4; k++)
        t.place[k] = vld1q_u8(place[k]);
    return t;
}

/* Sixteen codes, one in each byte, as four vectors of floats. */
static inline void expand(const struct tables *t, uint8x16x2_t bytes, float32x4_t out[4])
{
    for (int k = 0; k < 4; k++)
        out[k] = vreinterpretq_f32_u8(vqtbl2q_u8(bytes, t->place[k]));
}

/* Eight nibbles of four words, of which `mask` is used: even nibbles, then odd ones. */
static inline void nibbles(const struct tables *t, uint8x16_t w, uint8_t mask,
                           float32x4_t even[4], float32x4_t odd[4])
{
    uint8x16_t index[2] = {vandq_u8(w, vdupq_n_u8(mask)),
                           vandq_u8(vshrq_n_u8(w, 4), vdupq_n_u8(mask))};
    float32x4_t *out[2] = {even, odd};
    for (int k = 0; k < 2; k++) {
        uint8x16x2_t bytes = {{vqtbl1q_u8(t->high, index[k]), vqtbl1q_u8(t->low, index[k])}};
        expand(t, bytes, out[k]);
    }
}

/* The eight codes in the spare top bits of three 3-bit words. */
static inline uint8x16_t spare(uint8x16_t w0, uint8x16_t w1, uint8x16_t w2)
{
    uint8x16_t a = vandq_u8(vshrq_n_u8(w0, 3), vdupq_n_u8(0x11));
    uint8x16_t b = vandq_u8(vshrq_n_u8(w1, 2), vdupq_n_u8(0x22));
    uint8x16_t c = vandq_u8(vshrq_n_u8(w2, 1), vdupq_n_u8(0x44));
    return vorrq_u8(a, vorrq_u8(b, c));
}

/* --- keys: lanes are the tokens of a row r, dims go down the tile --- */

static inline void put_keys(float *tile, const float32x4_t even[4], const float32x4_t odd[4])
{
    for (int k = 0; k < 4; k++) {
        vst1q_f32(tile + (2 * k) * BLOCK, even[k]);
        vst1q_f32(tile + (2 * k + 1) * BLOCK, odd[k]);
    }
}

/* As put_keys, where nibbles 4..7 belong to the next chunk of 16 codes. */
static inline void put_keys16(float *tile, const float32x4_t even[4], const float32x4_t odd[4])
{
    for (int k = 0; k < 4; k++) {
        float *at = tile + ((k >> 1) * 16 + (k & 1) * 2) * BLOCK;
        vst1q_f32(at, even[k]);
        vst1q_f32(at + BLOCK, odd[k]);
    }
}

static void keys4(const struct book *book, struct key_shape s, const uint8_t *codes, float *tile)
{
    const struct tables t = tables_of(book, across_words);
    for (int j = 0; j < s.words; j++)
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < s.chunks; c++, codes += 16) {
                float32x4_t even[4], odd[4];
                nibbles(&t, vld1q_u8(codes), 15, even, odd);
                put_keys(tile + (c * s.stride + 8 * j) * BLOCK + 4 * r, even, odd);
            }
}

static void keys3(const struct book *book, struct key_shape s, const uint8_t *codes, float *tile)
{
    const struct tables t = tables_of(book, across_words);
    const int step = 8 * s.chunks * 16; /* bytes from word j to word j + 1 */
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < s.chunks; c++) {
            const uint8_t *at = codes + (r * s.chunks + c) * 16;
            uint8x16_t w[4] = {vld1q_u8(at), vld1q_u8(at + step), vld1q_u8(at + 2 * step)};
            w[3] = spare(w[0], w[1], w[2]);
            for (int j = 0; j < 4; j++) {
                float32x4_t even[4], odd[4];
                nibbles(&t, w[j], 7, even, odd);
                float *column = tile + c * s.stride * BLOCK + 4 * r;
                if (s.halves)
                    put_keys16(column + 4 * j * BLOCK, even, odd);
                else
                    put_keys(column + 8 * j * BLOCK, even, odd);
            }
        }
}

static void keys2(const struct book *book, struct key_shape s, const uint8_t *codes, float *tile)
{
    const struct tables t = tables_of(book, across_words);
    for (int j = 0; j < s.words; j++)
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < s.chunks; c++, codes += 16) {
                uint8x16_t w = vld1q_u8(codes);
                float *column = tile + (c * s.stride + 16 * j) * BLOCK + 4 * r;
                float32x4_t even[4], odd[4];
                nibbles(&t, w, 3, even, odd);
                put_keys(column, even, odd);
                nibbles(&t, vshrq_n_u8(w, 2), 3, even, odd);
                put_keys(column + 8 * BLOCK, even, odd);
            }
}

/* Signed bytes moved to the tops of lanes become floats: a conversion with 24 fraction bits. */
static const uint8_t top_across[4][16] = {
    {X, X, X, 0, X, X, X, 4, X, X, X, 8, X, X, X, 12},
    {X, X, X, 1, X, X, X, 5, X, X, X, 9, X, X, X, 13},
    {X, X, X, 2, X, X, X, 6, X, X, X, 10, X, X, X, 14},
    {X, X, X, 3, X, X, X, 7, X, X, X, 11, X, X, X, 15},
};

static void keys8(struct key_shape s, const uint8_t *codes, float *tile)
{
    for (int j = 0; j < s.words; j++)
        for (int r = 0; r < 8; r++)
            for (int c = 0; c < s.chunks; c++, codes += 16) {
                float *column = tile + (c * s.stride + 4 * j) * BLOCK + 4 * r;
                uint8x16_t w = vld1q_u8(codes);
                for (int k = 0; k < 4; k++) {
                    uint8x16_t tops = vqtbl1q_u8(w, vld1q_u8(top_across[k]));
                    vst1q_f32(column + k * BLOCK,
                              vcvtq_n_f32_s32(vreinterpretq_s32_u8(tops), 24));
                }
            }
}

static void decode_keys(const struct book *book, int dim, const uint8_t *codes, uint8_t *work,
                        float *tile)
{
    const struct key_shape s = key_shape(dim, book->bits);
    if (s.halves)
        codes = join_halves(dim, book->bits, codes, work);
    switch (book->bits) {
    case 2: keys2(book, s, codes, tile); break;
    case 3: keys3(book, s, codes, tile); break;
    case 4: keys4(book, s, codes, tile); break;
    default: keys8(s, codes, tile);
    }
}

/* --- values: lanes are channels, tokens go down the tile --- */

/* Even codes are token 2c of row i, odd ones its mate. */
static inline void put_values(float *tile, int dim, int c, const float32x4_t even[4],
                              const float32x4_t odd[4])
{
    for (int i = 0; i < 4; i++) {
        vst1q_f32(tile + (8 * c + i) * dim, even[i]);
        vst1q_f32(tile + (8 * c + 4 + i) * dim, odd[i]);
    }
}

static void values4(const struct book *book, int dim, const uint8_t *codes, float *tile)
{
    const struct tables t = tables_of(book, within_word);
    for (int j = 0; j < 4; j++)
        for (int d = 4 * j; d < dim; d += 16)
            for (int c = 0; c < 4; c++, codes += 16) {
                float32x4_t even[4], odd[4];
                nibbles(&t, vld1q_u8(codes), 15, even, odd);
                put_values(tile + d, dim, c, even, odd);
            }
}

static void values3(const struct book *book, int dim, const uint8_t *codes, float *tile)
{
    const struct tables t = tables_of(book, within_word);
    const int step = dim / 16 * 64;
    for (int d = 0; d < dim; d += 16)
        for (int c = 0; c < 4; c++, codes += 16) {
            uint8x16_t w[4] = {vld1q_u8(codes), vld1q_u8(codes + step), vld1q_u8(codes + 2 * step)};
            w[3] = spare(w[0], w[1], w[2]);
            for (int j = 0; j < 4; j++) {
                float32x4_t even[4], odd[4];
                nibbles(&t, w[j], 7, even, odd);
                put_values(tile + d + 4 * j, dim, c, even, odd);
            }
        }
}

static void values2(const struct book *book, int dim, const uint8_t *codes, float *tile)
{
    const struct tables t = tables_of(book, within_word);
    for (int j = 0; j < 2; j++)
        for (int d = 8 * j; d < dim; d += 16)
            for (int c = 0; c < 4; c++, codes += 16) {
                uint8x16_t w = vld1q_u8(codes);
                float32x4_t even[4], odd[4];
                nibbles(&t, w, 3, even, odd);
                put_values(tile + d, dim, c, even, odd);
                nibbles(&t, vshrq_n_u8(w, 2), 3, even, odd);
                put_values(tile + d + 4, dim, c, even, odd);
            }
}

/* Two channels of word j and two of word j + 1 of pair i: bytes 0 and 2, or 1 and 3 for mates. */
static const uint8_t top_within[8][16] = {
    {X, X, X, 0, X, X, X, 2, X, X, X, 16, X, X, X, 18},
    {X, X, X, 4, X, X, X, 6, X, X, X, 20, X, X, X, 22},
    {X, X, X, 8, X, X, X, 10, X, X, X, 24, X, X, X, 26},
    {X, X, X, 12, X, X, X, 14, X, X, X, 28, X, X, X, 30},
    {X, X, X, 1, X, X, X, 3, X, X, X, 17, X, X, X, 19},
    {X, X, X, 5, X, X, X, 7, X, X, X, 21, X, X, X, 23},
    {X, X, X, 9, X, X, X, 11, X, X, X, 25, X, X, X, 27},
    {X, X, X, 13, X, X, X, 15, X, X, X, 29, X, X, X, 31},
};

static void values8(int dim, const uint8_t *codes, float *tile)
{
    const int step = dim / 16 * 64;
    for (int j = 0; j < 8; j += 2, codes += step)
        for (int d = 2 * j; d < dim; d += 16)
            for (int c = 0; c < 4; c++, codes += 16) {
                uint8x16x2_t w = {{vld1q_u8(codes), vld1q_u8(codes + step)}};
                for (int k = 0; k < 8; k++) {
                    uint8x16_t tops = vqtbl2q_u8(w, vld1q_u8(top_within[k]));
                    vst1q_f32(tile + (8 * c + k) * dim + d,
                              vcvtq_n_f32_s32(vreinterpretq_s32_u8(tops), 24));
                }
            }
}

static void decode_values(const struct book *book, int dim, const uint8_t *codes, float *tile)
{
    switch (book->bits) {
    case 2: values2(book, dim, codes, tile); break;
    case 3: values3(book, dim, codes, tile); break;
    case 4: values4(book, dim, codes, tile); break;
    default: values8(dim, codes, tile);
    }
}

static inline float32x4_t half_vector(const word16 *in)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)in)));
}

static inline float32x4_t bfloat_vector(const word16 *in)
{
    const uint16x4_t x = vreinterpret_u16_u8(vld1_u8((const uint8_t *)in));
    return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
}

static inline int32x4_t byte_vector(const int8_t *in)
{
    int8x8_t x = vreinterpret_s8_u32(vdup_n_u32(*(const word32 *)in));
    return vmovl_s16(vget_low_s16(vmovl_s8(x)));
}

static inline uint32x4_t spread_words(const word32 *in) { return vdupq_n_u32(*in); }

#include "simd_attend.h"
#endif
