/* Products of whole numbers with the codes themselves, for few rows, once for each instruction
   set that multiplies such numbers and adds neighbours up in each 32-bit lane.

   Queries and softmax weights are whole numbers of 16 bits with one factor a row. Levels are
   bytes. All sums are exact, so they are the same for all instruction sets. docs/cpu.md has the
   error.

   The including file defines LANES, DOTS_NAME and

     SETS                           vectors that are multiplied with the same operand at once
     MOST_DIM                       struct dots: most_dim
     PARTS                          a group of 8 codes has as many vectors of levels
     struct tables; tables_of(book)           what look-ups need
     struct codes                             a group of 8 codes of LANES words
     key_codes(t, at, row, step, g, bits)     group g of a chunk: lanes are tokens of LANES / 4
                                    rows, `row` bytes apart; words are `step` bytes apart
     value_codes(t, at, step, g, bits)        groups g, g + 1, ... of a chunk: lanes are LANES
                                    channels, bytes are every fourth pair's tokens
     vector; levels_of(t, codes, part, bits)
     struct sums; first_sums(t, numbers, bits)         nothing yet
     multiply(levels, by, part, sums)         by: the group's 16 bytes
     join(sums)                     products, by token or by channel
     split_numbers(x, count, factor, bytes, sum)       struct dots: split; `factor` makes whole
                                    numbers up to LARGEST of x, `sum` is as in struct numbers
     places                         struct dots: places */

#include <float.h>

#include "key_block.h"
#include "ops.h"
#include "vectors.h"

ALWAYS void fetch_ahead(const uint8_t *from, int bytes)
{
    for (int k = 0; k < bytes; k += 64)
        __builtin_prefetch(from + k);
}

/* --- scores --- */

/* The largest magnitude; NaN if any is. As whole numbers, magnitudes are in the same order, and NaN
   comes last. */
static float largest_size(const float *x, int dim)
{
    vi most = splat_int(0);
    for (int d = 0; d < dim; d += LANES) {
        const vi size = (vi)load(x + d) & splat_int(0x7fffffff), more = size > most;
        most = (more & size) | (~more & most);
    }
    int32_t lanes[LANES], last = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < LANES; i++)
        last = lanes[i] > last ? lanes[i] : last;
    float out;
    memcpy(&out, &last, sizeof out);
    return out;
}

/* Whole numbers up to LARGEST: 0 where `top` is not a number, or so small that they have no factor. */
static void split(const float *x, int count, float top, int8_t *bytes, struct numbers *numbers)
{
    const float factor = LARGEST / top;
    *numbers = (struct numbers){.unit = unit_of(top)};
    if (factor > 0.0f && factor <= FLT_MAX)
        split_numbers(x, count, factor, bytes, numbers->sum);
    else
        memset(bytes, 0, 2 * (size_t)count);
}

static void split_queries(const float *query, int rows, int dim, const int *order, int groups,
                          float *work, int8_t *bytes, struct numbers *numbers)
{
    for (int r = 0; r < rows; r++, query += dim) {
        for (int k = 0; k < groups * 8; k++)
            work[k] = order[k] < dim ? query[order[k]] : 0.0f;
        split(work, groups * 8, largest_size(query, dim), bytes + r * groups * 16, numbers + r);
    }
}

/* Codes of `groups` groups of 8 a row; query is [row][group][16 bytes]. */
ALWAYS void key_rows(const struct book *book, struct key_shape s, const uint8_t *codes,
                     const uint8_t *next, int next_bits, const int8_t *query, int groups,
                     const struct numbers *numbers, float *scores, int stride, const int rows,
                     const int bits)
{
    const struct tables t = tables_of(book);
    const int row = s.chunks * 16;
    const int step = 8 * row; /* bytes from word j to word j + 1 */
    const int per_chunk = groups / s.chunks;
    const int ahead = s.stride / 2 * next_bits * SETS * LANES / 4; /* bytes of `next` a chunk */
    for (int r = 0; r < 8; r += SETS * LANES / 4) {
        struct sums sum[SETS][4];
        for (int k = 0; k < rows; k++)
            for (int set = 0; set < SETS; set++)
                sum[set][k] = first_sums(&t, numbers + k, bits);
        for (int c = 0; c < s.chunks; c++) {
            const uint8_t *at = codes + r * row + c * 16;
            const int8_t *by = query + c * per_chunk * 16;
            fetch_ahead(next, ahead);
            next += ahead;
            for (int g = 0; g < per_chunk; g++, by += 16) {
                struct codes w[SETS];
                for (int set = 0; set < SETS; set++)
                    w[set] = key_codes(&t, at + set * (LANES / 4) * row, row, step, g, bits);
                for (int part = 0; part < PARTS; part++) {
                    vector x[SETS];
                    for (int set = 0; set < SETS; set++)
                        x[set] = levels_of(&t, &w[set], part, bits);
                    for (int k = 0; k < rows; k++)
                        for (int set = 0; set < SETS; set++)
                            multiply(x[set], by + k * groups * 16, part, &sum[set][k]);
                }
            }
        }
        for (int k = 0; k < rows; k++)
            for (int set = 0; set < SETS; set++)
                store(scores + k * stride + 4 * r + set * LANES,
                      join(&sum[set][k]) * splat(numbers[k].unit));
    }
}

ALWAYS void key_bits(const struct book *book, struct key_shape s, const uint8_t *codes,
                     const uint8_t *next, int next_bits, const int8_t *query, int groups,
                     const struct numbers *numbers, float *scores, int stride, const int rows)
{
    const struct numbers *n = numbers;
    switch (book->bits) {
    case 2: key_rows(book, s, codes, next, next_bits, query, groups, n, scores, stride, rows, 2); break;
    case 3: key_rows(book, s, codes, next, next_bits, query, groups, n, scores, stride, rows, 3); break;
    case 4: key_rows(book, s, codes, next, next_bits, query, groups, n, scores, stride, rows, 4); break;
    default: key_rows(book, s, codes, next, next_bits, query, groups, n, scores, stride, rows, 8);
    }
}

static void dot_keys(const struct book *book, int dim, const uint8_t *codes, const uint8_t *next, int next_bits,
                     uint8_t *work, const int8_t *query, const struct numbers *numbers, int rows,
                     float *scores, int stride)
{
    const struct key_shape s = key_shape(dim, book->bits);
    const int groups = key_groups(dim, book->bits);
    if (s.halves)
        codes = join_halves(dim, book->bits, codes, work);
    for (int r = 0; r < rows; r += 4) {
        const int8_t *q = query + r * groups * 16;
        const struct numbers *n = numbers + r;
        float *to = scores + r * stride;
        switch (rows - r) {
        case 1: key_bits(book, s, codes, next, next_bits, q, groups, n, to, stride, 1); break;
        case 2: key_bits(book, s, codes, next, next_bits, q, groups, n, to, stride, 2); break;
        case 3: key_bits(book, s, codes, next, next_bits, q, groups, n, to, stride, 3); break;
        default: key_bits(book, s, codes, next, next_bits, q, groups, n, to, stride, 4);
        }
    }
}

/* --- values --- */

/* `sets` x LANES channels from d on. */
ALWAYS void value_columns(const struct tables *t, int dim, int d, const uint8_t *const *codes,
                          const uint8_t *const *next, int next_bits, int blocks, const int8_t *weights,
                          const struct numbers *numbers, float *sums, const int rows,
                          const int bits, const int sets)
{
    const int step = dim / 16 * 64; /* bytes from word j to word j + 1 */
    const int width = sets * LANES, ahead = 4 * next_bits * width;
    const int within = width % 16 == 0 ? 0 : d % 16; /* of a chunk */
    struct sums sum[SETS][4];
    for (int k = 0; k < rows; k++)
        for (int set = 0; set < sets; set++)
            sum[set][k] = first_sums(t, numbers + k, bits);
    for (int block = 0; block < blocks; block++) {
        fetch_ahead(next[block] + 4 * next_bits * d, ahead);
        for (int c = 0; c < 4; c++) {
            const uint8_t *at = codes[block] + d / 16 * 64 + c * 16;
            const int8_t *by = weights + (block * 4 + c) * 16;
            struct codes w[SETS];
            for (int set = 0; set < sets; set++) {
                const int first = within + set * LANES;
                w[set] = value_codes(t, at + first / 16 * 64, step, first % 16 / 4, bits);
            }
            for (int part = 0; part < PARTS; part++) {
                vector x[SETS];
                for (int set = 0; set < sets; set++)
                    x[set] = levels_of(t, &w[set], part, bits);
                for (int k = 0; k < rows; k++)
                    for (int set = 0; set < sets; set++)
                        multiply(x[set], by + k * STRIP * 64, part, &sum[set][k]);
            }
        }
    }
    for (int k = 0; k < rows; k++)
        for (int set = 0; set < sets; set++) {
            float *to = sums + k * dim + d + set * LANES;
            store(to, load(to) + join(&sum[set][k]) * splat(numbers[k].unit));
        }
}

/* Weights are [row][block][pair c of 4][16 bytes]. */
ALWAYS void value_rows(const struct book *book, int dim, const uint8_t *const *codes,
                       const uint8_t *const *next, int next_bits, int blocks, const int8_t *weights,
                       const struct numbers *numbers, float *sums, const int rows, const int bits)
{
    const struct tables t = tables_of(book);
    int d = 0;
    for (; d + SETS * LANES <= dim; d += SETS * LANES)
        value_columns(&t, dim, d, codes, next, next_bits, blocks, weights, numbers, sums, rows, bits, SETS);
    if (d < dim) /* 16 more than a multiple, on the widest vectors */
        value_columns(&t, dim, d, codes, next, next_bits, blocks, weights, numbers, sums, rows, bits, 1);
}

ALWAYS void value_bits(const struct book *book, int dim, const uint8_t *const *codes,
                       const uint8_t *const *next, int next_bits, int blocks, const int8_t *weights,
                       const struct numbers *numbers, float *sums, const int rows)
{
    const struct numbers *n = numbers;
    switch (book->bits) {
    case 2: value_rows(book, dim, codes, next, next_bits, blocks, weights, n, sums, rows, 2); break;
    case 3: value_rows(book, dim, codes, next, next_bits, blocks, weights, n, sums, rows, 3); break;
    case 4: value_rows(book, dim, codes, next, next_bits, blocks, weights, n, sums, rows, 4); break;
    default: value_rows(book, dim, codes, next, next_bits, blocks, weights, n, sums, rows, 8);
    }
}

static void dot_values(const struct book *book, int dim, const uint8_t *const *codes,
                       const uint8_t *const *next, int next_bits, int blocks, const int8_t *weights,
                       const struct numbers *numbers, int rows, float *sums)
{
    for (int r = 0; r < rows; r += 4) {
        const int8_t *w = weights + r * STRIP * 64;
        const struct numbers *n = numbers + r;
        float *to = sums + r * dim;
        switch (rows - r) {
        case 1: value_bits(book, dim, codes, next, next_bits, blocks, w, n, to, 1); break;
        case 2: value_bits(book, dim, codes, next, next_bits, blocks, w, n, to, 2); break;
        case 3: value_bits(book, dim, codes, next, next_bits, blocks, w, n, to, 3); break;
        default: value_bits(book, dim, codes, next, next_bits, blocks, w, n, to, 4);
        }
    }
}

const struct dots DOTS_NAME = {MOST_DIM, places, split_queries, dot_keys, dot_values, split};
