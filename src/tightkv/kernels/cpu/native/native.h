/* What Python hands over. Every field is 8 bytes wide, so that both sides agree on offsets;
   `library.py` spells the same structs. Strides count elements unless they say bytes. */
#ifndef TIGHTKV_NATIVE_H
#define TIGHTKV_NATIVE_H

#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { FLOAT32, BFLOAT16, FLOAT16, BOOLEAN };
enum { ROTATION_NONE, ROTATION_HADAMARD, ROTATION_DENSE };
enum { SCALE_NORM, SCALE_CORRECTED, SCALE_LEAST_SQUARES, SCALE_UNBIASED };

/* Keys or values of a layer. */
struct side {
    int64_t bits;
    int64_t codes, scales;   /* byte offsets in a record */
    int64_t scale_mode;
    int64_t rotation;
    const float *signs;      /* [dim], Hadamard */
    const double *matrix;    /* [dim][dim], dense: y = M x */
    const float *centroids;  /* [2^bits] by code, unit variance */
    const float *thresholds; /* [2^(bits-1) - 1] between magnitudes */
    const float *levels;     /* [2^bits] by code; centroid = unit * level */
    double unit;
    double gain;             /* of feedback */
};

struct layer {
    int64_t dim, heads, page_size, record_bytes;
    int64_t centered, mean_bits, mean; /* mean: byte offset in a record */
    struct side key, value;
};

/* CacheView: tokens [start, length) of each sequence. */
struct view {
    int64_t batch;
    uint8_t *pages; /* NULL: ring and sinks hold all that is seen; nothing is sealed */
    int64_t page_bytes;
    const int32_t *block_table;
    int64_t block_stride;
    const int32_t *lengths; /* NULL: they follow attend_args, and ring_read_from follows them */
    const int32_t *left_pad, *ring_read_from, *sink_counts, *ring_rows;
    void *ring_key, *ring_value; /* [rows][ring][heads][dim], or codes (internal.h) */
    void *sink_key, *sink_value; /* [rows][sinks][heads][dim] */
    int64_t ring, sinks, dtype;
    uint16_t *ring_scales; /* float16 [rows][ring][heads][key, value] of codes; NULL: exact */
};

/* Packed rows of tokens [token][head][dim]. */
struct tokens {
    const void *data;
    int64_t token_stride, head_stride;
};

struct attend_args {
    struct view view;
    struct tokens new_key, new_value; /* data NULL: no new tokens */
    int64_t dtype, new_dtype;
    int64_t total, heads;   /* packed queries, query heads */
    const int32_t *cu_seqlens;   /* [batch + 1] */
    const void *mask;       /* NULL: none */
    int64_t mask_dtype, mask_batch, mask_head, mask_query, mask_token; /* strides */
    int64_t causal, window; /* window 0: none */
    double scale, softcap;  /* softcap 0: none */
    struct tokens query;    /* from here on, what is new in each of alike steps */
    void *out;              /* [total][heads][dim], dtype of the query */
    float *lse;             /* [total][heads] */
    int64_t threads;
};

struct append_args {
    struct view view;
    struct tokens key, value;
    int64_t dtype;
    const int32_t *cu_seqlens; /* [batch + 1] */
    const int32_t *ring_valid_from;
    int64_t encode_partial_page, threads;
    const float *feedback; /* [heads][dim][dim] of math/feedback.py, or NULL */
    int64_t feedback_packed; /* [heads][dim (dim + 1) / 2]: its rows end with the diagonal */
    int64_t lag; /* tokens that follow a page when it is sealed; 0 where open pages are encoded */
};

struct put_args {
    void *to_key, *to_value; /* a token in a ring */
    uint16_t *to_scales;     /* [heads][key, value] of codes; NULL: exact */
    int64_t to_dtype;        /* of exact tokens, which codes are of, too */
    const void *key, *value;
    int64_t dtype, count; /* of numbers */
    const struct layer *layer; /* of codes */
};

/* These return 0, or -1 where memory runs out. */
PUBLIC int tightkv_attend(const struct layer *layer, const struct attend_args *args);
PUBLIC int tightkv_append(const struct layer *layer, const struct append_args *args);
/* Puts a token in a ring; numbers beyond the range of `to_dtype` become its largest. */
PUBLIC int tightkv_put(const struct put_args *args);

/* The instruction sets of this build that this machine has, best first, with commas. */
PUBLIC const char *tightkv_supported(void);
PUBLIC const char *tightkv_chosen(void);
/* Use this one from now on; returns 0, or -1 if it is not among the supported. */
PUBLIC int tightkv_use(const char *name);
/* torch's GOMP_parallel, so that both share one pool of threads; NULL: threads of our own. */
PUBLIC void tightkv_share_threads(void (*parallel)(void (*)(void *), void *, unsigned, unsigned));

#endif
