/* Runs append and attend over buffers of exactly the size they need, for sanitizers to watch, with
   numbers that are none as well, and compares every instruction set of this machine with the
   portable code. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

enum { HEADS = 2, SHARE = 3, RING = 96, SINKS = 2, BATCH = 2 };
enum { NEW, CAPPED, WINDOW, MANY, TINY, NEGATIVE, BAD_QUERY, BAD_SCALE, BAD_TOKENS, STEPS };

static uint32_t state = 1;

static float noise(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static void *zeros(size_t count, size_t size)
{
    void *p = calloc(count, size);
    if (p == NULL)
        exit(2);
    return p;
}

static float *floats(size_t count)
{
    float *x = zeros(count, sizeof *x);
    for (size_t k = 0; k < count; k++)
        x[k] = noise();
    return x;
}

struct constants {
    float signs[512], levels[256], centroids[256], thresholds[128];
    double *matrix;
};

static int64_t aligned(int64_t size) { return (size + 15) / 16 * 16; }

static void make_side(struct side *side, int bits, int dim, struct constants *c)
{
    const int half = 1 << (bits - 1);
    *side = (struct side){.bits = bits, .scale_mode = SCALE_UNBIASED, .unit = bits == 8 ? 0.03 : 0.05};
    side->rotation = dim & (dim - 1) ? ROTATION_DENSE : ROTATION_HADAMARD;
    for (int k = 0; k < 2 * half; k++) {
        float level = bits == 8 ? (float)(int8_t)k : (float)(k % half * 6 + 4) * (k < half ? 1 : -1);
        c->levels[k] = level;
        c->centroids[k] = (float)side->unit * level;
    }
    for (int k = 0; bits < 8 && k + 1 < half; k++)
        c->thresholds[k] = (c->centroids[k] + c->centroids[k + 1]) / 2;
    for (int d = 0; d < dim; d++)
        c->signs[d] = noise() < 0 ? -1.0f : 1.0f;
    c->matrix = zeros((size_t)(dim * dim), sizeof(double));
    for (int d = 0; d < dim; d++)
        c->matrix[d * dim + d] = 1.0;
    side->gain = 0.95;
    side->signs = c->signs, side->matrix = c->matrix;
    side->centroids = c->centroids, side->thresholds = c->thresholds, side->levels = c->levels;
}

static struct layer make_layer(int key_bits, int value_bits, int dim, int page, struct constants *c)
{
    struct layer layer = {.dim = dim, .heads = HEADS, .page_size = page, .centered = 1,
                          .mean_bits = page == 32 ? 8 : 16};
    make_side(&layer.key, key_bits, dim, &c[0]);
    make_side(&layer.value, value_bits, dim, &c[1]);
    int64_t end = 0;
    layer.key.codes = end, end = aligned(end + dim * key_bits * page / 8);
    layer.value.codes = end, end = aligned(end + dim * value_bits * page / 8);
    layer.key.scales = end, end = aligned(end + 2 * page);
    layer.value.scales = end, end = aligned(end + 2 * page);
    layer.mean = end, end = aligned(end + 2 * dim);
    layer.record_bytes = end;
    return layer;
}

/* Outputs of the portable code, which runs first; `seen` counts those compared or kept. */
static float *kept;
static size_t kept_count, seen, bad;

static void compare(const float *x, size_t count, int portable)
{
    if (portable) {
        kept = realloc(kept, (kept_count + count) * sizeof *kept);
        if (kept == NULL)
            exit(2);
        memcpy(kept + kept_count, x, count * sizeof *kept);
        kept_count += count;
    }
    for (size_t k = 0; k < count; k++) {
        const float expected = kept[seen + k];
        bad += !isfinite(expected);
        const float rounding = 0x1p-16f * fabsf(expected); /* 256 sums of numbers beyond any range */
        if (isfinite(expected) ? !(fabsf(x[k] - expected) < fmaxf(2e-4f, rounding)) : isfinite(x[k])) {
            fprintf(stderr, "%g instead of %g\n", x[k], expected);
            exit(1);
        }
    }
    seen += count;
}

static void check(int wrong, const char *what)
{
    if (wrong) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

/* What has no place in a cache, at some coordinates of a token or of a query. */
static void spoil(float *x, int dim)
{
    x[0] = NAN, x[1] = INFINITY, x[2] = -INFINITY;
    x[dim - 2] = x[dim - 1] = 3e38f;
}

/* Scales of a record, as a file may have them. */
static void spoil_scales(uint8_t *scales, const uint16_t *halves, int count)
{
    for (int k = 0; k < count; k++)
        memcpy(scales + 2 * (3 * k + 1), halves + k, 2);
}

/* One history: a long append, then short ones, with attention after each; `codes`: the ring has 8 bits. */
static void run(const char *isa, int key_bits, int value_bits, int dim, int page, int threads,
                int codes)
{
    struct constants constants[2];
    struct layer layer = make_layer(key_bits, value_bits, dim, page, constants);
    int32_t lengths[BATCH] = {0}, left_pad[BATCH] = {0, 3}, ring_read_from[BATCH] = {0};
    int32_t sink_counts[BATCH] = {0}, ring_rows[BATCH] = {1, 0}, exact[BATCH] = {0};
    const int steps[STEPS][BATCH] = {{700, 45}, {1, 1}, {5, 0}, {30, 64}, {1, 1}, {1, 1}, {1, 1},
                                     {1, 1}, {60, 40}};
    const int64_t most_pages = 900 / page + 1;
    int32_t *table = zeros((size_t)(BATCH * most_pages), sizeof *table);
    for (int k = 0; k < BATCH * most_pages; k++)
        table[k] = k;
    uint8_t *pages = zeros((size_t)(BATCH * most_pages * HEADS), (size_t)layer.record_bytes);
    void *exact_rows[4];
    for (int k = 0; k < 4; k++) { /* half bytes of an element: of a key in codes it has 3 of 2 */
        const int size = codes && k < 2 ? 3 - k : 8;
        exact_rows[k] = zeros((size_t)(BATCH * (k < 2 ? RING : SINKS) * HEADS * dim / 2), (size_t)size);
    }
    uint16_t *scales = codes ? zeros(BATCH * RING * HEADS * 2, sizeof *scales) : NULL;
    struct view view = {BATCH, pages, HEADS * layer.record_bytes, table, most_pages,
                        lengths, left_pad, ring_read_from, sink_counts, ring_rows,
                        exact_rows[0], exact_rows[1], exact_rows[2], exact_rows[3],
                        RING, SINKS, (dim / 16 + key_bits) % 3, scales};
    float *factors = key_bits > 4 ? NULL : floats((size_t)(HEADS * dim * dim));
    for (int k = 0; factors != NULL && k < HEADS * dim * dim; k++)
        factors[k] = k / dim % dim == k % dim ? 1.0f : 0.05f * factors[k];
    check(tightkv_use(isa), "this instruction set cannot run");
    for (int step = 0; step < STEPS; step++) {
        int32_t first[BATCH + 1] = {0, steps[step][0], steps[step][0] + steps[step][1]};
        const int64_t count = first[BATCH];
        float *key = floats((size_t)(count * HEADS * dim)), *value = floats((size_t)(count * HEADS * dim));
        struct tokens k = {key, HEADS * dim, dim}, v = {value, HEADS * dim, dim};
        for (int n = 0; step == BAD_TOKENS && n < first[1]; n += 7) /* of row 0 */
            spoil(key + n * HEADS * dim, dim), spoil(value + n * HEADS * dim, dim);
        for (int b = 0; b < BATCH; b++) {
            lengths[b] += steps[step][b];
            ring_read_from[b] = lengths[b] > RING ? (lengths[b] - RING + page - 1) / page * page : 0;
            sink_counts[b] = SINKS;
        }
        struct append_args append = {view, k, v, FLOAT32, first, exact, 1, threads, factors, 0, 0};
        check(tightkv_append(&layer, &append), "append failed");
        for (int b = 0; b < BATCH; b++)
            exact[b] = lengths[b] > RING ? lengths[b] - RING : 0;

        const int queries = step == MANY ? 9 : 1;
        int32_t rows[BATCH + 1] = {0, queries, 2 * queries};
        const int64_t total = 2 * queries, heads = HEADS * SHARE;
        float *query = floats((size_t)(total * heads * dim)), *out = floats((size_t)(total * heads * dim));
        float *lse = floats((size_t)(total * heads)), *mask = floats(900);
        for (int n = 0; n < 900; n++)
            mask[n] = n % 300 < 290 ? -85.0f : 0.0f; /* strips of weights that are hardly numbers */
        for (int d = 0; step == TINY && d < dim; d++)
            query[d] *= 1e-40f;
        if (step == BAD_QUERY)
            spoil(query, dim), query[(heads + 1) * dim] = INFINITY;
        if (step == NEGATIVE)
            spoil_scales(pages + layer.value.scales, (const uint16_t[]){0xcf80, 0xb800}, 2);
        if (step == BAD_SCALE) { /* of both heads of row 0 */
            spoil_scales(pages + layer.value.scales, (const uint16_t[]){0x7c00, 0xfc00}, 2);
            spoil_scales(pages + layer.record_bytes + layer.key.scales,
                         (const uint16_t[]){0x7e00, 0x7c00, 0xffff}, 3);
        }
        struct {
            struct attend_args args;
            int32_t lengths[BATCH], ring_read_from[BATCH];
        } call = {.lengths = {lengths[0], lengths[1]},
                  .ring_read_from = {ring_read_from[0], ring_read_from[1]}};
        call.args = (struct attend_args){.view = view, .query = {query, heads * dim, dim},
                                     .total = total, .heads = heads, .cu_seqlens = rows, .out = out,
                                     .lse = lse, .causal = 1, .window = step == WINDOW ? 50 : 0,
                                     .scale = 0.1, .softcap = step == CAPPED ? 5.0 : 0.0,
                                     .threads = threads, .mask = step == TINY ? mask : NULL,
                                     .mask_dtype = FLOAT32, .mask_token = 1};
        if (step % 2)
            call.args.view.lengths = NULL; /* they follow */
        bad = 0;
        check(tightkv_attend(&layer, &call.args), "attend failed");
        compare(out, (size_t)(total * heads * dim), strcmp(isa, "portable") == 0);
        compare(lse, (size_t)(total * heads), strcmp(isa, "portable") == 0);
        check((bad > 0) != (step >= BAD_QUERY), "numbers where none are due, or the reverse");
        check(bad >= (size_t)(total * heads * dim), "nothing but NaN");
        free(key), free(value), free(query), free(out), free(lse), free(mask);
    }
    free(factors);
    for (int k = 0; k < 4; k++)
        free(exact_rows[k]);
    free(scales), free(pages), free(table), free(constants[0].matrix), free(constants[1].matrix);
}

/* Numbers of each dtype in each other one; what is none stays none, what is too large does not. */
static void put_all(void)
{
    enum { COUNT = 70 };
    static const float some[] = {1.5f, -2.0f, 7e4f, -3.4e38f, INFINITY, -INFINITY, NAN};
    static const uint16_t bfloats[] = {0x3fc0, 0xc000, 0x4789, 0xff7f, 0x7f80, 0xff80, 0x7fc0};
    static const uint16_t halves[] = {0x3e00, 0xc000, 0x7bff, 0xfbff, 0x7bff, 0xfbff, 0x7e00};
    for (int from = FLOAT32; from <= BFLOAT16; from++) {
        uint8_t key[4 * COUNT], value[4 * COUNT];
        uint16_t to_key[COUNT], to_value[COUNT];
        for (int k = 0; k < COUNT; k++) {
            memcpy(key + (from == FLOAT32 ? 4 : 2) * k,
                   from == FLOAT32 ? (const void *)&some[k % 7] : (const void *)&bfloats[k % 7],
                   from == FLOAT32 ? 4 : 2);
        }
        memcpy(value, key, sizeof key);
        struct put_args args = {to_key, to_value, NULL, FLOAT16, key, value, from, COUNT, NULL};
        check(tightkv_put(&args), "memory");
        for (int k = 0; k < COUNT; k++)
            check(to_key[k] != halves[k % 7] || to_value[k] != halves[k % 7], "another half");
        /* two heads of 32, not rotated: what is infinite or none is finite first */
        const struct layer layer = {.dim = 32, .heads = 2};
        uint8_t key_codes[2 * 48], value_codes[2 * 32];
        uint16_t scales[4] = {0};
        args = (struct put_args){key_codes, value_codes, scales, FLOAT16, key, value, from, 64, &layer};
        check(tightkv_put(&args), "memory");
        for (int k = 0; k < 4; k++)
            check(scales[k] == 0 || scales[k] >= 0x7c00, "a scale that is none");
        check((int8_t)value_codes[2] != 127 || (int8_t)value_codes[3] != -127, "another code");
    }
}

static void run_all(const char *isa)
{
    static const int bits[] = {2, 3, 4, 8}, dims[] = {16, 64, 80, 128};
    seen = 0;
    state = 1;
    for (int k = 0; k < 4; k++)
        for (int d = 0; d < 4; d++)
            for (int codes = 0; codes < 1 + (k == d); codes++)
                run(isa, bits[k], bits[3 - k], dims[d], d % 2 ? 64 : 32, 1 + k % 2, codes);
    printf("%s\n", isa);
}

/* With the names of instruction sets, joined by commas, only those. */
int main(int count, char **arguments)
{
    char *names = strdup(count > 1 ? arguments[1] : tightkv_supported()), *rest = names;
    if (names == NULL)
        return 2;
    put_all();
    run_all("portable");
    for (char *isa = strtok_r(rest, ",", &rest); isa != NULL; isa = strtok_r(rest, ",", &rest))
        if (strcmp(isa, "portable") != 0)
            run_all(isa);
    free(kept), free(names);
    return 0;
}
