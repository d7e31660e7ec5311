/* The shape of a block of key codes, and rows that are an odd number of 16 codes. */
#ifndef TIGHTKV_KEY_BLOCK_H
#define TIGHTKV_KEY_BLOCK_H

#include <stdint.h>

#include "ops.h"

/* 32-bit words [j of words][r of 8][c of chunks][i of 4]; a chunk starts every `stride` dims. */
struct key_shape {
    int words, chunks, stride;
    int halves; /* the plane holds 16-bit words; join_halves makes 32-bit ones of them */
};

static inline struct key_shape key_shape(int dim, int bits)
{
    if (dim % 32 == 0)
        return (struct key_shape){bits, dim / 32, 32, 0};
    if (bits == 3) /* nibbles 0..3 are one chunk of 16 codes, 4..7 the next one */
        return (struct key_shape){3, (dim + 16) / 32, 32, 1};
    return (struct key_shape){bits / 2, dim / 16, 16, 1};
}

/* Groups of 8 codes a row has, those of a half-filled word included. */
static inline int key_groups(int dim, int bits)
{
    const struct key_shape s = key_shape(dim, bits);
    return s.chunks * s.stride / 8;
}

/* The dim of code `code` of a group; dim or more where a half-filled word has none. */
static inline int key_dim(int dim, int bits, int group, int code)
{
    const struct key_shape s = key_shape(dim, bits);
    const int per_chunk = s.stride / 8, first = group / per_chunk * s.stride;
    const int g = group % per_chunk;
    if (bits == 3 && s.halves)
        return first + code / 4 * 16 + 4 * g + code % 4;
    return first + 8 * g + code;
}

/* 16-bit words [j][r][c][i] -> 32-bit words in the order key_shape tells. */
static inline const uint8_t *join_halves(int dim, int bits, const uint8_t *codes, uint8_t *work)
{
    const int chunks = dim / 16;
    const word16 *in = (const word16 *)codes;
    word32 *out = (word32 *)work;
    if (bits == 3) {
        for (int row = 0; row < 3 * 8; row++, in += 4 * chunks)
            for (int c = 0; c < chunks; c += 2)
                for (int i = 0; i < 4; i++) {
                    uint32_t high = c + 1 < chunks ? in[4 * (c + 1) + i] : 0;
                    *out++ = in[4 * c + i] | high << 16;
                }
        return work;
    }
    const int step = 8 * chunks * 4; /* from word j to word j + 1 */
    for (int j = 0; j < bits; j += 2, in += step)
        for (int k = 0; k < step; k++, in++)
            *out++ = in[0] | (uint32_t)in[step] << 16;
    return work;
}

#endif
