/* The step of a cache of fixed size: checks, counters, then append and attend. Rows are sealed as
   they fill pages, and read as sequences.py has it: sinks, pages, ring. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"
#include "static_cache.h"

#define DECODE_TOKENS 16 /* up to so many are appended first and read from the ring */
#define RING_SLACK 32    /* of layout.py: so many at once see the window of the first */
#define ANY (-1)

int refuse(const struct refusal *r, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(r->why, r->size, format, values);
    va_end(values);
    return -1;
}

/* --- operands --- */

static const char *dtype_name(int64_t dtype)
{
    static const char *const names[] = {"float32", "bfloat16", "float16", "bool", "int64", "uint8"};
    return dtype >= 0 && dtype < OTHER_DTYPE ? names[dtype] : "of another dtype";
}

static void write_shape(const int64_t *size, int64_t rank, char *to, size_t room)
{
    size_t used = 0;
    to[0] = 0;
    for (int64_t k = 0; k < rank && k < MOST_RANK && used < room; k++)
        used += (size_t)snprintf(to + used, room - used, size[k] == ANY ? "%sany" : "%s%lld",
                                 k ? ", " : "", (long long)size[k]);
}

static int is_empty(const struct operand *x)
{
    for (int64_t k = 0; k < x->rank; k++)
        if (x->size[k] == 0)
            return 1;
    return 0;
}

/* Rank, sizes (ANY: not looked at) and dtype (ANY: a float). */
static int expect(const struct refusal *r, const char *name, const struct operand *x, int64_t dtype,
                  int64_t rank, const int64_t *size)
{
    int wrong = x->rank != rank;
    for (int64_t k = 0; !wrong && k < rank; k++)
        wrong = size[k] != ANY && x->size[k] != size[k];
    if (wrong) {
        char got[128], wanted[128];
        write_shape(x->size, x->rank, got, sizeof got);
        write_shape(size, rank, wanted, sizeof wanted);
        return refuse(r, "%s has shape [%s]; expected [%s]", name, got, wanted);
    }
    if (dtype == ANY ? x->dtype < FLOAT32 || x->dtype > FLOAT16 : x->dtype != dtype)
        return refuse(r, "%s is %s; expected %s", name, dtype_name(x->dtype),
                      dtype == ANY ? "float32, bfloat16 or float16" : dtype_name(dtype));
    if (x->data == NULL && !is_empty(x)) /* a runtime that was given no memory for it */
        return refuse(r, "%s has no data", name);
    return 0;
}
#define EXPECT(r, name, x, dtype, ...) \
    expect(r, name, x, dtype, sizeof((int64_t[]){__VA_ARGS__}) / 8, (const int64_t[]){__VA_ARGS__})

static int64_t element_size(int64_t dtype)
{
    return dtype == INT64 ? 8 : dtype == UINT8 ? 1 : item_size(dtype);
}

static int expect_packed(const struct refusal *r, const char *name, const struct operand *x)
{
    int64_t step = 1;
    for (int64_t k = x->rank - 1; k >= 0 && !is_empty(x); k--) {
        if (x->size[k] > 1 && x->stride[k] != step)
            return refuse(r, "%s must be contiguous", name);
        step *= x->size[k];
    }
    if ((uintptr_t)x->data % (uintptr_t)element_size(x->dtype))
        return refuse(r, "%s lies at an odd address", name);
    return 0;
}

/* Elements of a head lie side by side. */
static int expect_rows(const struct refusal *r, const char *name, const struct operand *x)
{
    if (x->stride[3] != 1)
        return refuse(r, "%s must be contiguous in its last dimension", name);
    return 0;
}

static int is_given(const struct operand *x) { return x->rank >= 0; }

static int check_mask(const struct refusal *r, const struct static_args *a, int64_t tokens)
{
    const struct operand *x = &a->mask;
    if (EXPECT(r, "mask", x, x->dtype == BOOLEAN ? BOOLEAN : ANY, ANY, ANY, a->query.size[2], ANY))
        return -1;
    if ((x->size[0] != 1 && x->size[0] != a->query.size[0]) ||
        (x->size[1] != 1 && x->size[1] != a->query.size[1]))
        return refuse(r, "mask is for %lld rows and %lld heads; expected %lld or 1, %lld or 1",
                      (long long)x->size[0], (long long)x->size[1], (long long)a->query.size[0],
                      (long long)a->query.size[1]);
    if (x->size[3] < tokens)
        return refuse(r, "mask covers %lld tokens; the cache has %lld", (long long)x->size[3],
                      (long long)tokens);
    return 0;
}

static int check_numbers(const struct refusal *r, const struct static_args *a)
{
    if (!isfinite(a->scale))
        return refuse(r, "scale=%g; it must be finite", a->scale);
    if (!(a->softcap >= 0.0 && isfinite(a->softcap)))
        return refuse(r, "softcap=%g; it must be positive, or 0 for none", a->softcap);
    if (a->window < 0)
        return refuse(r, "window=%lld; it must be positive, or 0 for none", (long long)a->window);
    return 0;
}

/* Whether pages are never read, because the ring holds every token that a window shows. */
static int ring_alone(const struct static_args *a, const struct spec *s)
{
    return a->window > 0 && a->window - 1 <= (s->exact_pages - 1) * s->layer.page_size &&
           a->pages.rank == 4 && a->pages.size[1] == 0;
}

/* Full pages of max_tokens. */
static int64_t whole_pages(const struct spec *s) { return s->max_tokens / s->layer.page_size; }

/* The pages that can leave the window: the others have no codes to read. */
static int64_t read_pages(const struct spec *s)
{
    const int64_t size = s->layer.page_size;
    return most((s->max_tokens + size - 1) / size - s->exact_pages, 0);
}

/* Pages of the operand: those that are read, or up to all, as files of earlier versions have them. */
static int64_t pages_of(const struct static_args *a, const struct spec *s)
{
    const int64_t given = a->pages.rank == 4 ? a->pages.size[1] : 0;
    return ring_alone(a, s) ? 0 : least(most(given, read_pages(s)), whole_pages(s));
}

static int ring_has_codes(const struct static_args *a) { return a->ring.dtype == UINT8; }

/* New tokens are kept in the dtype of the sinks, or as codes of what that holds. */
static int check_exact(const struct refusal *r, const struct static_args *a, const struct spec *s,
                       int64_t batch)
{
    const int64_t heads = s->layer.heads, dim = s->layer.dim;
    if (ring_has_codes(a)
            ? EXPECT(r, "ring", &a->ring, UINT8, batch, s->ring, heads, dim * 5 / 2 + 4)
            : EXPECT(r, "ring", &a->ring, ANY, 2, batch, s->ring, heads, dim))
        return -1;
    if (EXPECT(r, "sinks", &a->sinks, ring_has_codes(a) ? ANY : a->ring.dtype, 2, batch, s->sinks,
               heads, dim) ||
        expect_packed(r, "ring", &a->ring) || expect_packed(r, "sinks", &a->sinks))
        return -1;
    if ((uintptr_t)a->ring.data % 2) /* its scales are float16 */
        return refuse(r, "ring lies at an odd address");
    return 0;
}

static int check_operands(const struct refusal *r, const struct static_args *a, struct spec *s)
{
    const struct operand *q = &a->query;
    if (EXPECT(r, "spec", &a->spec, INT64, ANY) || expect_packed(r, "spec", &a->spec) ||
        read_spec(r, &a->spec, s) || EXPECT(r, "query", q, ANY, ANY, ANY, ANY, s->layer.dim))
        return -1;
    const int64_t batch = q->size[0], heads = s->layer.heads, tokens = q->size[2];
    const int64_t dim = s->layer.dim, pages = pages_of(a, s);
    s->window_step = ring_has_codes(a) ? 1 : s->layer.page_size;
    if (batch < 1 || batch > INT32_MAX / most(pages, 1))
        return refuse(r, "query has %lld rows; allowed: 1 to %lld", (long long)batch,
                      (long long)(INT32_MAX / most(pages, 1)));
    if (q->size[1] < 1 || q->size[1] % heads)
        return refuse(r, "query has %lld heads; the cache has %lld: not a whole multiple",
                      (long long)q->size[1], (long long)heads);
    if (EXPECT(r, "key", &a->key, q->dtype, batch, heads, tokens, dim) ||
        EXPECT(r, "value", &a->value, q->dtype, batch, heads, tokens, dim) ||
        expect_rows(r, "query", q) || expect_rows(r, "key", &a->key) ||
        expect_rows(r, "value", &a->value) ||
        EXPECT(r, "position", &a->position, INT64, tokens) ||
        expect_packed(r, "position", &a->position) ||
        EXPECT(r, "pages", &a->pages, UINT8, batch, pages, heads, s->layer.record_bytes) ||
        expect_packed(r, "pages", &a->pages) ||
        check_exact(r, a, s, batch) ||
        EXPECT(r, "state", &a->state, INT64, batch, STATE_WORDS) ||
        expect_packed(r, "state", &a->state) ||
        EXPECT(r, "out", &a->out, q->dtype, batch, tokens, q->size[1], dim) ||
        expect_packed(r, "out", &a->out) || check_numbers(r, a))
        return -1;
    if (is_given(&a->left_pad) && (EXPECT(r, "left_pad", &a->left_pad, INT64, batch) ||
                                   expect_packed(r, "left_pad", &a->left_pad)))
        return -1;
    if (is_given(&a->feedback)) {
        if ((a->feedback.rank == 2
                 ? EXPECT(r, "feedback", &a->feedback, FLOAT32, heads, dim * (dim + 1) / 2)
                 : EXPECT(r, "feedback", &a->feedback, FLOAT32, heads, dim, dim)) ||
            expect_packed(r, "feedback", &a->feedback))
            return -1;
        if (s->layer.key.bits == 8)
            return refuse(r, "feedback is for keys of 2, 3 and 4 bits; these have 8");
    }
    return 0;
}

/* --- counters --- */

/* As sequences.py has them. */
struct row {
    int64_t length, exact, ring, sinks, start;
};

struct step {
    const struct static_args *args;
    struct spec spec;
    int64_t batch, count, start; /* new tokens of each row, the position of the first */
    struct operand key, value;   /* new tokens in the sinks' dtype */
    struct row *rows;
    int32_t *numbers, *table, *lengths, *left_pad, *ring_read_from, *sink_counts, *exact;
    int32_t *ids; /* [batch + 1]: row numbers; where rows of one token begin */
    float *lse;
};

static int check_row(const struct refusal *r, const struct spec *s, const struct row *row)
{
    const int64_t sealed = read_pages(s) * s->layer.page_size;
    if (row->length >= 0 && row->length <= s->max_tokens && row->exact >= 0 &&
        row->exact >= row->length - s->ring && row->exact <= row->ring &&
        row->ring <= least(row->length, sealed) && row->sinks >= 0 && row->sinks <= s->sinks &&
        row->start >= 0 && row->start <= s->max_tokens)
        return 0;
    return refuse(r, "state [%lld, %lld, %lld, %lld, %lld] is not one this operator wrote; begin "
                  "at position 0", (long long)row->length, (long long)row->exact,
                  (long long)row->ring, (long long)row->sinks, (long long)row->start);
}

/* The window of token `at`: its page and the ones before, or as many tokens up to it. */
static void set_window(const struct spec *s, struct row *row, int64_t at)
{
    const int64_t end = (at / s->window_step + 1) * s->window_step;
    row->ring = most(row->exact, end - s->exact_pages * s->layer.page_size);
}

static void crop(const struct spec *s, struct row *row, int64_t length)
{
    row->length = length;
    row->exact = least(row->exact, length);
    set_window(s, row, length - 1);
    row->sinks = least(row->sinks, most(length - row->start, 0));
}

static void grow(const struct spec *s, struct row *row, int64_t count)
{
    const int64_t old = row->length, now = old + count;
    row->length = now;
    row->exact = most(row->exact, now - s->ring);
    set_window(s, row, count <= RING_SLACK ? old : now - 1);
    if (most(old - row->start, 0) <= row->sinks) /* no gap before the new ones */
        row->sinks = most(row->sinks, least(now, row->start + s->sinks) - row->start);
}

static int read_position(const struct refusal *r, struct step *s)
{
    const int64_t *at = s->args->position.data;
    s->start = at[0];
    if (s->start < 0 || s->start > s->spec.max_tokens - s->count)
        return refuse(r, "%lld tokens from position %lld on; the cache has room for positions 0 to "
                      "%lld", (long long)s->count, (long long)s->start,
                      (long long)(s->spec.max_tokens - 1));
    for (int64_t k = 1; k < s->count; k++)
        if (at[k] != at[0] + k)
            return refuse(r, "position has %lld after %lld; positions must follow one another",
                          (long long)at[k], (long long)at[k - 1]);
    return 0;
}

static int read_rows(const struct refusal *r, struct step *s)
{
    const int64_t *state = s->args->state.data, *pads = s->args->left_pad.data;
    for (int64_t b = 0; b < s->batch; b++, state += STATE_WORDS) {
        struct row *row = &s->rows[b];
        const int padded = is_given(&s->args->left_pad);
        *row = (struct row){0};
        if (s->start > 0) {
            *row = (struct row){state[STATE_LENGTH], state[STATE_EXACT], state[STATE_RING],
                                state[STATE_SINKS], state[STATE_START]};
            if (check_row(r, &s->spec, row))
                return -1;
        } else if (padded) {
            row->start = pads[b];
        }
        if (row->start < 0 || row->start > s->spec.max_tokens || (padded && pads[b] != row->start))
            return refuse(r, "left_pad=%lld in row %lld; allowed: 0 to %lld, given with position 0 "
                          "and the same from then on", (long long)(padded ? pads[b] : row->start),
                          (long long)b, (long long)s->spec.max_tokens);
        if (s->start > row->length)
            return refuse(r, "position %lld; the cache ends at %lld: go on from there or from "
                          "before", (long long)s->start, (long long)row->length);
        if (s->start < row->length)
            crop(&s->spec, row, s->start);
        if (ring_alone(s->args, &s->spec) && row->ring > most(s->start - s->args->window + 1, 0))
            return refuse(r, "position %lld, where the ring has forgotten the tokens before %lld "
                          "of a window of %lld: begin at position 0", (long long)s->start,
                          (long long)row->ring, (long long)s->args->window);
    }
    return 0;
}

static void write_rows(const struct step *s)
{
    int64_t *state = s->args->state.data;
    for (int64_t b = 0; b < s->batch; b++, state += STATE_WORDS) {
        const struct row *row = &s->rows[b];
        state[STATE_LENGTH] = row->length, state[STATE_EXACT] = row->exact;
        state[STATE_RING] = row->ring, state[STATE_SINKS] = row->sinks;
        state[STATE_START] = row->start;
    }
}

/* --- the kernels --- */

/* Entries of a row of the block table, one for each page that is sealed. */
static int64_t table_stride(const struct step *s)
{
    return pages_of(s->args, &s->spec) ? whole_pages(&s->spec) : 0;
}

static int allocate(const struct refusal *r, struct step *s)
{
    const int64_t pages = pages_of(s->args, &s->spec);
    const size_t batch = (size_t)s->batch, table = batch * (size_t)table_stride(s);
    const size_t queries = (size_t)(s->batch * s->count * s->args->query.size[1]);
    s->rows = malloc(sizeof *s->rows * batch);
    s->numbers = malloc(sizeof *s->numbers * (table + 6 * batch + 1));
    s->lse = malloc(sizeof *s->lse * queries);
    if (s->rows == NULL || s->numbers == NULL || s->lse == NULL)
        return refuse(r, "out of memory");
    s->table = s->numbers, s->lengths = s->table + table, s->left_pad = s->lengths + batch;
    s->ring_read_from = s->left_pad + batch, s->sink_counts = s->ring_read_from + batch;
    s->exact = s->sink_counts + batch, s->ids = s->exact + batch;
    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t k = 0; k < table_stride(s); k++)
            s->table[b * table_stride(s) + k] = k < pages ? (int32_t)(b * pages + k) : -1;
    for (size_t b = 0; b <= batch; b++)
        s->ids[b] = (int32_t)b;
    return 0;
}

/* New tokens as they are kept: in the sinks' dtype, its largest number where they are beyond it. */
static int round_tokens(const struct refusal *r, const struct step *s, const struct operand *x,
                        struct operand *to)
{
    const int64_t heads = x->size[1], dim = x->size[3], dtype = s->args->sinks.dtype;
    const float top = dtype == FLOAT16 ? 65504.0f : 0x1.fep127f; /* the largest bfloat16 */
    *to = *x;
    if (x->dtype == dtype)
        return 0;
    to->dtype = dtype;
    to->stride[0] = s->count * heads * dim, to->stride[1] = dim, to->stride[2] = heads * dim;
    to->data = malloc((size_t)(s->batch * to->stride[0] * item_size(dtype)));
    if (to->data == NULL)
        return refuse(r, "out of memory");
    uint8_t *at = to->data;
    float row[dim];
    for (int64_t n = 0; n < s->batch * s->count * heads; n++, at += dim * item_size(dtype)) {
        const int64_t b = n / heads / s->count, token = n / heads % s->count;
        const int64_t from = b * x->stride[0] + n % heads * x->stride[1] + token * x->stride[2];
        read_floats((const uint8_t *)x->data + from * item_size(x->dtype), x->dtype, (int)dim, row);
        for (int64_t d = 0; dtype != FLOAT32 && d < dim; d++)
            row[d] = row[d] > top ? top : row[d] < -top ? -top : row[d];
        write_floats(row, dtype, (int)dim, at);
    }
    return 0;
}

static void release(const struct step *s)
{
    if (s->key.data != s->args->key.data)
        free(s->key.data);
    if (s->value.data != s->args->value.data)
        free(s->value.data);
    free(s->rows);
    free(s->numbers);
    free(s->lse);
}

static void set_numbers(const struct step *s)
{
    for (int64_t b = 0; b < s->batch; b++) {
        const struct row *row = &s->rows[b];
        s->lengths[b] = (int32_t)row->length, s->left_pad[b] = (int32_t)row->start;
        s->ring_read_from[b] = (int32_t)row->ring, s->sink_counts[b] = (int32_t)row->sinks;
    }
}

/* Rows from `b` on. */
static struct view view_of(const struct step *s, int64_t b, int64_t rows)
{
    const struct layer *layer = &s->spec.layer;
    const int64_t numbers = layer->heads * layer->dim, codes = ring_has_codes(s->args);
    const int64_t token = numbers * item_size(s->args->sinks.dtype);
    const int64_t pages = pages_of(s->args, &s->spec), slots = s->batch * s->spec.ring;
    uint8_t *ring = s->args->ring.data, *sinks = s->args->sinks.data;
    uint8_t *values = ring + slots * (codes ? numbers * 3 / 2 : token);
    return (struct view){
        .batch = rows, .pages = pages ? s->args->pages.data : NULL,
        .page_bytes = layer->heads * layer->record_bytes,
        .block_table = s->table + b * table_stride(s), .block_stride = table_stride(s),
        .lengths = s->lengths + b, .left_pad = s->left_pad + b, .ring_read_from = s->ring_read_from + b,
        .sink_counts = s->sink_counts + b, .ring_rows = s->ids + b,
        .ring_key = ring, .ring_value = values,
        .sink_key = sinks,
        .sink_value = s->spec.sinks ? sinks + s->batch * s->spec.sinks * token : sinks,
        .ring = s->spec.ring, .sinks = s->spec.sinks, .dtype = s->args->sinks.dtype,
        .ring_scales = codes ? (uint16_t *)(values + slots * numbers) : NULL,
    };
}

/* Tokens from `skip` on of rows from `b` on. Several rows have one token each. */
static struct tokens tokens_of(const struct step *s, const struct operand *x, int64_t b,
                               int64_t skip)
{
    const int64_t at = b * x->stride[0] + skip * x->stride[2];
    return (struct tokens){(const uint8_t *)x->data + at * item_size(x->dtype),
                           s->count == 1 ? x->stride[0] : x->stride[2], x->stride[1]};
}

static int append_rows(const struct step *s, int64_t b, int64_t rows, const int32_t *cu_seqlens)
{
    const struct static_args *a = s->args;
    const struct append_args args = {
        .view = view_of(s, b, rows), .key = tokens_of(s, &s->key, b, 0),
        .value = tokens_of(s, &s->value, b, 0), .dtype = s->key.dtype, .cu_seqlens = cu_seqlens,
        .ring_valid_from = s->exact + b, .threads = a->threads,
        .feedback = is_given(&a->feedback) ? a->feedback.data : NULL,
        .feedback_packed = a->feedback.rank == 2,
    };
    return tightkv_append(&s->spec.layer, &args);
}

/* `fresh`: the new tokens are not in the cache yet. The first `skip` queries see nothing. */
static int attend_rows(const struct step *s, int64_t b, int64_t rows, const int32_t *cu_seqlens,
                       int fresh, int64_t skip)
{
    const struct static_args *a = s->args;
    const struct operand *mask = &a->mask;
    const int64_t heads = a->query.size[1], dim = s->spec.layer.dim;
    const int64_t at = (b * s->count + skip) * heads;
    struct attend_args args = {
        .view = view_of(s, b, rows), .query = tokens_of(s, &a->query, b, skip),
        .dtype = a->query.dtype, .new_dtype = a->key.dtype, .total = cu_seqlens[rows], .heads = heads,
        .cu_seqlens = cu_seqlens, .out = (uint8_t *)a->out.data + at * dim * item_size(a->out.dtype),
        .lse = s->lse + at, .causal = a->causal, .window = a->window, .scale = a->scale,
        .softcap = a->softcap, .threads = a->threads,
    };
    if (fresh) {
        args.new_key = tokens_of(s, &a->key, b, skip);
        args.new_value = tokens_of(s, &a->value, b, skip);
    }
    if (is_given(mask)) {
        args.mask_dtype = mask->dtype;
        args.mask_batch = mask->size[0] > 1 ? mask->stride[0] : 0;
        args.mask_head = mask->size[1] > 1 ? mask->stride[1] : 0;
        args.mask_query = mask->stride[2], args.mask_token = mask->stride[3];
        args.mask = (const uint8_t *)mask->data +
                    (b * args.mask_batch + skip * args.mask_query) * item_size(mask->dtype);
    }
    return tightkv_attend(&s->spec.layer, &args);
}

/* A few tokens are appended and read back, as the newest of the ring. */
static int decode(const struct step *s)
{
    const int64_t rows = s->count == 1 ? s->batch : 1;
    const int32_t one[2] = {0, (int32_t)s->count}, *cu_seqlens = rows == 1 ? one : s->ids;
    int failed = 0;
    set_numbers(s);
    for (int64_t b = 0; !failed && b < s->batch; b += rows)
        failed = append_rows(s, b, rows, cu_seqlens) || attend_rows(s, b, rows, cu_seqlens, 0, 0);
    return failed;
}

/* Many tokens, or the first: attend to the cache as it is and to them, exactly, then append. */
static int prefill(const struct step *s)
{
    const struct static_args *a = s->args;
    const int64_t row_bytes = a->query.size[1] * s->spec.layer.dim * item_size(a->out.dtype);
    int failed = 0;
    for (int64_t b = 0; !failed && b < s->batch; b++) {
        struct row *row = &s->rows[b];
        /* padding that comes with this call */
        const int64_t skip = least(most(row->start - row->length, 0), s->count);
        const int32_t seen[2] = {0, (int32_t)(s->count - skip)}, all[2] = {0, (int32_t)s->count};
        memset((uint8_t *)a->out.data + b * s->count * row_bytes, 0, (size_t)(skip * row_bytes));
        set_numbers(s);
        s->lengths[b] += (int32_t)skip; /* nothing before it is seen: it is padding too */
        failed = attend_rows(s, b, 1, seen, 1, skip);
        if (failed)
            break;
        grow(&s->spec, row, s->count);
        set_numbers(s);
        failed = append_rows(s, b, 1, all);
    }
    return failed;
}

static int run(const struct refusal *r, struct step *s)
{
    int failed;
    if (read_position(r, s) ||
        (is_given(&s->args->mask) && check_mask(r, s->args, s->start + s->count)) ||
        allocate(r, s) || read_rows(r, s) || round_tokens(r, s, &s->args->key, &s->key) ||
        round_tokens(r, s, &s->args->value, &s->value))
        return -1;
    for (int64_t b = 0; b < s->batch; b++)
        s->exact[b] = (int32_t)s->rows[b].exact;
    if (s->start > 0 && s->count <= DECODE_TOKENS) {
        for (int64_t b = 0; b < s->batch; b++)
            grow(&s->spec, &s->rows[b], s->count);
        failed = decode(s);
    } else {
        failed = prefill(s);
    }
    if (failed)
        return refuse(r, "out of memory; begin at position 0");
    write_rows(s);
    return 0;
}

int tightkv_static_attention(const struct static_args *args, char *why, size_t size)
{
    const struct refusal refusal = {why, size};
    struct step step = {.args = args};
    if (check_operands(&refusal, args, &step.spec))
        return -1;
    step.batch = args->query.size[0], step.count = args->query.size[2];
    if (step.count == 0)
        return 0;
    const int result = run(&refusal, &step);
    release(&step);
    return result;
}
