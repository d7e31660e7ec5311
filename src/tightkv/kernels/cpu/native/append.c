/* append: seal the pages that new tokens complete, then fill open page, ring and sinks. */
#include <math.h>
#include <stdlib.h>

#include "encode.h"

struct sealing {
    int64_t sequence, index; /* page number within the sequence */
};

struct call {
    const struct layer *layer;
    const struct append_args *args;
    struct sealing *pages;
    int64_t sealed; /* tasks [0, sealed) seal a page of a head; the others store open tokens */
};

/* What a thread works in. */
struct scratch {
    float *key, *row, *mean; /* [page_size][dim], 2 x [dim], [dim] */
    float *feedback;         /* [4][dim] */
    uint8_t *codes;          /* [2][dim] */
    uint8_t *exact;          /* a token as a ring of codes has it */
    void *all;
};

static void *open_scratch(void *context)
{
    const struct layer *layer = ((const struct call *)context)->layer;
    const size_t dim = (size_t)layer->dim;
    struct scratch *s = malloc(sizeof *s);
    float *at = s == NULL ? NULL : malloc(((size_t)layer->page_size + 8) * dim * sizeof(float));
    if (at == NULL) {
        free(s);
        return NULL;
    }
    s->all = at;
    s->key = at, at += layer->page_size * layer->dim;
    s->row = at, at += 2 * dim;
    s->mean = at, at += dim;
    s->feedback = at, at += 4 * dim;
    s->codes = (uint8_t *)at;
    s->exact = s->codes + 2 * dim;
    return s;
}

static void close_scratch(void *own)
{
    struct scratch *s = own;
    free(s->all);
    free(s);
}

/* New tokens of a sequence; none if it is shorter than they are (an engine's dry run). */
static int64_t count_of(const struct append_args *a, int64_t sequence)
{
    const int64_t count = a->cu_seqlens[sequence + 1] - a->cu_seqlens[sequence];
    return count > a->view.lengths[sequence] ? 0 : count;
}

static int64_t length_before(const struct append_args *a, int64_t sequence)
{
    return a->view.lengths[sequence] - count_of(a, sequence);
}

/* NaN as 0, infinities as the largest float16. */
static void make_finite(float *x, int dim)
{
    for (int d = 0; d < dim; d++) {
        uint32_t size = to_bits(x[d]) & 0x7fffffffu;
        if (size >= 0x7f800000u)
            x[d] = size > 0x7f800000u ? 0.0f : x[d] > 0.0f ? 65504.0f : -65504.0f;
    }
}

/* The place of a head's token in a ring of codes: the bytes, and the scale by `scale`. */
static uint8_t *code_place(const struct call *call, int value, int64_t b, int64_t head, int64_t at,
                           uint16_t **scale)
{
    const struct view *v = &call->args->view;
    const int64_t slot = v->ring_rows[b] * v->ring + at % v->ring;
    const int64_t item = slot * call->layer->heads + head, dim = call->layer->dim;
    *scale = v->ring_scales + 2 * item + value;
    return (uint8_t *)(value ? v->ring_value : v->ring_key) + item * (value ? dim : dim * 3 / 2);
}

/* Token `at` of a sequence, exact, as the new tokens' dtype has it: new, or from the ring. */
static void read_exact(const struct call *call, int value, int64_t b, int64_t head, int64_t at,
                       float *to)
{
    const struct append_args *a = call->args;
    const struct view *v = &a->view;
    const int dim = (int)call->layer->dim;
    const int64_t fresh = at - length_before(a, b);
    if (fresh >= 0) {
        struct tokens from = value ? a->value : a->key;
        read_floats(token_at(from, a->dtype, a->cu_seqlens[b] + fresh, head), a->dtype, dim, to);
    } else {
        const uint8_t *ring = value ? v->ring_value : v->ring_key;
        int64_t slot = v->ring_rows[b] * v->ring + at % v->ring;
        int64_t item = (slot * call->layer->heads + head) * dim;
        read_floats(ring + item * item_size(v->dtype), v->dtype, dim, to);
        for (int d = 0; a->dtype != v->dtype && d < dim; d++) {
            uint8_t rounded[4];
            write_floats(to + d, a->dtype, 1, rounded);
            read_floats(rounded, a->dtype, 1, to + d);
        }
    }
    make_finite(to, dim);
}

/* Token `at` in the frame of pages, as it is coded: with a ring of codes, rounded to them. */
static void read_rotated(const struct call *call, struct scratch *s, int value, int64_t b,
                         int64_t head, int64_t at, float *to)
{
    const struct layer *layer = call->layer;
    const struct view *v = &call->args->view;
    const int dim = (int)layer->dim;
    const uint8_t *codes = s->exact;
    uint16_t scale, *place;
    if (v->ring_scales != NULL && at < length_before(call->args, b)) {
        codes = code_place(call, value, b, head, at, &place);
        scale = *place;
    } else {
        read_exact(call, value, b, head, at, s->row);
        rotate(value ? &layer->value : &layer->key, dim, s->row, to);
        if (v->ring_scales == NULL)
            return;
        scale = encode_exact(value, dim, to, s->exact);
    }
    read_codes(codes, value, dim, to);
    const float step = half_to_float(scale);
    for (int d = 0; d < dim; d++)
        to[d] *= step;
}

static uint8_t *record_of(const struct call *call, int64_t page, int64_t head)
{
    const struct view *v = &call->args->view;
    return v->pages + page * v->page_bytes + head * call->layer->record_bytes;
}

/* --- the mean --- */

/* Sums of sixteen tokens, then their sum: the order of torch's own sum. */
static void mean_of(const float *y, int64_t from, int64_t to, int dim, float *sum, float *mean)
{
    memset(mean, 0, sizeof(float) * (size_t)dim);
    for (int64_t t = 0; t < to; t += 16) {
        memset(sum, 0, sizeof(float) * (size_t)dim);
        for (int64_t u = most(t, from); u < t + 16; u++)
            for (int d = 0; d < dim; d++)
                sum[d] += y[u * dim + d];
        for (int d = 0; d < dim; d++)
            mean[d] += sum[d];
    }
    const float count = (float)most(to - from, 1);
    for (int d = 0; d < dim; d++)
        mean[d] /= count;
}

/* --- sealing --- */

static float square(int dim, const float *x)
{
    double sum = 0.0;
    for (int d = 0; d < dim; d++)
        sum += (double)x[d] * x[d];
    return (float)sum;
}

static void seal_keys(const struct call *call, struct scratch *s, int64_t b, int64_t index,
                      int64_t head, uint8_t *record, int64_t keep)
{
    const struct layer *layer = call->layer;
    const int64_t size = layer->page_size;
    const int dim = (int)layer->dim;
    const float *factors = call->args->feedback;
    const int packed = call->args->feedback_packed != 0;
    if (factors != NULL)
        factors += head * dim * (packed ? dim + 1 : 2 * dim) / 2;
    for (int64_t t = layer->centered && keep == 0 ? 0 : keep; t < size; t++) {
        read_rotated(call, s, 0, b, head, index * size + t, s->key + t * dim);
    }
    if (layer->centered && keep == 0) {
        int64_t pad = least(most(call->args->view.left_pad[b] - index * size, 0), size);
        mean_of(s->key, pad, size, dim, s->row, s->mean);
        write_mean(layer, record, s->mean);
    }
    if (layer->centered)
        read_mean(layer, record, s->mean);
    for (int64_t t = keep; t < size; t++) {
        float *y = s->key + t * dim;
        uint16_t flag = 0;
        if (layer->centered) {
            for (int d = 0; d < dim; d++)
                s->row[d] = y[d] - s->mean[d];
            if (square(dim, s->row) < square(dim, y))
                y = s->row, flag = 0x8000;
        }
        uint16_t scale = factors == NULL
            ? encode_vector(&layer->key, dim, y, s->codes)
            : encode_with_feedback(&layer->key, dim, y, factors, packed, s->feedback, s->codes);
        scale ^= flag;
        pack_key((int)layer->key.bits, dim, (int)t, s->codes, record + layer->key.codes);
        memcpy(scale_at(record + layer->key.scales, (int)t), &scale, 2);
    }
}

static void encode_value(const struct call *call, struct scratch *s, int64_t b, int64_t head,
                         int64_t at, uint8_t *record, int offset)
{
    const struct layer *layer = call->layer;
    const int dim = (int)layer->dim;
    read_rotated(call, s, 1, b, head, at, s->row + dim);
    uint16_t scale = encode_vector(&layer->value, dim, s->row + dim, s->codes + offset % 2 * dim);
    memcpy(scale_at(record + layer->value.scales, offset), &scale, 2);
}

static void seal_values(const struct call *call, struct scratch *s, int64_t b, int64_t index,
                        int64_t head, uint8_t *record, int64_t keep)
{
    const struct layer *layer = call->layer;
    const int dim = (int)layer->dim, bits = (int)layer->value.bits;
    uint8_t *plane = record + layer->value.codes;
    for (int t = (int)(keep / 2 * 2); t < layer->page_size; t += 2) {
        if (t < keep)
            unpack_values(bits, dim, t / 2, plane, s->codes);
        for (int u = t < keep ? t + 1 : t; u < t + 2; u++)
            encode_value(call, s, b, head, index * layer->page_size + u, record, u);
        pack_values(bits, dim, t / 2, s->codes, plane);
    }
}

static void seal(const struct call *call, struct scratch *s, const struct sealing *page,
                 int64_t head)
{
    const struct append_args *a = call->args;
    const int64_t b = page->sequence, size = call->layer->page_size;
    const int64_t id = a->view.block_table[b * a->view.block_stride + page->index];
    const int64_t keep = least(most(a->ring_valid_from[b] - page->index * size, 0), size);
    if (id < 0) /* nobody will read it */
        return;
    uint8_t *record = record_of(call, id, head);
    seal_keys(call, s, b, page->index, head, record, keep);
    seal_values(call, s, b, page->index, head, record, keep);
}

/* --- open pages --- */

/* New tokens of the sequence's unfinished page, uncentered. */
static void store_open(const struct call *call, struct scratch *s, int64_t b, int64_t head)
{
    const struct layer *layer = call->layer;
    const struct append_args *a = call->args;
    const int64_t length = a->view.lengths[b], size = layer->page_size;
    const int dim = (int)layer->dim, bits = (int)layer->value.bits;
    const int64_t from = most(length_before(a, b), length / size * size);
    if (from >= length)
        return;
    const int64_t id = a->view.block_table[b * a->view.block_stride + length / size];
    if (id < 0)
        return;
    uint8_t *record = record_of(call, id, head), *plane = record + layer->value.codes;
    for (int64_t at = from; at < length; at++) {
        int offset = (int)(at % size);
        read_rotated(call, s, 0, b, head, at, s->mean);
        uint16_t scale = encode_vector(&layer->key, dim, s->mean, s->codes);
        pack_key((int)layer->key.bits, dim, offset, s->codes, record + layer->key.codes);
        memcpy(scale_at(record + layer->key.scales, offset), &scale, 2);
        unpack_values(bits, dim, offset / 2, plane, s->codes);
        encode_value(call, s, b, head, at, record, offset);
        pack_values(bits, dim, offset / 2, s->codes, plane);
    }
}

static void run_task(void *context, void *own, int64_t task)
{
    const struct call *call = context;
    const int64_t heads = call->layer->heads;
    if (task < call->sealed)
        seal(call, own, &call->pages[task / heads], task % heads);
    else
        store_open(call, own, (task - call->sealed) / heads, (task - call->sealed) % heads);
}

/* --- exact copies --- */

static void copy_token(const struct call *call, int64_t token, void *key, void *value, int64_t slot)
{
    const struct append_args *a = call->args;
    const int64_t heads = call->layer->heads, dim = call->layer->dim;
    const int size = item_size(a->view.dtype);
    for (int64_t head = 0; head < heads; head++) {
        uint8_t *to[2] = {key, value};
        for (int side = 0; side < 2; side++) {
            const void *from = token_at(side ? a->value : a->key, a->dtype, token, head);
            uint8_t *at = to[side] + (slot * heads + head) * dim * size;
            if (a->dtype == a->view.dtype) {
                memcpy(at, from, (size_t)(dim * size));
                continue;
            }
            for (int64_t d = 0; d < dim; d++) {
                float x;
                read_floats((const uint8_t *)from + d * item_size(a->dtype), a->dtype, 1, &x);
                write_floats(&x, a->view.dtype, 1, at + d * size);
            }
        }
    }
}

static void put(void *to, int64_t to_dtype, const void *from, int64_t dtype, int64_t count)
{
    const int64_t at_once = 64;
    const float largest = to_dtype == FLOAT16 ? 65504.0f : from_bits(0x7f7f0000u);
    float x[64];
    if (to_dtype == dtype) {
        memcpy(to, from, (size_t)(count * item_size(to_dtype)));
        return;
    }
    for (int64_t k = 0; k < count; k += at_once) {
        const int here = (int)least(count - k, at_once);
        read_floats((const uint8_t *)from + k * item_size(dtype), dtype, here, x);
        for (int d = 0; (to_dtype == FLOAT16 || dtype == FLOAT32) && d < here; d++) {
            x[d] = x[d] > largest ? largest : x[d]; /* NaN stays */
            x[d] = x[d] < -largest ? -largest : x[d];
        }
        write_floats(x, to_dtype, here, (uint8_t *)to + k * item_size(to_dtype));
    }
}

/* The codes of a token, as `fill_codes` stores them, from memory for [2][dim] floats. */
static void put_codes(const struct put_args *a, int value, float *x)
{
    const struct layer *layer = a->layer;
    const int dim = (int)layer->dim;
    const uint8_t *from = value ? a->value : a->key;
    uint8_t *to = value ? a->to_value : a->to_key, *rounded = (uint8_t *)(x + dim);
    for (int64_t head = 0; head < layer->heads; head++) {
        put(rounded, a->to_dtype, from + head * dim * item_size(a->dtype), a->dtype, dim);
        read_floats(rounded, a->to_dtype, dim, x);
        make_finite(x, dim);
        rotate(value ? &layer->value : &layer->key, dim, x, x + dim);
        a->to_scales[2 * head + value] =
            encode_exact(value, dim, x + dim, to + head * (value ? dim : dim * 3 / 2));
    }
}

int tightkv_put(const struct put_args *a)
{
    if (a->to_scales == NULL) {
        put(a->to_key, a->to_dtype, a->key, a->dtype, a->count);
        put(a->to_value, a->to_dtype, a->value, a->dtype, a->count);
        return 0;
    }
    float *scratch = malloc(2 * (size_t)a->layer->dim * sizeof *scratch);
    if (scratch == NULL)
        return -1;
    put_codes(a, 0, scratch);
    put_codes(a, 1, scratch);
    free(scratch);
    return 0;
}

static void fill_exact(const struct call *call)
{
    const struct append_args *a = call->args;
    const struct view *v = &a->view;
    for (int64_t b = 0; b < v->batch; b++) {
        const int64_t before = length_before(a, b), start = v->left_pad[b], owner = v->ring_rows[b];
        for (int64_t at = before; at < v->lengths[b]; at++) {
            int64_t token = a->cu_seqlens[b] + at - before;
            if (at >= v->lengths[b] - v->ring && v->ring_scales == NULL)
                copy_token(call, token, v->ring_key, v->ring_value, owner * v->ring + at % v->ring);
            if (at >= start && at < start + v->sinks)
                copy_token(call, token, v->sink_key, v->sink_value, owner * v->sinks + at - start);
        }
    }
}

/* New tokens of a sequence and head into a ring of codes. */
static void fill_codes(void *context, void *own, int64_t task)
{
    const struct call *call = context;
    const struct view *v = &call->args->view;
    struct scratch *s = own;
    const int64_t heads = call->layer->heads, b = task / heads, head = task % heads;
    const int dim = (int)call->layer->dim;
    const int64_t from = most(length_before(call->args, b), v->lengths[b] - v->ring);
    for (int64_t at = from; at < v->lengths[b]; at++)
        for (int value = 0; value < 2; value++) {
            uint16_t *scale;
            uint8_t *place = code_place(call, value, b, head, at, &scale);
            read_exact(call, value, b, head, at, s->row);
            rotate(value ? &call->layer->value : &call->layer->key, dim, s->row, s->mean);
            *scale = encode_exact(value, dim, s->mean, place);
        }
}

/* Pages of a sequence of so many tokens that are sealed. */
static int64_t sealed_of(const struct call *call, int64_t length)
{
    return most(length - call->args->lag, 0) / call->layer->page_size;
}

int tightkv_append(const struct layer *layer, const struct append_args *args)
{
    struct call call = {.layer = layer, .args = args};
    const int64_t batch = args->view.batch;
    int64_t count = 0;
    int result = 0;
    for (int64_t b = 0; b < batch && args->view.pages != NULL; b++)
        count += sealed_of(&call, args->view.lengths[b]) - sealed_of(&call, length_before(args, b));
    if (count > 0 && (call.pages = malloc(sizeof *call.pages * (size_t)count)) == NULL)
        return -1;
    struct sealing *next = call.pages;
    for (int64_t b = 0; count > 0 && b < batch; b++)
        for (int64_t i = sealed_of(&call, length_before(args, b));
             i < sealed_of(&call, args->view.lengths[b]); i++)
            *next++ = (struct sealing){b, i};
    call.sealed = count * layer->heads;
    struct work work = {run_task, open_scratch, close_scratch, &call, call.sealed};
    if (args->encode_partial_page)
        work.tasks += batch * layer->heads;
    if (work.tasks > 0)
        result = run_tasks(&work, args->threads);
    if (result == 0)
        fill_exact(&call);
    work.body = fill_codes, work.tasks = batch * layer->heads; /* sealing has read the ring */
    if (result == 0 && args->view.ring_scales != NULL)
        result = run_tasks(&work, args->threads);
    free(call.pages);
    return result;
}
