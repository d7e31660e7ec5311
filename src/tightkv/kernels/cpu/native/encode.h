/* Codes of one vector, codes to words and back, and the mean of a page. */
#ifndef TIGHTKV_ENCODE_H
#define TIGHTKV_ENCODE_H

#include "internal.h"

/* Rotated y[dim] -> codes[dim]; returns the float16 scale. */
uint16_t encode_vector(const struct side *side, int dim, const float *y, uint8_t *codes);
/* The same in the metric of factors[dim][dim], packed: of rows that end with the diagonal. `work`
   has room for 4 dim. */
uint16_t encode_with_feedback(const struct side *side, int dim, const float *y,
                              const float *factors, int packed, float *work, uint8_t *codes);

/* Rotated y[dim] rounded to what a ring of 8 bits stores: codes up to 2047 (keys) or 127 at `to`.
   Returns the float16 scale. */
uint16_t encode_exact(int is_value, int dim, const float *y, uint8_t *to);

/* One token's key codes [dim] into the code plane of a record. */
void pack_key(int bits, int dim, int offset, const uint8_t *codes, uint8_t *plane);
/* Two neighbouring tokens' value codes, [2][dim], and back; `pair` is half the even one's offset. */
void pack_values(int bits, int dim, int pair, const uint8_t *codes, uint8_t *plane);
void unpack_values(int bits, int dim, int pair, const uint8_t *plane, uint8_t *codes);

/* The mean key of a page, rotated: float16, or int8 and one float16 step. */
void write_mean(const struct layer *layer, uint8_t *record, const float *mean);
void read_mean(const struct layer *layer, const uint8_t *record, float *mean);

/* The float16 of token `offset` in a plane of scales. */
static inline uint8_t *scale_at(uint8_t *plane, int offset)
{
    int t = offset % BLOCK;
    return plane + 2 * (offset / BLOCK * BLOCK + t % 8 * 4 + t / 8);
}

#endif
