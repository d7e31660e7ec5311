/* The decoders in the compiler's vector types. The including file defines LANES and

     struct table; table_of(book)   the levels, ready for look-ups
     look_up(table, index)          levels at the low three bits of each lane
     look_up4(table, index)         at the low four
     gather_words(at, step)         the 4-word vectors at `at`, `at + step`, ..., LANES words
     put_parts(v, tile, dim)        4 lanes each to rows 0, 4, 1, 5, 2, 6, 3, 7 of a value tile */

#include "key_block.h"
#include "vectors.h"

/* --- keys: lanes are tokens of LANES / 4 rows r, dims go down the tile --- */

static inline vu spare_codes(vu w0, vu w1, vu w2)
{
    return ((w0 >> 3) & 0x11111111u) | ((w1 >> 2) & 0x22222222u) | ((w2 >> 1) & 0x44444444u);
}

static inline vf signed_byte(vu w, int n)
{
    return __builtin_convertvector((vi)(w << (24 - 8 * n)) >> 24, vf);
}

static inline void key_nibbles3(const struct table *t, vu w, int halves, float *tile)
{
    for (int n = 0; n < 8; n++) {
        const int dim = halves ? (n >> 2) * 16 + (n & 3) : n;
        store(tile + dim * BLOCK, look_up(t, w >> (4 * n)));
    }
}

static void keys3(const struct table *t, struct key_shape s, const word32 *codes, float *tile)
{
    const int step = 8 * s.chunks * 4; /* words from j to j + 1 */
    for (int r = 0; r < 8; r += LANES / 4)
        for (int c = 0; c < s.chunks; c++) {
            const word32 *at = codes + (r * s.chunks + c) * 4;
            vu w[4];
            for (int j = 0; j < 3; j++)
                w[j] = gather_words(at + j * step, s.chunks * 4);
            w[3] = spare_codes(w[0], w[1], w[2]);
            float *column = tile + c * s.stride * BLOCK + 4 * r;
            for (int j = 0; j < 4; j++)
                key_nibbles3(t, w[j], s.halves, column + (s.halves ? 4 : 8) * j * BLOCK);
        }
}

static void decode_keys(const struct book *book, int dim, const uint8_t *packed, uint8_t *work,
                        float *tile)
{
    const struct table t = table_of(book);
    const struct key_shape s = key_shape(dim, book->bits);
    if (s.halves)
        packed = join_halves(dim, book->bits, packed, work);
    const word32 *codes = (const word32 *)packed;
    if (book->bits == 3) {
        keys3(&t, s, codes, tile);
        return;
    }
    const int per_word = 32 / book->bits;
    for (int j = 0; j < s.words; j++)
        for (int r = 0; r < 8; r += LANES / 4)
            for (int c = 0; c < s.chunks; c++) {
                vu w = gather_words(codes + ((j * 8 + r) * s.chunks + c) * 4, s.chunks * 4);
                float *column = tile + (c * s.stride + per_word * j) * BLOCK + 4 * r;
                if (book->bits == 4)
                    for (int n = 0; n < 8; n++)
                        store(column + n * BLOCK, look_up4(&t, w >> (4 * n)));
                else if (book->bits == 2)
                    for (int n = 0; n < 16; n++)
                        store(column + n * BLOCK, look_up(&t, w >> (4 * (n & 7) + 2 * (n >> 3))));
                else
                    for (int n = 0; n < 4; n++)
                        store(column + n * BLOCK, signed_byte(w, n));
            }
}

/* --- values: lanes are 4 channels of a token, of its mate, then of the next pair --- */

/* Where code `4 * parity + channel` of eight lies: in a nibble, or at the top of a byte. */
static const uint8_t nibble_shift[8] = {0, 8, 16, 24, 4, 12, 20, 28};
static const uint8_t byte_shift[8] = {24, 8, 24, 8, 16, 0, 16, 0};

/* Shifts for the lanes of vector `part` of the 32 codes of four words. */
static inline vu lane_shifts(const uint8_t shift[8], int part)
{
    vu out;
    for (int lane = 0; lane < LANES; lane++)
        out[lane] = shift[(part * LANES + lane) % 8];
    return out;
}

static inline vu lane_words(const word32 *w, int part)
{
    vu out;
    for (int lane = 0; lane < LANES; lane++)
        out[lane] = w[(part * LANES + lane) / 8];
    return out;
}

#define PARTS (32 / LANES)

/* Eight codes of each of four pairs: `tile` is at their first channel and the first pair's row. */
static inline void value_nibbles(const struct table *t, const word32 *w, int dim, float *tile,
                                 const int extra, const int bits)
{
    for (int part = 0; part < PARTS; part++) {
        vu words = lane_words(w, part);
        vu index = words >> (lane_shifts(nibble_shift, part) + (uint32_t)extra);
        put_parts(bits == 4 ? look_up4(t, index) : look_up(t, index), part, tile, dim);
    }
}

static inline void value_bytes(const word32 *first, const word32 *second, int dim, float *tile)
{
    for (int part = 0; part < PARTS; part++) {
        vu a = lane_words(first, part), b = lane_words(second, part), words;
        for (int lane = 0; lane < LANES; lane++)
            words[lane] = lane % 4 < 2 ? a[lane] : b[lane];
        vi level = (vi)(words << lane_shifts(byte_shift, part)) >> 24;
        put_parts(__builtin_convertvector(level, vf), part, tile, dim);
    }
}

static void decode_values(const struct book *book, int dim, const uint8_t *packed, float *tile)
{
    const struct table t = table_of(book);
    const word32 *codes = (const word32 *)packed;
    const int step = dim; /* words from j to j + 1: dim / 16 chunks of 4 x 4 */
    for (int chunk = 0; chunk < dim / 16; chunk++)
        for (int c = 0; c < 4; c++) {
            const word32 *at = codes + chunk * 16 + c * 4;
            float *rows = tile + 8 * c * dim + 16 * chunk;
            if (book->bits == 4)
                for (int j = 0; j < 4; j++)
                    value_nibbles(&t, at + j * step, dim, rows + 4 * j, 0, 4);
            else if (book->bits == 2)
                for (int j = 0; j < 2; j++)
                    for (int h = 0; h < 2; h++)
                        value_nibbles(&t, at + j * step, dim, rows + 8 * j + 4 * h, 2 * h, 2);
            else if (book->bits == 8)
                for (int j = 0; j < 8; j += 2)
                    value_bytes(at + j * step, at + (j + 1) * step, dim, rows + 2 * j);
            else {
                word32 last[4];
                for (int j = 0; j < 3; j++)
                    value_nibbles(&t, at + j * step, dim, rows + 4 * j, 0, 3);
                for (int i = 0; i < 4; i++)
                    last[i] = ((at[i] >> 3) & 0x11111111u) |
                              ((at[i + step] >> 2) & 0x22222222u) |
                              ((at[i + 2 * step] >> 1) & 0x44444444u);
                value_nibbles(&t, last, dim, rows + 12, 0, 3);
            }
        }
}
