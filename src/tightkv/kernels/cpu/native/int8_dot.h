/* Products of bytes with the codes themselves, for few rows, once for each instruction set that
   multiplies bytes and adds up four of them in each 32-bit lane.

   A query is 254 q1 + q0 with bytes q1 and q0 (16 bits and one factor), and so are softmax
   weights. Levels are bytes. docs/cpu.md has the error.

   The including file defines LANES, DOTS_NAME, split_weights, and

     struct tables; tables_of(book)     what look-ups need
     struct levels                  those of the even and of the odd codes of LANES words
     key_levels(t, at, row, step, g, bits)    group g of a chunk: lanes are tokens of LANES / 4
                                    rows, `row` bytes apart; words are `step` bytes apart
     value_levels(t, at, step, g, bits)       groups g, g + 1, ... of a chunk: lanes are LANES
                                    channels, bytes are every fourth pair's tokens
     struct sums; first_sums(bytes, count)    nothing yet, of a row of `count` bytes
     multiply(levels, by, sums)    by: 16 bytes [even q1][odd q1][even q0][odd q0]
     join(sums)                    products, by token or by channel */

#include "key_block.h"
#include "ops.h"
#include "vectors.h"

/* --- scores --- */

/* Codes of `groups` groups of 8 a row; query is [row][group][16 bytes]. */
ALWAYS void key_rows(const struct book *book, struct key_shape s, const uint8_t *codes,
                     const int8_t *query, int groups, const float *factor, float *scores,
                     int stride, const int rows, const int bits)
{
    const struct tables t = tables_of(book);
    const int row = s.chunks * 16;
    const int step = 8 * row; /* bytes from word j to word j + 1 */
    const int per_chunk = groups / s.chunks;
    struct sums first[4];
    for (int k = 0; k < rows; k++)
        first[k] = first_sums(query + k * groups * 16, groups * 16);
    for (int r = 0; r < 8; r += LANES / 4) {
        struct sums sum[4];
        for (int k = 0; k < rows; k++)
            sum[k] = first[k];
        for (int c = 0; c < s.chunks; c++) {
            const uint8_t *at = codes + r * row + c * 16;
            const int8_t *by = query + c * per_chunk * 16;
            for (int g = 0; g < per_chunk; g += 2, by += 32) { /* always an even number */
                const struct levels x[2] = {key_levels(&t, at, row, step, g, bits),
                                            key_levels(&t, at, row, step, g + 1, bits)};
                for (int k = 0; k < rows; k++)
                    multiply(&x[0], by + k * groups * 16, &sum[k]);
                for (int k = 0; k < rows; k++)
                    multiply(&x[1], by + 16 + k * groups * 16, &sum[k]);
            }
        }
        for (int k = 0; k < rows; k++)
            store(scores + k * stride + 4 * r, join(&sum[k]) * splat(factor[k]));
    }
}

ALWAYS void key_bits(const struct book *book, struct key_shape s, const uint8_t *codes,
                     const int8_t *query, int groups, const float *factor, float *scores,
                     int stride, const int rows)
{
    switch (book->bits) {
    case 2: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 2); break;
    case 3: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 3); break;
    case 4: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 4); break;
    default: key_rows(book, s, codes, query, groups, factor, scores, stride, rows, 8);
    }
}

static void dot_keys(const struct book *book, int dim, const uint8_t *codes, uint8_t *work,
                     const int8_t *query, const float *factor, int rows, float *scores, int stride)
{
    const struct key_shape s = key_shape(dim, book->bits);
    const int groups = key_groups(dim, book->bits);
    if (s.halves)
        codes = join_halves(dim, book->bits, codes, work);
    for (int r = 0; r < rows; r += 4) {
        const int8_t *q = query + r * groups * 16;
        float *to = scores + r * stride;
        switch (rows - r) {
        case 1: key_bits(book, s, codes, q, groups, factor + r, to, stride, 1); break;
        case 2: key_bits(book, s, codes, q, groups, factor + r, to, stride, 2); break;
        case 3: key_bits(book, s, codes, q, groups, factor + r, to, stride, 3); break;
        default: key_bits(book, s, codes, q, groups, factor + r, to, stride, 4);
        }
    }
}

/* --- values --- */

/* Weights are [row][block][pair c of 4][16 bytes]. */
ALWAYS void value_rows(const struct book *book, int dim, const uint8_t *const *codes, int blocks,
                       const int8_t *weights, const float *factor, float *sums, const int rows,
                       const int bits)
{
    const struct tables t = tables_of(book);
    const int step = dim / 16 * 64; /* bytes from word j to word j + 1 */
    struct sums first[4];
    for (int k = 0; k < rows; k++)
        first[k] = first_sums(weights + k * STRIP * 64, blocks * 64);
    for (int d = 0; d < dim; d += LANES) {
        const int g = d % 16 / 4;
        struct sums sum[4];
        for (int k = 0; k < rows; k++)
            sum[k] = first[k];
        for (int block = 0; block < blocks; block++)
            for (int c = 0; c < 4; c++) {
                const uint8_t *at = codes[block] + d / 16 * 64 + c * 16;
                const struct levels x = value_levels(&t, at, step, g, bits);
                const int8_t *by = weights + (block * 4 + c) * 16;
                for (int k = 0; k < rows; k++)
                    multiply(&x, by + k * STRIP * 64, &sum[k]);
            }
        for (int k = 0; k < rows; k++) {
            float *to = sums + k * dim + d;
            store(to, load(to) + join(&sum[k]) * splat(factor[k]));
        }
    }
}

ALWAYS void value_bits(const struct book *book, int dim, const uint8_t *const *codes, int blocks,
                       const int8_t *weights, const float *factor, float *sums, const int rows)
{
    switch (book->bits) {
    case 2: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 2); break;
    case 3: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 3); break;
    case 4: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 4); break;
    default: value_rows(book, dim, codes, blocks, weights, factor, sums, rows, 8);
    }
}

static void dot_values(const struct book *book, int dim, const uint8_t *const *codes, int blocks,
                       const int8_t *weights, const float *factor, int rows, float *sums)
{
    for (int r = 0; r < rows; r += 4) {
        const int8_t *w = weights + r * STRIP * 64;
        float *to = sums + r * dim;
        switch (rows - r) {
        case 1: value_bits(book, dim, codes, blocks, w, factor + r, to, 1); break;
        case 2: value_bits(book, dim, codes, blocks, w, factor + r, to, 2); break;
        case 3: value_bits(book, dim, codes, blocks, w, factor + r, to, 3); break;
        default: value_bits(book, dim, codes, blocks, w, factor + r, to, 4);
        }
    }
}

const struct dots DOTS_NAME = {dot_keys, dot_values, split_weights};
