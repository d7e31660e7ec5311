/* attend: an online softmax over blocks of 32 tokens, exact ones and compressed ones.

   The (query, head) pairs that share a key head are cut into groups of at most ROWS; a group is
   one unit of output. Where there are few groups, the pages of each are cut into splits that
   different threads work on; the last one to finish merges their states. How things are cut depends
   on the shapes alone, so results do not change with the number of threads. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "encode.h"
#include "key_block.h"

#define WANTED_TASKS 64
#define LEAST_BLOCKS 16 /* of a split */
#define LINE 64 /* bytes: vectors do not cross a line of the processor's caches */
#define NEAR 1024 /* bytes between values that many rows read where they are */

/* Softmax-weighted sums over some tokens, relative to e^peak. */
struct state {
    float *peak, *weight; /* [rows] */
    float *sums;          /* [rows][dim], in the pages' frame or in the exact tokens' */
};

struct group {
    int64_t sequence, head;  /* of keys */
    int64_t row, rows;       /* its pairs: query * (heads / key heads) + head within */
    int64_t begin, end;      /* tokens read from pages */
    int64_t num_splits;      /* of the pages */
    int64_t first_state;     /* in `states`, the exact tokens' comes first; -1: not shared */
    _Atomic int64_t to_do;
};

struct task {
    int64_t group, split; /* split 0 is the exact tokens, -1 everything; the last one, after those of
                             pages, is a ring of codes where there is one */
};

struct call {
    const struct layer *layer;
    const struct attend_args *args;
    const struct ops *ops;
    const struct dots *dots;
    struct book key_book, value_book;
    float key_factor, value_factor; /* level * scale * factor is a coordinate */
    int key_groups, *key_order;     /* of 8 codes; the dim of each */
    int64_t group_size;             /* query heads of a key head */
    int64_t widest;                 /* rows of a group */
    struct group *groups;
    struct task *tasks;
    float *states;
};

/* What a thread works in. */
struct scratch {
    float *query;  /* [rows][dim], scaled */
    float *keys;   /* [dim up to a multiple of 32][BLOCK], or [BLOCK][dim] */
    float *values; /* [BLOCK][dim] */
    float *row;    /* 4 x [dim] */
    struct state own[2];
    uint8_t *work;       /* a block's codes */
    int8_t *query_bytes; /* [DOT_ROWS][groups of 8 dims][16], in the order of the codes */
    float *all;
    int64_t query_at[ROWS];
    float shift[ROWS], top[ROWS];
    struct numbers query_numbers[DOT_ROWS], weight_numbers[DOT_ROWS];
    _Alignas(LINE) float scores[ROWS * STRIP * BLOCK];
    _Alignas(LINE) int8_t weight_bytes[DOT_ROWS * STRIP * BLOCK * 2];
    /* of the strip at hand */
    _Alignas(LINE) float value_factor[STRIP * BLOCK];
    const uint8_t *value_codes[STRIP], *next_keys[STRIP];
    /* of the block at hand */
    _Alignas(LINE) float key_factor[BLOCK], centered[BLOCK];
    int64_t position[BLOCK]; /* -1: no token */
    /* of exact tokens: the strip's and the block's */
    const uint8_t *values_at[STRIP * BLOCK], *keys_at[BLOCK];
    uint8_t dtypes[STRIP * BLOCK];
    int far_apart; /* values are in too many pages of memory for the TLB */
    float *zeros;  /* [dim] */
};

static struct state state_in(float *at, int64_t rows, int64_t dim)
{
    return (struct state){at + rows * dim, at + rows * (dim + 1), at};
}

/* Of a state of the widest group, in whole lines. */
static int64_t state_floats(const struct call *call)
{
    return (call->widest * (call->layer->dim + 2) + LINE / 4 - 1) / (LINE / 4) * (LINE / 4);
}

/* Memory that begins with a line. */
static void *lines(size_t bytes) { return aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE); }

static void *open_scratch(void *context)
{
    const struct call *call = context;
    const size_t dim = (size_t)call->layer->dim, padded = (dim + 31) / 32 * 32;
    const size_t rows = (size_t)call->widest, state = (size_t)state_floats(call);
    const size_t floats = rows * dim + padded * BLOCK + BLOCK * dim + 5 * dim + 2 * state +
                          padded * BLOCK / 4 + DOT_ROWS * padded / 2;
    struct scratch *s = lines(sizeof *s);
    float *at = s == NULL ? NULL : lines(floats * sizeof(float));
    if (at == NULL) {
        free(s);
        return NULL;
    }
    s->all = at;
    s->keys = at, at += padded * BLOCK;
    s->values = at, at += BLOCK * dim;
    s->query = at, at += rows * dim;
    s->row = at, at += 4 * dim;
    s->zeros = at, at += dim;
    memset(s->zeros, 0, sizeof(float) * dim);
    s->own[0] = state_in(at, call->widest, call->layer->dim), at += state;
    s->own[1] = state_in(at, call->widest, call->layer->dim), at += state;
    s->work = (uint8_t *)at, at += padded * BLOCK / 4;
    s->query_bytes = (int8_t *)at;
    return s;
}

static void close_scratch(void *own)
{
    struct scratch *s = own;
    free(s->all);
    free(s);
}

static void make_book(const struct side *side, struct book *book)
{
    book->bits = (int)side->bits;
    for (int k = 0; k < 16 && side->bits < 8; k++) {
        book->level[k] = side->levels[k % (1 << side->bits)];
        book->high[k] = (uint8_t)(to_bits(book->level[k]) >> 24);
        book->low[k] = (uint8_t)(to_bits(book->level[k]) >> 16);
        book->byte[k] = (int8_t)book->level[k];
    }
}

/* --- queries --- */

static int64_t count_of(const struct attend_args *a, int64_t sequence)
{
    return a->cu_seqlens[sequence + 1] - a->cu_seqlens[sequence];
}

/* Position of a sequence's query 0; its tokens are the last ones, or follow the cache. */
static int64_t first_position(const struct attend_args *a, int64_t sequence)
{
    int64_t length = a->view.lengths[sequence];
    return a->new_key.data != NULL ? length : length - count_of(a, sequence);
}

static void load_queries(const struct call *call, const struct group *g, struct scratch *s,
                         int rotated)
{
    const struct attend_args *a = call->args;
    const int dim = (int)call->layer->dim;
    for (int64_t r = 0; r < g->rows; r++) {
        int64_t query = (g->row + r) / call->group_size;
        int64_t head = g->head * call->group_size + (g->row + r) % call->group_size;
        const void *from = token_at(a->query, a->dtype, a->cu_seqlens[g->sequence] + query, head);
        float *to = s->query + r * dim;
        read_floats(from, a->dtype, dim, rotated ? s->row : to);
        if (rotated)
            rotate(&call->layer->key, dim, s->row, to);
        for (int d = 0; d < dim; d++)
            to[d] *= (float)a->scale;
        s->query_at[r] = first_position(a, g->sequence) + query;
    }
}

/* The dims of a query in the order of the codes. */
static void order_keys(struct call *call)
{
    const int dim = (int)call->layer->dim, bits = (int)call->layer->key.bits;
    const uint8_t *places = call->dots->places[bits == 8];
    for (int group = 0; group < call->key_groups; group++)
        for (int code = 0; code < 8; code++)
            call->key_order[group * 8 + places[code]] = key_dim(dim, bits, group, code);
}

/* --- one block --- */

static int is_seen(const struct attend_args *a, int64_t query_at, int64_t at)
{
    return at >= 0 && query_at >= 0 && (!a->causal || at <= query_at) &&
           (a->window == 0 || at > query_at - a->window);
}

/* Masks the scores of row r: what it may not see is -infinity. */
static void mask_row(const struct call *call, const struct group *g, const struct scratch *s,
                     int64_t r, float *scores)
{
    const struct attend_args *a = call->args;
    int64_t query = (g->row + r) / call->group_size;
    int64_t head = g->head * call->group_size + (g->row + r) % call->group_size;
    int64_t base = g->sequence * a->mask_batch + head * a->mask_head + query * a->mask_query;
    for (int t = 0; t < BLOCK; t++) {
        if (!is_seen(a, s->query_at[r], s->position[t])) {
            scores[t] = -INFINITY;
        } else if (a->mask != NULL) {
            int64_t at = base + s->position[t] * a->mask_token;
            if (a->mask_dtype == BOOLEAN) {
                if (!((const uint8_t *)a->mask)[at])
                    scores[t] = -INFINITY;
            } else {
                float more;
                read_floats((const uint8_t *)a->mask + at * item_size(a->mask_dtype),
                            a->mask_dtype, 1, &more);
                scores[t] += more;
            }
        }
    }
}

/* Whether all queries of a group see all positions [from, to), masks aside. */
static int sees_all(const struct attend_args *a, const struct group *g, const struct scratch *s,
                    int64_t from, int64_t to)
{
    int64_t first = s->query_at[0], last = s->query_at[g->rows - 1];
    return a->mask == NULL && is_seen(a, first, from) && is_seen(a, first, to - 1) &&
           is_seen(a, last, from) && is_seen(a, last, to - 1);
}

/* From products to scores of block `block` of a strip. `all`: every row sees every token. */
static void finish_scores(const struct call *call, const struct group *g, struct scratch *s,
                          int block, int all)
{
    float *scores = s->scores + block * BLOCK;
    call->ops->scale(scores, (int)g->rows, STRIP * BLOCK, s->key_factor, s->centered, s->shift,
                     (float)call->args->softcap);
    for (int64_t r = 0; !all && r < g->rows; r++)
        mask_row(call, g, s, r, scores + r * STRIP * BLOCK);
}

static int weigh(const struct call *call, const struct group *g, struct scratch *s, int blocks,
                 struct state *state)
{
    return call->ops->softmax(s->scores, (int)g->rows, blocks * BLOCK, STRIP * BLOCK,
                              (int)call->layer->dim, s->value_factor, state->peak, state->weight,
                              state->sums, s->top);
}

static void clear_state(struct state *state, int64_t rows, int64_t dim)
{
    for (int64_t r = 0; r < rows; r++) {
        state->peak[r] = -INFINITY;
        state->weight[r] = 0.0f;
    }
    memset(state->sums, 0, sizeof(float) * (size_t)(rows * dim));
}

/* --- compressed tokens --- */

static int uses_dots(const struct call *call, const struct group *g)
{
    return call->dots != NULL && g->rows <= DOT_ROWS && call->layer->dim <= call->dots->most_dim;
}

/* shift[row] = query . mean, once a page. */
static void load_shift(const struct call *call, const struct group *g, const uint8_t *record,
                       struct scratch *s)
{
    const struct layer *layer = call->layer;
    const int dim = (int)layer->dim;
    float *mean = s->row;
    if (layer->mean_bits == 16)
        call->ops->halves((const word16 *)(record + layer->mean), dim, mean);
    else
        read_mean(layer, record, mean);
    call->ops->project(s->query, (int)g->rows, dim, mean, s->shift);
}

/* Tokens of the block at position `at` outside [begin, end) get no position and no weight. */
static int drop_outside(struct scratch *s, float *value_factor, int64_t at, int64_t begin,
                        int64_t end)
{
    int any_centered = 0;
    for (int t = 0; t < BLOCK; t++) {
        int64_t position = at + 8 * (t % 4) + t / 4;
        if (position < begin || position >= end) {
            position = -1;
            s->key_factor[t] = s->centered[t] = value_factor[t] = 0.0f;
        }
        s->position[t] = position;
        any_centered |= s->centered[t] != 0.0f;
    }
    return any_centered;
}

/* The bytes of the page that holds position `at`, of the group's head. */
static const uint8_t *record_at(const struct call *call, const struct group *g, int64_t at)
{
    const struct view *view = &call->args->view;
    const int32_t *table = view->block_table + g->sequence * view->block_stride;
    const int64_t page = most(table[at / call->layer->page_size], 0);
    return view->pages + page * view->page_bytes + g->head * call->layer->record_bytes;
}

/* Codes of a side of the block at `at`. */
static const uint8_t *codes_at(const struct call *call, const struct side *side,
                               const uint8_t *record, int64_t at)
{
    const int64_t inside = at % call->layer->page_size / BLOCK;
    return record + side->codes + inside * side->bits * call->layer->dim * BLOCK / 8;
}

static void fetch(const uint8_t *from, int64_t bytes)
{
    for (int64_t k = 0; k < bytes; k += 64)
        __builtin_prefetch(from + k);
}

/* Scores of one block of a page; `shift_of` is the page whose shift is loaded. */
static void page_block(const struct call *call, const struct group *g, struct scratch *s,
                       int64_t at, int64_t begin, int64_t end, int block, int64_t *shift_of)
{
    const struct layer *layer = call->layer;
    const int dim = (int)layer->dim, rows = (int)g->rows;
    const int64_t page = at / layer->page_size, inside = at % layer->page_size / BLOCK;
    const uint8_t *record = record_at(call, g, at);
    const uint8_t *codes = codes_at(call, &layer->key, record, at);
    float *scores = s->scores + block * BLOCK, *value_factor = s->value_factor + block * BLOCK;
    float ignored[BLOCK];
    int any_centered = call->ops->scales((const word16 *)(record + layer->key.scales) +
                                             inside * BLOCK,
                                         call->key_factor, (int)layer->centered, s->key_factor,
                                         s->centered);
    call->ops->scales((const word16 *)(record + layer->value.scales) + inside * BLOCK,
                      call->value_factor, 0, value_factor, ignored);
    int whole = at >= begin && at + BLOCK <= end;
    int all = whole && sees_all(call->args, g, s, at, at + BLOCK);
    if (!all)
        any_centered = drop_outside(s, value_factor, at, begin, end);
    if (!any_centered) { /* the mean may never have been written */
        memset(s->shift, 0, sizeof s->shift);
        *shift_of = -1;
    } else if (*shift_of != page) {
        load_shift(call, g, record, s);
        *shift_of = page;
    }
    s->value_codes[block] = codes_at(call, &layer->value, record, at);
    if (uses_dots(call, g)) {
        call->dots->keys(&call->key_book, dim, codes, s->value_codes[block],
                         (int)layer->value.bits, s->work, s->query_bytes, s->query_numbers, rows, scores, STRIP * BLOCK);
    } else {
        call->ops->decode_keys(&call->key_book, dim, codes, s->work, s->keys);
        call->ops->score(s->query, rows, dim, s->keys, scores, STRIP * BLOCK);
    }
    finish_scores(call, g, s, block, all);
}

static void add_values(const struct call *call, const struct group *g, struct scratch *s,
                       int blocks, struct state *state)
{
    const int dim = (int)call->layer->dim, rows = (int)g->rows;
    if (uses_dots(call, g)) {
        for (int r = 0; r < rows; r++)
            call->dots->split(s->scores + r * STRIP * BLOCK, blocks * BLOCK, s->top[r],
                              s->weight_bytes + r * STRIP * BLOCK * 2, &s->weight_numbers[r]);
        call->dots->values(&call->value_book, dim, s->value_codes, s->next_keys,
                           (int)call->layer->key.bits, blocks, s->weight_bytes, s->weight_numbers,
                           rows, state->sums);
        return;
    }
    for (int block = 0; block < blocks; block++) {
        call->ops->decode_values(&call->value_book, dim, s->value_codes[block], s->values);
        for (int t = 0; t < BLOCK; t++)
            s->values_at[t] = (const uint8_t *)(s->values + t * dim);
        call->ops->accumulate(s->scores + block * BLOCK, STRIP * BLOCK, rows, BLOCK, dim,
                              s->values_at, FLOAT32, state->sums);
    }
}

static void fetch_side(const struct call *call, const struct side *side, const uint8_t *record,
                       int64_t at)
{
    fetch(codes_at(call, side, record, at), side->bits * call->layer->dim * BLOCK / 8);
}

/* Scales of the block at `at`, and of its page's first block the mean. */
static void fetch_factors(const struct call *call, const uint8_t *record, int64_t at)
{
    const struct layer *layer = call->layer;
    const int64_t inside = at % layer->page_size;
    fetch(record + layer->key.scales + 2 * inside, 2 * BLOCK);
    fetch(record + layer->value.scales + 2 * inside, 2 * BLOCK);
    if (inside == 0 && layer->centered)
        fetch(record + layer->mean, layer->mean_bits * layer->dim / 8);
}

/* What block `block` of a strip, at `at`, fetches of later ones up to the last. Products fetch codes
   themselves: those of keys the values of their strip, those of values the keys of the next. */
static void fetch_later(const struct call *call, const struct group *g, struct scratch *s,
                        int64_t at, int64_t last, int block)
{
    const struct layer *layer = call->layer;
    const int64_t strip = least(at + STRIP * BLOCK, last), near = least(at + 2 * BLOCK, last);
    const uint8_t *record = record_at(call, g, strip);
    fetch_factors(call, record, strip);
    s->next_keys[block] = codes_at(call, &layer->key, record, strip);
    if (!uses_dots(call, g)) {
        record = record_at(call, g, near);
        fetch_side(call, &layer->key, record, near);
        fetch_side(call, &layer->value, record, near);
    }
}

static void attend_pages(const struct call *call, const struct group *g, struct scratch *s,
                         struct state *state, int64_t begin, int64_t end)
{
    const int64_t first = begin / BLOCK * BLOCK, last = (end - 1) / BLOCK * BLOCK;
    int64_t shift_of = -1;
    int blocks = 0;
    if (begin >= end)
        return;
    for (int64_t at = first; at < least(first + STRIP * BLOCK, end); at += BLOCK) {
        fetch_factors(call, record_at(call, g, at), at);
        fetch_side(call, &call->layer->key, record_at(call, g, at), at);
    }
    load_queries(call, g, s, 1);
    if (uses_dots(call, g))
        call->dots->queries(s->query, (int)g->rows, (int)call->layer->dim, call->key_order,
                            call->key_groups, s->row, s->query_bytes, s->query_numbers);
    for (int64_t at = first; at < end; at += BLOCK) {
        fetch_later(call, g, s, at, last, blocks);
        page_block(call, g, s, at, begin, end, blocks++, &shift_of);
        if (blocks < STRIP && at + BLOCK < end)
            continue;
        if (weigh(call, g, s, blocks, state))
            add_values(call, g, s, blocks, state);
        blocks = 0;
    }
}

/* --- exact tokens --- */

/* A sequence's exact tokens, numbered on: sinks, then ring, then new ones. */
struct exact {
    int64_t sinks, ring, fresh; /* how many */
    int64_t ring_from;          /* first position */
};

/* `run` tokens from this one on have positions one after the other and are `step` bytes apart. */
struct exact_token {
    const uint8_t *key, *value;
    int64_t dtype, position, key_step, value_step, run;
};

/* `codes`: a ring of codes alone, else all others. */
static struct exact count_exact(const struct attend_args *a, int64_t b, int codes)
{
    const struct view *v = &a->view;
    const int64_t start = v->left_pad[b], ring_read_from = v->ring_read_from[b], length = v->lengths[b];
    const int64_t sinks_end = least(start + v->sink_counts[b], ring_read_from);
    const int64_t from = most(most(ring_read_from, start), most(length - v->ring, 0));
    const int64_t ring = (v->ring_scales != NULL) == codes ? most(length - from, 0) : 0;
    if (codes)
        return (struct exact){0, ring, 0, from};
    return (struct exact){most(least(sinks_end - start, v->sinks), 0), ring,
                          a->new_key.data != NULL ? count_of(a, b) : 0, from};
}

static struct exact_token exact_at(const struct call *call, const struct group *g,
                                   const struct exact *e, int64_t n)
{
    const struct attend_args *a = call->args;
    const struct view *v = &a->view;
    const int64_t b = g->sequence, heads = call->layer->heads, owner = v->ring_rows[b];
    const int64_t bytes = call->layer->dim * item_size(v->dtype), step = heads * bytes;
    if (n < e->sinks) {
        int64_t at = (owner * v->sinks + n) * step + g->head * bytes;
        return (struct exact_token){(uint8_t *)v->sink_key + at, (uint8_t *)v->sink_value + at,
                                    v->dtype, v->left_pad[b] + n, step, step, e->sinks - n};
    }
    n -= e->sinks;
    if (n < e->ring) {
        const int64_t position = e->ring_from + n, slot = position % v->ring;
        const int64_t run = least(e->ring - n, v->ring - slot), dim = call->layer->dim;
        const int64_t item = (owner * v->ring + slot) * heads + g->head;
        const uint8_t *key = v->ring_key, *value = v->ring_value;
        if (v->ring_scales != NULL)
            return (struct exact_token){key + item * dim * 3 / 2, value + item * dim, RING_CODES,
                                        position, heads * dim * 3 / 2, heads * dim, run};
        return (struct exact_token){key + item * bytes, value + item * bytes, v->dtype, position,
                                    step, step, run};
    }
    n -= e->ring;
    const int64_t size = item_size(a->new_dtype);
    return (struct exact_token){token_at(a->new_key, a->new_dtype, a->cu_seqlens[b] + n, g->head),
                                token_at(a->new_value, a->new_dtype, a->cu_seqlens[b] + n, g->head),
                                a->new_dtype, v->lengths[b] + n, a->new_key.token_stride * size,
                                a->new_value.token_stride * size, e->fresh - n};
}

/* How many exact tokens come before a position; theirs ascend. */
static int64_t count_before(const struct attend_args *a, int64_t b, const struct exact *e,
                            int64_t position)
{
    const int64_t sinks = position - a->view.left_pad[b], ring = position - e->ring_from;
    const int64_t fresh = position - a->view.lengths[b];
    return least(most(sinks, 0), e->sinks) + least(most(ring, 0), e->ring) +
           least(most(fresh, 0), e->fresh);
}

/* Lists exact tokens [n, n + count) as block `block` of a strip: their positions, and where their
   keys and values are; zeros stand for those that the block lacks. */
static void list_exact(const struct call *call, const struct group *g, struct scratch *s,
                       const struct exact *e, int64_t n, int count, int block)
{
    const uint8_t **keys = s->keys_at, **values = s->values_at + block * BLOCK;
    uint8_t *dtypes = s->dtypes + block * BLOCK;
    s->far_apart = 0;
    for (int t = 0; t < count;) {
        const struct exact_token token = exact_at(call, g, e, n + t);
        s->far_apart |= token.value_step > NEAR;
        for (int64_t k = 0; k < token.run && t < count; k++, t++) {
            s->position[t] = token.position + k;
            keys[t] = token.key + k * token.key_step;
            values[t] = token.value + k * token.value_step;
            dtypes[t] = (uint8_t)token.dtype;
        }
    }
    for (int t = count; t < BLOCK; t++) {
        s->position[t] = -1;
        keys[t] = values[t] = (const uint8_t *)s->zeros;
        dtypes[t] = dtypes[0];
    }
}

/* The dtype in which products read a block's keys or values: that of all, where they are; or float, in
   a tile, if theirs differ or `tiled`. */
static int64_t operand_dtype(const struct call *call, const uint8_t **at, const uint8_t *dtypes,
                             int is_value, int tiled, float *tile)
{
    const int dim = (int)call->layer->dim;
    for (int t = 1; t < BLOCK; t++)
        tiled |= dtypes[t] != dtypes[0];
    if (!tiled)
        return dtypes[0];
    for (int t = 0; t < BLOCK; t++, tile += dim) {
        if (dtypes[t] == FLOAT16)
            call->ops->halves((const word16 *)at[t], dim, tile);
        else if (dtypes[t] == RING_CODES)
            read_codes(at[t], is_value, dim, tile);
        else
            read_floats(at[t], dtypes[t], dim, tile);
        at[t] = (const uint8_t *)tile;
    }
    return FLOAT32;
}

/* What the codes of a ring's block are multiplied with; those of no token with zero. */
static void load_scales(const struct call *call, const struct group *g, struct scratch *s,
                        int block)
{
    const struct view *v = &call->args->view;
    const int64_t first = v->ring_rows[g->sequence] * v->ring, heads = call->layer->heads;
    for (int t = 0; t < BLOCK; t++) {
        const int64_t at = s->position[t], slot = first + (at < 0 ? 0 : at % v->ring);
        const uint16_t *scales = v->ring_scales + 2 * (slot * heads + g->head);
        s->key_factor[t] = at < 0 ? 0.0f : half_to_float(scales[0]);
        s->value_factor[block * BLOCK + t] = at < 0 ? 0.0f : half_to_float(scales[1]);
    }
}

/* Scores of exact tokens [n, n + count) as block `block` of a strip. */
static void exact_block(const struct call *call, const struct group *g, struct scratch *s,
                        const struct exact *e, int64_t n, int count, int block)
{
    const int rows = (int)g->rows;
    const uint8_t *dtypes = s->dtypes + block * BLOCK;
    float *scores = s->scores + block * BLOCK;
    list_exact(call, g, s, e, n, count, block);
    const int64_t dtype = operand_dtype(call, s->keys_at, dtypes, 0,
                                        rows > DOT_ROWS && dtypes[0] != FLOAT32, s->keys);
    const float *factor = s->value_factor; /* ones */
    if (dtypes[0] == RING_CODES) {
        load_scales(call, g, s, block);
        factor = s->key_factor;
    }
    call->ops->score_tokens(s->query, rows, (int)call->layer->dim, s->keys_at, dtype, scores,
                            STRIP * BLOCK);
    if (call->args->softcap > 0.0 || factor == s->key_factor)
        call->ops->scale(scores, rows, STRIP * BLOCK, factor, s->centered, s->shift,
                         (float)call->args->softcap);
    if (count < BLOCK ||
        !sees_all(call->args, g, s, s->position[0], s->position[BLOCK - 1] + 1))
        for (int64_t r = 0; r < rows; r++)
            mask_row(call, g, s, r, scores + r * STRIP * BLOCK);
}

/* `codes`: a ring of codes, in the frame of pages, or all other exact tokens. */
static void attend_exact(const struct call *call, const struct group *g, struct scratch *s,
                         struct state *state, int codes)
{
    const struct attend_args *a = call->args;
    const int dim = (int)call->layer->dim;
    const struct exact e = count_exact(a, g->sequence, codes);
    int64_t n = 0, end = e.sinks + e.ring + e.fresh;
    load_queries(call, g, s, codes);
    if (a->causal)
        end = count_before(a, g->sequence, &e, s->query_at[g->rows - 1] + 1);
    if (a->window != 0)
        n = count_before(a, g->sequence, &e, s->query_at[0] - a->window + 1);
    memset(s->shift, 0, sizeof s->shift);
    memset(s->centered, 0, sizeof s->centered);
    for (int t = 0; t < STRIP * BLOCK; t++)
        s->value_factor[t] = 1.0f;
    for (int blocks; n < end; n += blocks * BLOCK) {
        for (blocks = 0; blocks < STRIP && n + blocks * BLOCK < end; blocks++) {
            const int64_t at = n + blocks * BLOCK;
            exact_block(call, g, s, &e, at, (int)least(end - at, BLOCK), blocks);
        }
        if (!weigh(call, g, s, blocks, state))
            continue;
        for (int at = 0; at < blocks * BLOCK; at += BLOCK) {
            const int tiled = g->rows > DOT_ROWS && (s->far_apart || s->dtypes[at] != FLOAT32);
            const int64_t dtype = operand_dtype(call, s->values_at + at, s->dtypes + at, 1, tiled,
                                                s->values);
            call->ops->accumulate(s->scores + at, STRIP * BLOCK, (int)g->rows, BLOCK, dim,
                                  s->values_at + at, dtype, state->sums);
        }
    }
}

/* --- the whole --- */

/* Merges the states of a group: the first is of exact tokens, the others are in the pages' frame. */
static void merge_states(const struct call *call, const struct group *g, struct scratch *s,
                         const struct state *states, int64_t count)
{
    const struct attend_args *a = call->args;
    const int dim = (int)call->layer->dim;
    float *plain = s->row, *rotated = plain + dim, *back = rotated + dim;
    for (int64_t r = 0; r < g->rows; r++) {
        int64_t query = a->cu_seqlens[g->sequence] + (g->row + r) / call->group_size;
        int64_t head = g->head * call->group_size + (g->row + r) % call->group_size;
        int64_t at = query * a->heads + head;
        float peak = -INFINITY, weight = 0.0f;
        for (int64_t k = 0; k < count; k++)
            if (states[k].peak[r] > peak || isnan(states[k].peak[r]))
                peak = states[k].peak[r];
        memset(plain, 0, 2 * sizeof(float) * (size_t)dim);
        for (int64_t k = 0; k < count && peak != -INFINITY; k++) {
            float shrink = expf(states[k].peak[r] - peak);
            float *sums = k == 0 ? plain : rotated;
            weight += shrink * states[k].weight[r];
            for (int d = 0; d < dim; d++)
                sums[d] += shrink * states[k].sums[r * dim + d];
        }
        rotate_back(&call->layer->value, dim, rotated, back);
        for (int d = 0; d < dim; d++)
            back[d] = weight == 0.0f ? 0.0f : (plain[d] + back[d]) / weight;
        write_floats(back, a->dtype, dim, (uint8_t *)a->out + at * dim * item_size(a->dtype));
        a->lse[at] = peak + logf(weight);
    }
}

/* Of a group with splits: exact tokens, splits of pages, a ring of codes. */
static int64_t count_states(const struct call *call, const struct group *g)
{
    return g->num_splits + 1 + (call->args->view.ring_scales != NULL);
}

static struct state state_of(const struct call *call, const struct group *g, int64_t k)
{
    return state_in(call->states + (g->first_state + k) * state_floats(call), g->rows,
                    call->layer->dim);
}

static void run_task(void *context, void *own, int64_t number)
{
    const struct call *call = context;
    const struct task task = call->tasks[number];
    struct group *g = &call->groups[task.group];
    struct scratch *s = own;
    const int64_t dim = call->layer->dim;
    if (task.split < 0) {
        clear_state(&s->own[0], g->rows, dim);
        clear_state(&s->own[1], g->rows, dim);
        attend_exact(call, g, s, &s->own[0], 0);
        if (call->args->view.ring_scales != NULL)
            attend_exact(call, g, s, &s->own[1], 1);
        attend_pages(call, g, s, &s->own[1], g->begin, g->end);
        merge_states(call, g, s, s->own, 2);
        return;
    }
    struct state state = state_of(call, g, task.split);
    clear_state(&state, g->rows, dim);
    if (task.split == 0 || task.split > g->num_splits) {
        attend_exact(call, g, s, &state, task.split > 0);
    } else {
        int64_t first = g->begin / BLOCK, blocks = (g->end + BLOCK - 1) / BLOCK - first;
        int64_t from = first + blocks * (task.split - 1) / g->num_splits;
        int64_t to = first + blocks * task.split / g->num_splits;
        attend_pages(call, g, s, &state, most(g->begin, from * BLOCK), least(g->end, to * BLOCK));
    }
    if (atomic_fetch_sub(&g->to_do, 1) == 1) {
        struct state states[WANTED_TASKS + 2];
        const int64_t count = count_states(call, g);
        for (int64_t k = 0; k < count; k++)
            states[k] = state_of(call, g, k);
        merge_states(call, g, s, states, count);
    }
}

/* Tokens that some row of the group can see in pages. */
static void set_range(const struct call *call, struct group *g)
{
    const struct attend_args *a = call->args;
    const struct view *v = &a->view;
    int64_t start = v->left_pad[g->sequence], ring_read_from = v->ring_read_from[g->sequence];
    int64_t first = first_position(a, g->sequence) + g->row / call->group_size;
    int64_t last = first_position(a, g->sequence) + (g->row + g->rows - 1) / call->group_size;
    g->begin = most(least(start + v->sink_counts[g->sequence], ring_read_from), most(start, 0));
    g->end = ring_read_from;
    if (a->causal)
        g->end = least(g->end, last + 1);
    if (a->window != 0)
        g->begin = most(g->begin, first - a->window + 1);
    g->end = most(g->end, g->begin);
}

static int64_t group_rows(const struct call *call, int64_t sequence)
{
    return count_of(call->args, sequence) * call->group_size;
}

static void cut_groups(struct call *call, int64_t groups, int64_t *tasks, int64_t *states)
{
    int64_t n = 0;
    for (int64_t b = 0; b < call->args->view.batch; b++)
        for (int64_t head = 0; head < call->layer->heads; head++)
            for (int64_t row = 0; row < group_rows(call, b); row += ROWS) {
                struct group *g = &call->groups[n++];
                g->sequence = b, g->head = head, g->row = row;
                g->rows = least(ROWS, group_rows(call, b) - row);
                set_range(call, g);
                int64_t blocks = (g->end - g->begin) / BLOCK;
                int64_t wanted = (WANTED_TASKS + groups - 1) / groups;
                g->num_splits = least(most(blocks / LEAST_BLOCKS, 1), wanted);
                g->first_state = g->num_splits > 1 ? *states : -1;
                atomic_init(&g->to_do, count_states(call, g));
                *tasks += g->num_splits > 1 ? count_states(call, g) : 1;
                *states += g->num_splits > 1 ? count_states(call, g) : 0;
            }
}

static void list_tasks(struct call *call, int64_t groups)
{
    struct task *next = call->tasks;
    for (int64_t n = 0; n < groups; n++) {
        if (call->groups[n].first_state < 0) {
            *next++ = (struct task){n, -1};
            continue;
        }
        for (int64_t k = 0; k < count_states(call, &call->groups[n]); k++)
            *next++ = (struct task){n, k};
    }
}

/* Queries of no sequence see nothing. */
static void clear_rest(const struct attend_args *a, int64_t dim)
{
    const int64_t rows[2][2] = {{0, a->cu_seqlens[0]}, {a->cu_seqlens[a->view.batch], a->total}};
    for (int k = 0; k < 2; k++)
        for (int64_t n = rows[k][0] * a->heads; n < rows[k][1] * a->heads; n++) {
            memset((uint8_t *)a->out + n * dim * item_size(a->dtype), 0,
                   (size_t)(dim * item_size(a->dtype)));
            a->lse[n] = -INFINITY;
        }
}

/* --- prompts --- */

#define PACK_TOKENS 256           /* of a task */
#define MOST_PACKED (64 << 20)    /* bytes */

struct packing {
    const struct layer *layer;
    const struct attend_args *args;
    float *to[2]; /* keys and values, [head][token][dim] */
};

static void *no_scratch(void *context) { return context; }
static void keep_scratch(void *own) { (void)own; }

static void pack_tokens(void *context, void *own, int64_t task)
{
    const struct packing *p = context;
    const struct attend_args *a = p->args;
    const int64_t heads = p->layer->heads, dim = p->layer->dim;
    const int64_t head = task % heads, from = task / heads * PACK_TOKENS;
    (void)own;
    for (int side = 0; side < 2; side++)
        for (int64_t n = from; n < least(from + PACK_TOKENS, a->total); n++)
            read_floats(token_at(side ? a->new_value : a->new_key, a->new_dtype, n, head),
                        a->new_dtype, (int)dim, p->to[side] + (head * a->total + n) * dim);
}

/* The new tokens of a prompt as floats in one piece for each head, since all groups of its
   queries read them: `packed` is what was asked with those. Returns their memory, or NULL where
   they stay as they are. */
static float *pack_prompt(const struct layer *layer, const struct attend_args *args,
                          struct attend_args *packed)
{
    const int64_t floats = args->total * layer->heads * layer->dim;
    if (args->new_key.data == NULL || args->heads / layer->heads * args->total < 4 * ROWS ||
        floats * 8 > MOST_PACKED)
        return NULL;
    float *data = malloc(sizeof(float) * 2 * (size_t)floats);
    if (data == NULL)
        return NULL;
    struct packing packing = {layer, args, {data, data + floats}};
    struct work work = {pack_tokens, no_scratch, keep_scratch, &packing,
                        layer->heads * ((args->total + PACK_TOKENS - 1) / PACK_TOKENS)};
    run_tasks(&work, args->threads);
    *packed = *args;
    packed->new_dtype = FLOAT32;
    packed->new_key = (struct tokens){data, layer->dim, args->total * layer->dim};
    packed->new_value = (struct tokens){data + floats, layer->dim, args->total * layer->dim};
    return data;
}

int tightkv_attend(const struct layer *layer, const struct attend_args *given)
{
    const struct isa *isa = current_isa();
    struct attend_args packed, own;
    if (given->view.lengths == NULL) {
        own = *given;
        own.view.lengths = (const int32_t *)(given + 1);
        own.view.ring_read_from = own.view.lengths + own.view.batch;
        given = &own;
    }
    float *prompt = pack_prompt(layer, given, &packed);
    const struct attend_args *args = prompt == NULL ? given : &packed;
    struct call call = {.layer = layer, .args = args, .ops = isa->ops, .dots = isa->dots};
    const double root = sqrt((double)layer->dim);
    int64_t groups = 0, tasks = 0, states = 0;
    int result = -1;
    call.key_groups = key_groups((int)layer->dim, (int)layer->key.bits);
    call.group_size = args->heads / layer->heads;
    call.key_factor = (float)(layer->key.unit / root);
    call.value_factor = (float)(layer->value.unit / root);
    make_book(&layer->key, &call.key_book);
    make_book(&layer->value, &call.value_book);
    clear_rest(args, layer->dim);
    for (int64_t b = 0; b < args->view.batch; b++) {
        groups += layer->heads * ((group_rows(&call, b) + ROWS - 1) / ROWS);
        call.widest = most(call.widest, least(group_rows(&call, b), ROWS));
    }
    call.groups = malloc(sizeof *call.groups * (size_t)groups);
    call.key_order = malloc(sizeof *call.key_order * 8 * (size_t)call.key_groups);
    if (groups == 0) {
        result = 0;
    } else if (call.groups != NULL && call.key_order != NULL) {
        if (call.dots != NULL)
            order_keys(&call);
        cut_groups(&call, groups, &tasks, &states);
        call.tasks = malloc(sizeof *call.tasks * (size_t)tasks);
        call.states = lines(sizeof(float) * (size_t)(states * state_floats(&call) + 1));
        if (call.tasks != NULL && call.states != NULL) {
            struct work work = {run_task, open_scratch, close_scratch, &call, tasks};
            list_tasks(&call, groups);
            result = run_tasks(&work, args->threads);
        }
    }
    free(call.groups);
    free(call.key_order);
    free(call.tasks);
    free(call.states);
    free(prompt);
    return result;
}
