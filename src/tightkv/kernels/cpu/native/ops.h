/* What an instruction set must provide: decoders of one block, and the small products over it. */
#ifndef TIGHTKV_OPS_H
#define TIGHTKV_OPS_H

#include <stdint.h>

#define BLOCK 32 /* tokens whose codes are interleaved; a tile's order is [row r of 8][i of 4] */
#define STRIP 4  /* blocks whose softmax weights are found together at most */
#define BASE 254      /* of the two bytes of a number: 127 / BASE is exactly a half */
#define LARGEST 32384 /* 127 BASE + 126: the next one is nearer to 128 BASE */
#define DOT_ROWS 8 /* as many rows use them at most */
#define ROWS 64  /* (query, head) pairs that share one decoded tile at most */

/* The levels of one side's codes, whole numbers of at most 7 bits, by code; repeated to fill. */
struct book {
    int bits;
    float level[16];
    uint8_t high[16], low[16]; /* the two upper bytes of each float: the others are zero */
    int8_t byte[16];
};

/* Words of pages, which may start at any byte. */
typedef uint32_t word32 __attribute__((aligned(1), may_alias));
typedef uint16_t word16 __attribute__((aligned(1), may_alias));

struct ops {
    /* 32 tokens of packed key codes -> tile[dim][32]; room for dim rounded up to 32 rows.
       `work` has room for one block of codes. */
    void (*decode_keys)(const struct book *book, int dim, const uint8_t *codes, uint8_t *work,
                        float *tile);
    /* 32 tokens of packed value codes -> tile[32][dim] */
    void (*decode_values)(const struct book *book, int dim, const uint8_t *codes, float *tile);
    /* scores[row * stride + 32] = query[row][dim] . tile[dim][32] */
    void (*score)(const float *query, int rows, int dim, const float *tile, float *scores,
                  int stride);
    /* The same for 32 tokens' keys[dim] of a dtype or in codes, each where it is. */
    void (*score_tokens)(const float *query, int rows, int dim, const uint8_t *const *keys,
                         int64_t dtype, float *scores, int stride);
    /* out[row] = query[row][dim] . x[dim] */
    void (*project)(const float *query, int rows, int dim, const float *x, float *out);
    /* float16 scales of 32 tokens times `factor`; a sign bit, if `flags`, says centered: 1 or 0.
       Returns whether any is. */
    int (*scales)(const word16 *in, float factor, int flags, float *out, float *centered);
    /* scores = scores * factor + shift[row] where centered, soft-capped if cap > 0 */
    void (*scale)(float *scores, int rows, int stride, const float *factor, const float *centered,
                  const float *shift, float cap);
    /* One step of the online softmax over `count` scores a row: they become weights times
       `factor`, the largest magnitude of which is `top` (NaN if any is); peak, weight and sums[row][dim] are brought to
       the new peak. Returns whether any weight is not zero. */
    int (*softmax)(float *scores, int rows, int count, int stride, int dim, const float *factor,
                   float *peak, float *weight, float *sums, float *top);
    /* sums[row][dim] += weights[row * stride + tokens] . values[dim] of a dtype or in codes, of a
       multiple of 4 tokens, each where it is */
    void (*accumulate)(const float *weights, int stride, int rows, int tokens, int dim,
                       const uint8_t *const *values, int64_t dtype, float *sums);
    /* float16 -> float */
    void (*halves)(const word16 *in, int count, float *out);
};

/* Numbers of a row: each is a whole number times `unit`, NaN if any is NaN or infinite. */
struct numbers {
    float unit;
    int32_t sum[2]; /* of the whole numbers, or of their high and of their low bytes */
};

/* Of numbers up to `top`, which is NaN if any is. */
static inline float unit_of(float top) { return (top + (top - top)) / LARGEST; }

/* Products of 16-bit numbers with the codes themselves, for few rows (dots.h). Eight numbers are
   16 bytes, in an order and a format of the instruction set's own. `next` are codes of the
   other side, of as many tokens, that are multiplied next: products prefetch them little by
   little. */
struct dots {
    int most_dim;
    /* where code k of a group of keys is among its 8 numbers; [1]: of 8-bit keys */
    const uint8_t (*places)[8];
    /* query[row][dim] in `order` -> bytes [row][group][16]; `work` has room for a row */
    void (*queries)(const float *query, int rows, int dim, const int *order, int groups,
                    float *work, int8_t *bytes, struct numbers *numbers);
    /* scores[row * stride + 32] of a block */
    void (*keys)(const struct book *book, int dim, const uint8_t *codes, const uint8_t *next,
                 int next_bits, uint8_t *work, const int8_t *query, const struct numbers *numbers,
                 int rows, float *scores, int stride);
    /* sums[row][dim] += weights . values of a strip; weights are [row][STRIP][4][16 bytes] */
    void (*values)(const struct book *book, int dim, const uint8_t *const *codes,
                   const uint8_t *const *next, int next_bits, int blocks, const int8_t *weights,
                   const struct numbers *numbers, int rows, float *sums);
    /* a row of floats up to `top` -> bytes; count is a multiple of 16 */
    void (*split)(const float *x, int count, float top, int8_t *bytes, struct numbers *numbers);
};

/* An instruction set: how it is called and what it brings; dots may be NULL. */
struct isa {
    char name[16];
    const struct ops *ops;
    const struct dots *dots;
};

extern const struct ops portable_ops;
#if defined(__aarch64__)
extern const struct ops neon_ops;
extern const struct dots dotprod_dots;
#elif defined(__x86_64__)
extern const struct ops avx2_ops, avx512_ops;
extern const struct dots vnni_dots, avx512_vnni_dots, avx512_dots, avx2_dots;
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define HAS_AVXVNNI /* the compiler knows it */
extern const struct dots avxvnni_dots;
#endif
#endif

#endif
