/* A cache of fixed size for graphs that run without Python: one call takes the new tokens of a
   layer and attends to all. Operands come from a file that anybody may have made, so each is
   checked here before it is used. */
#ifndef TIGHTKV_STATIC_CACHE_H
#define TIGHTKV_STATIC_CACHE_H

#include <stddef.h>

#include "native.h"

#define STATIC_FORMAT 2 /* FORMAT_VERSION of config.py */
#define MOST_RANK 5

enum { INT64 = BOOLEAN + 1, UINT8, OTHER_DTYPE };
enum { STATE_LENGTH, STATE_EXACT, STATE_RING, STATE_SINKS, STATE_START, STATE_WORDS };

/* A tensor; strides count elements. Rank -1: not given. */
struct operand {
    void *data;
    int64_t dtype, rank;
    int64_t size[MOST_RANK], stride[MOST_RANK];
};

struct static_args {
    struct operand query;     /* [batch, query heads, tokens, dim] */
    struct operand key, value; /* [batch, heads, tokens, dim], dtype of the query */
    struct operand position;  /* int64 [tokens], one after another; 0 begins anew */
    struct operand left_pad;  /* int64 [batch], padding of each row; not given: as before */
    struct operand mask;      /* [batch or 1, query heads or 1, tokens, cached tokens or more] */
    struct operand spec;      /* int64, of export/static_kv.py */
    struct operand feedback;  /* float32 [heads, dim, dim], or packed [heads, dim (dim + 1) / 2] */
    struct operand pages;     /* uint8 [batch, pages, heads, record bytes]: pages that are read, or
                                 all of max_tokens; 0 where the ring holds the window */
    struct operand ring;      /* [key and value, batch, ring, heads, dim], dtype of the sinks; of
                                 codes: uint8 [batch, ring, heads, dim * 5 / 2 + 4], whose bytes are
                                 those of all keys, then all values, then all scales */
    struct operand sinks;     /* [key and value, batch, sinks, heads, dim], any float dtype */
    struct operand state;     /* int64 [batch, STATE_WORDS] */
    struct operand out;       /* [batch, tokens, query heads, dim], dtype of the query */
    double scale, softcap;    /* softcap 0: none */
    int64_t window, causal;   /* window 0: none */
    int64_t threads;
};

/* Returns 0, or -1 with the reason in why[size]; then the state is as it was. */
PUBLIC int tightkv_static_attention(const struct static_args *args, char *why, size_t size);

/* --- within static*.c --- */

struct spec {
    struct layer layer;
    int64_t exact_pages, ring, sinks, max_tokens;
    int64_t window_step; /* tokens by which the window moves on */
};

struct refusal {
    char *why;
    size_t size;
};
int refuse(const struct refusal *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The pointers of `out` go into the operand. */
int read_spec(const struct refusal *r, const struct operand *operand, struct spec *out);

#endif
