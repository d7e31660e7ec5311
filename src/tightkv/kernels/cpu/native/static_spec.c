/* The spec of a layer: a header of 8-byte words, then its tables (export/static_kv.py writes it). */
#include <math.h>
#include <string.h>

#include "static_cache.h"

#define MAGIC 0x58564b5448474954LL /* "TIGHTKVX" */
#define HEADER_WORDS 27
#define MOST_DIM 1024
#define MOST_TOKENS (1 << 30) /* kernels count in 32 bits */

struct reader {
    const struct refusal *refusal;
    const int64_t *at, *end;
};

static int in_range(const struct reader *r, const char *name, int64_t value, int64_t low,
                    int64_t high)
{
    if (value >= low && value <= high)
        return 0;
    return refuse(r->refusal, "spec has %s=%lld; allowed: %lld to %lld", name, (long long)value,
                  (long long)low, (long long)high);
}

static double read_double(struct reader *r)
{
    double x;
    memcpy(&x, r->at++, sizeof x);
    return x;
}

static int is_number(double x, double most) { return x >= -most && x <= most; }

static int read_side(struct reader *r, struct side *s)
{
    s->bits = *r->at++, s->codes = *r->at++, s->scales = *r->at++;
    s->scale_mode = *r->at++, s->rotation = *r->at++;
    s->unit = read_double(r), s->gain = read_double(r);
    if (s->bits != 2 && s->bits != 3 && s->bits != 4 && s->bits != 8)
        return refuse(r->refusal, "spec has bits=%lld; allowed: 2, 3, 4 and 8", (long long)s->bits);
    if (in_range(r, "scale_mode", s->scale_mode, SCALE_NORM, SCALE_UNBIASED) ||
        in_range(r, "rotation", s->rotation, ROTATION_NONE, ROTATION_DENSE))
        return -1;
    if (!(s->unit > 1e-6 && s->unit < 1e6 && s->gain > 1e-6 && s->gain < 1e6))
        return refuse(r->refusal, "spec has unit=%g and gain=%g; both must be positive", s->unit,
                      s->gain);
    return 0;
}

/* `count` floats (or doubles), padded to whole words, each within [-most, most]. */
static int read_table(struct reader *r, const char *name, int64_t count, int wide, double most,
                      const void **table)
{
    const int64_t words = wide ? count : (count + 1) / 2;
    if (r->end - r->at < words)
        return refuse(r->refusal, "spec ends within its table of %s", name);
    const float *floats = (const float *)r->at;
    const double *doubles = (const double *)r->at;
    for (int64_t k = 0; k < count; k++)
        if (!is_number(wide ? doubles[k] : floats[k], most))
            return refuse(r->refusal, "spec has %s[%lld]=%g; allowed: -%g to %g", name,
                          (long long)k, wide ? doubles[k] : floats[k], most, most);
    *table = r->at;
    r->at += words;
    return 0;
}

static int read_tables(struct reader *r, int64_t dim, struct side *s)
{
    const int64_t codes = 1 << s->bits;
    const void *signs = NULL, *matrix = NULL, *centroids = NULL, *thresholds = NULL, *levels = NULL;
    if (s->rotation == ROTATION_HADAMARD && read_table(r, "signs", dim, 0, 1.0, &signs))
        return -1;
    if (s->rotation == ROTATION_DENSE && read_table(r, "matrix", dim * dim, 1, 1.001, &matrix))
        return -1;
    if (read_table(r, "centroids", codes, 0, 1e6, &centroids) ||
        (s->bits < 8 && read_table(r, "thresholds", codes / 2 - 1, 0, 1e6, &thresholds)) ||
        read_table(r, "levels", codes, 0, s->bits < 8 ? 127.0 : 128.0, &levels))
        return -1;
    s->signs = signs, s->matrix = matrix;
    s->centroids = centroids, s->thresholds = thresholds, s->levels = levels;
    return 0;
}

/* Planes lie one after another in a record, each on 16 bytes. */
static int check_planes(const struct reader *r, const struct layer *l)
{
    const int64_t codes = l->dim * l->page_size / 8, numbers = 2 * l->page_size;
    const int64_t mean = !l->centered ? 0 : l->mean_bits == 16 ? 2 * l->dim : l->dim + 2;
    const int64_t planes[6][2] = {
        {l->key.codes, l->key.bits * codes}, {l->value.codes, l->value.bits * codes},
        {l->key.scales, numbers}, {l->value.scales, numbers},
        {l->mean, mean}, {l->record_bytes, 0},
    };
    int64_t end = 0;
    for (int k = 0; k < 6; k++) {
        if (planes[k][0] < end || planes[k][0] % 16 || planes[k][0] > l->record_bytes)
            return refuse(r->refusal, "spec has a plane at byte %lld of a record of %lld bytes, "
                          "where the one before ends at %lld", (long long)planes[k][0],
                          (long long)l->record_bytes, (long long)end);
        end = planes[k][0] + planes[k][1];
    }
    return 0;
}

static int read_header(struct reader *r, struct spec *s)
{
    struct layer *l = &s->layer;
    l->dim = *r->at++, l->heads = *r->at++, l->page_size = *r->at++, l->record_bytes = *r->at++;
    l->centered = *r->at++, l->mean_bits = *r->at++, l->mean = *r->at++;
    s->exact_pages = *r->at++, s->ring = *r->at++, s->sinks = *r->at++, s->max_tokens = *r->at++;
    if (in_range(r, "head_dim", l->dim, 16, MOST_DIM) || in_range(r, "heads", l->heads, 1, 1 << 16) ||
        in_range(r, "page_size", l->page_size, 32, 256) ||
        in_range(r, "record_bytes", l->record_bytes, 1, 1 << 30) ||
        in_range(r, "centered", l->centered, 0, 1) ||
        in_range(r, "exact_pages", s->exact_pages, 1, 1 << 16) ||
        in_range(r, "ring", s->ring, l->page_size * s->exact_pages, 1 << 26) ||
        in_range(r, "sinks", s->sinks, 0, l->page_size) ||
        in_range(r, "max_tokens", s->max_tokens, 1, MOST_TOKENS))
        return -1;
    if (l->dim % 16 || l->page_size % 32 || (l->mean_bits != 8 && l->mean_bits != 16))
        return refuse(r->refusal, "spec has head_dim=%lld, page_size=%lld, mean_bits=%lld; allowed: "
                      "multiples of 16, multiples of 32, 8 or 16", (long long)l->dim,
                      (long long)l->page_size, (long long)l->mean_bits);
    return 0;
}

int read_spec(const struct refusal *refusal, const struct operand *operand, struct spec *out)
{
    struct reader r = {refusal, operand->data, NULL};
    if (operand->size[0] < HEADER_WORDS || r.at[0] != MAGIC)
        return refuse(refusal, "spec is not one of a tightkv layer");
    r.end = r.at + operand->size[0];
    if (r.at[1] != STATIC_FORMAT)
        return refuse(refusal, "spec has format %lld; this tightkv reads format %d: export the "
                      "model again with this version", (long long)r.at[1], STATIC_FORMAT);
    r.at += 2;
    struct layer *l = &out->layer;
    if (read_header(&r, out) || read_side(&r, &l->key) || read_side(&r, &l->value) ||
        check_planes(&r, l) || read_tables(&r, l->dim, &l->key) ||
        read_tables(&r, l->dim, &l->value))
        return -1;
    const struct side *sides[2] = {&l->key, &l->value};
    for (int k = 0; k < 2; k++)
        if (sides[k]->rotation == ROTATION_HADAMARD && (l->dim & (l->dim - 1)))
            return refuse(refusal, "spec has a Hadamard rotation of head_dim=%lld; it must be a "
                          "power of two", (long long)l->dim);
    if (r.at != r.end)
        return refuse(refusal, "spec has %lld words too many", (long long)(r.end - r.at));
    return 0;
}
