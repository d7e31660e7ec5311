/* What the C files share. */
#ifndef TIGHTKV_INTERNAL_H
#define TIGHTKV_INTERNAL_H

#include <stdint.h>
#include <string.h>

#include "half.h"
#include "native.h"
#include "ops.h"

const struct isa *current_isa(void);

/* Runs body(context, task) for every task, on up to `threads` threads; `open` makes what one
   thread needs and `close` frees it. Returns -1 if `open` gave NULL for any of them. */
struct work {
    void (*body)(void *context, void *own, int64_t task);
    void *(*open)(void *context);
    void (*close)(void *own);
    void *context;
    int64_t tasks;
};
int run_tasks(const struct work *work, int64_t threads);

/* y = R x; both [dim], x is overwritten. */
void rotate(const struct side *side, int dim, float *x, float *y);
/* y = R^T x */
void rotate_back(const struct side *side, int dim, float *x, float *y);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Beside the dtypes of native.h: tokens of a window of 8 bits (pages/window.py), in the frame of
   pages. Values are bytes; keys dim bytes, then dim / 2 of nibbles, of which four bytes have eight
   channels. */
enum { RING_CODES = 16 };

/* A ring's codes -> floats, to be multiplied with the scale. */
static inline void read_codes(const uint8_t *from, int is_value, int dim, float *to)
{
    for (int d = 0; d < dim; d++) {
        const int low = is_value ? 0 : from[dim + d / 8 * 4 + d % 4] >> d % 8 / 4 * 4 & 15;
        to[d] = (float)((int8_t)from[d] * (is_value ? 1 : 16) + low);
    }
}

static inline int item_size(int64_t dtype) { return dtype == FLOAT32 ? 4 : dtype == BOOLEAN ? 1 : 2; }

/* count elements of a dtype -> float */
static inline void read_floats(const void *from, int64_t dtype, int count, float *to)
{
    const word16 *in = from;
    if (dtype == FLOAT32)
        memcpy(to, from, sizeof(float) * (size_t)count);
    else if (dtype == BFLOAT16)
        for (int d = 0; d < count; d++)
            to[d] = bfloat_to_float(in[d]);
    else
        for (int d = 0; d < count; d++)
            to[d] = half_to_float(in[d]);
}

static inline void write_floats(const float *from, int64_t dtype, int count, void *to)
{
    word16 *out = to;
    if (dtype == FLOAT32)
        memcpy(to, from, sizeof(float) * (size_t)count);
    else if (dtype == BFLOAT16)
        for (int d = 0; d < count; d++)
            out[d] = float_to_bfloat(from[d]);
    else
        for (int d = 0; d < count; d++)
            out[d] = float_to_half(from[d]);
}

/* Head `head` of token `token`. */
static inline const void *token_at(struct tokens t, int64_t dtype, int64_t token, int64_t head)
{
    int64_t at = token * t.token_stride + head * t.head_stride;
    return (const uint8_t *)t.data + at * item_size(dtype);
}

#endif
