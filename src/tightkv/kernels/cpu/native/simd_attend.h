/* The products and the softmax in the compiler's vector types, once for each instruction set.
   The including file defines LANES, COLUMNS (vectors side by side in a product), OPS_NAME
   and, before including, the decoders decode_keys and decode_values, and half_vector and
   bfloat_vector, which read LANES numbers of 16 bits, byte_vector, which reads LANES bytes, and
   spread_words, which has a word in every eight lanes; BY_LANE where
   an instruction multiplies by one lane of a register, SUM_FOUR where one adds neighbours. */

#include "internal.h"
#include "vectors.h"

#define WIDE (LANES == 16 ? 4 : 2) /* vectors side by side in sums of values */

static void halves(const word16 *in, int count, float *out)
{
    for (int k = 0; k < count; k += LANES)
        store(out + k, half_vector(in + k));
}

/* Low halves of the codes of LANES channels of a key from the d-th on; `nibbles` are all its own. */
ALWAYS vi low_codes(const uint8_t *nibbles, int64_t d)
{
    static const uint32_t shift[16] = {0, 8, 16, 24, 4, 12, 20, 28, 0, 8, 16, 24, 4, 12, 20, 28};
    vu word = spread_words((const word32 *)nibbles + d / 8), by;
    memcpy(&by, shift, sizeof by);
    if (LANES < 8)
        word >>= (uint32_t)d & 4;
    return (vi)((word >> by) & 15u);
}

/* LANES numbers of a token from the d-th on; of codes, keys have `dim` bytes before their nibbles and
   values none: 0. */
ALWAYS vf load_as(const uint8_t *token, int64_t d, const int64_t dtype, int64_t dim)
{
    if (dtype == FLOAT32)
        return load((const float *)token + d);
    if (dtype == RING_CODES) {
        const vi code = byte_vector((const int8_t *)token + d);
        return __builtin_convertvector(dim ? code * 16 + low_codes(token + dim, d) : code, vf);
    }
    const word16 *at = (const word16 *)token + d;
    return dtype == FLOAT16 ? half_vector(at) : bfloat_vector(at);
}

ALWAYS void score_part(const float *query, int64_t dim, const float *tile, float *scores,
                       int64_t stride, const int rows, const int columns)
{
    vf sum[4][8];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sum[r][c] = splat(0.0f);
    for (int64_t d = 0; d < dim; d += 4) {
#ifdef BY_LANE /* multiplies by one lane of a register: four coordinates of a query a load */
        vf q[4];
        for (int r = 0; r < rows; r++)
            q[r] = load(query + r * dim + d);
#endif
        for (int e = 0; e < 4; e++, tile += BLOCK)
            for (int c = 0; c < columns; c++) {
                vf key = load(tile + c * LANES);
                for (int r = 0; r < rows; r++)
#ifdef BY_LANE
                    sum[r][c] = BY_LANE(sum[r][c], key, q[r], e);
#else
                    sum[r][c] += key * splat(query[r * dim + d + e]);
#endif
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            store(scores + r * stride + c * LANES, sum[r][c]);
}

static void score(const float *query, int rows, int dim, const float *tile, float *scores,
                  int stride)
{
    for (int r = 0; r < rows; r += 4)
        for (int t = 0; t < BLOCK; t += COLUMNS * LANES) {
            const float *q = query + r * dim;
            float *s = scores + r * stride + t;
            switch (rows - r) {
            case 1: score_part(q, dim, tile + t, s, stride, 1, COLUMNS); break;
            case 2: score_part(q, dim, tile + t, s, stride, 2, COLUMNS); break;
            case 3: score_part(q, dim, tile + t, s, stride, 3, COLUMNS); break;
            default: score_part(q, dim, tile + t, s, stride, 4, COLUMNS);
            }
        }
}

#ifndef SUM_FOUR /* to[k] = the sum of the lanes of x[k] */
#define SUM_FOUR(to, x)                                                                       \
    for (int k_ = 0; k_ < 4; k_++)                                                            \
    (to)[k_] = sum_lanes((x)[k_])
#endif

/* Four tokens at a time, lanes along the dims. */
ALWAYS void score_four(const float *query, int64_t dim, const uint8_t *const *keys,
                       float *scores, int64_t stride, const int rows, const int64_t dtype)
{
    vf sum[4][4];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < 4; t++)
            sum[r][t] = splat(0.0f);
    for (int64_t d = 0; d < dim; d += LANES) {
        vf key[4];
        for (int t = 0; t < 4; t++)
            key[t] = load_as(keys[t], d, dtype, dim);
        for (int r = 0; r < rows; r++) {
            const vf q = load(query + r * dim + d);
            for (int t = 0; t < 4; t++)
                sum[r][t] += key[t] * q;
        }
    }
    for (int r = 0; r < rows; r++)
        SUM_FOUR(scores + r * stride, sum[r]);
}

ALWAYS void score_all(const float *query, int rows, int dim, const uint8_t *const *keys,
                      float *scores, int stride, const int64_t dtype)
{
    for (int r = 0; r < rows; r += 4)
        for (int t = 0; t < BLOCK; t += 4) {
            const float *q = query + r * dim;
            const uint8_t *const *k = keys + t;
            float *s = scores + r * stride + t;
            switch (rows - r) {
            case 1: score_four(q, dim, k, s, stride, 1, dtype); break;
            case 2: score_four(q, dim, k, s, stride, 2, dtype); break;
            case 3: score_four(q, dim, k, s, stride, 3, dtype); break;
            default: score_four(q, dim, k, s, stride, 4, dtype);
            }
        }
}

static void score_tokens(const float *query, int rows, int dim, const uint8_t *const *keys,
                         int64_t dtype, float *scores, int stride)
{
    switch (dtype) {
    case FLOAT32: score_all(query, rows, dim, keys, scores, stride, FLOAT32); break;
    case FLOAT16: score_all(query, rows, dim, keys, scores, stride, FLOAT16); break;
    case RING_CODES: score_all(query, rows, dim, keys, scores, stride, RING_CODES); break;
    default: score_all(query, rows, dim, keys, scores, stride, BFLOAT16);
    }
}

ALWAYS void accumulate_part(const float *weights, int64_t stride, int tokens, int64_t dim,
                            int64_t d, const uint8_t *const *values, float *sums,
                            const int rows, const int columns, const int64_t dtype)
{
    vf sum[4][8];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sum[r][c] = load(sums + r * dim + d + c * LANES);
    for (int t = 0; t < tokens; t += 4) {
#ifdef BY_LANE
        vf w[4];
        for (int r = 0; r < rows; r++)
            w[r] = load(weights + r * stride + t);
#endif
        for (int e = 0; e < 4; e++)
            for (int c = 0; c < columns; c++) {
                vf value = load_as(values[t + e], d + c * LANES, dtype, 0);
                for (int r = 0; r < rows; r++)
#ifdef BY_LANE
                    sum[r][c] = BY_LANE(sum[r][c], value, w[r], e);
#else
                    sum[r][c] += value * splat(weights[r * stride + t + e]);
#endif
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            store(sums + r * dim + d + c * LANES, sum[r][c]);
}
ALWAYS void accumulate_columns(const float *weights, int stride, int rows, int tokens, int dim,
                               int d, const uint8_t *const *values, float *sums,
                               const int columns, const int64_t dtype)
{
    for (int r = 0; r < rows; r += 4) {
        const float *w = weights + r * stride;
        float *to = sums + r * dim;
        switch (rows - r) {
        case 1: accumulate_part(w, stride, tokens, dim, d, values, to, 1, columns, dtype); break;
        case 2: accumulate_part(w, stride, tokens, dim, d, values, to, 2, columns, dtype); break;
        case 3: accumulate_part(w, stride, tokens, dim, d, values, to, 3, columns, dtype); break;
        default: accumulate_part(w, stride, tokens, dim, d, values, to, 4, columns, dtype);
        }
    }
}

ALWAYS void accumulate_all(const float *weights, int stride, int rows, int tokens, int dim,
                           const uint8_t *const *values, float *sums, const int64_t dtype)
{
    int d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        accumulate_columns(weights, stride, rows, tokens, dim, d, values, sums, WIDE, dtype);
    for (; d < dim; d += LANES)
        accumulate_columns(weights, stride, rows, tokens, dim, d, values, sums, 1, dtype);
}

static void accumulate(const float *weights, int stride, int rows, int tokens, int dim,
                       const uint8_t *const *values, int64_t dtype, float *sums)
{
    switch (dtype) {
    case FLOAT32:
        accumulate_all(weights, stride, rows, tokens, dim, values, sums, FLOAT32);
        break;
    case FLOAT16:
        accumulate_all(weights, stride, rows, tokens, dim, values, sums, FLOAT16);
        break;
    case RING_CODES:
        accumulate_all(weights, stride, rows, tokens, dim, values, sums, RING_CODES);
        break;
    default: accumulate_all(weights, stride, rows, tokens, dim, values, sums, BFLOAT16);
    }
}

#define AT_ONCE (LANES == 16 ? 2 : 4)

/* e^x for AT_ONCE vectors x <= 0 (one chain of operations would be slow), to 2e-7 of it; 0 below the normal floats. The polynomial has the
   least relative error among 1 + r + r^2 (...) of its degree. */
ALWAYS void exponentials(vf x[AT_ONCE])
{
    static const float terms[4] = {0.00831243489f, 0.0418909937f, 0.166671187f, 0.499992251f};
    /* adding 1.5 * 2^23 rounds to a whole number; 127 is the exponent of 1.0f */
    const vf magic = splat(12582912.0f + 127.0f);
    vf n[AT_ONCE], r[AT_ONCE], p[AT_ONCE];
    for (int k = 0; k < AT_ONCE; k++) {
        n[k] = x[k] * splat(1.44269504f) + magic;
        vf whole = n[k] - magic;
        r[k] = x[k] - whole * splat(0.693359375f);
        r[k] = r[k] + whole * splat(2.12194440e-4f);
        p[k] = splat(terms[0]);
    }
    for (int term = 1; term < 4; term++)
        for (int k = 0; k < AT_ONCE; k++)
            p[k] = p[k] * r[k] + splat(terms[term]);
    for (int k = 0; k < AT_ONCE; k++) {
        p[k] = p[k] * (r[k] * r[k]) + (r[k] + splat(1.0f));
        p[k] *= (vf)((vu)n[k] << 23); /* the whole number, moved onto the exponent */
        x[k] = (vf)((vu)p[k] & ~(vu)(x[k] < splat(-87.3f)));
    }
}

static void project(const float *query, int rows, int dim, const float *x, float *out)
{
    for (int r = 0; r < rows; r++) {
        const float *q = query + r * dim;
        vf sum[16 / LANES];
        for (int k = 0; k < 16 / LANES; k++)
            sum[k] = load(q + k * LANES) * load(x + k * LANES);
        for (int d = 16; d < dim; d += 16)
            for (int k = 0; k < 16 / LANES; k++)
                sum[k] += load(q + d + k * LANES) * load(x + d + k * LANES);
        for (int k = 1; k < 16 / LANES; k++)
            sum[0] += sum[k];
        out[r] = sum_lanes(sum[0]);
    }
}

static int scales(const word16 *in, float factor, int flags, float *out, float *centered)
{
    vi any = splat_int(0);
    halves(in, BLOCK, out);
    for (int t = 0; t < BLOCK; t += LANES) {
        vf x = load(out + t);
        vi flag = flags ? (vi)x >> 31 : splat_int(0); /* all ones or none */
        any |= flag;
        store(centered + t, (vf)(flag & (vi)splat(1.0f)));
        store(out + t, (vf)((vi)x & ~(flag & splat_int((int)0x80000000))) * splat(factor));
    }
    uint64_t pairs[LANES / 2], found = 0;
    memcpy(pairs, &any, sizeof pairs);
    for (int i = 0; i < LANES / 2; i++)
        found |= pairs[i];
    return found != 0;
}

/* cap * tanh(s / cap), from e^(-2 |s| / cap) */
ALWAYS void soft_cap(vf s[AT_ONCE], float cap)
{
    vf e[AT_ONCE];
    for (int k = 0; k < AT_ONCE; k++)
        e[k] = (vf)((vi)s[k] & splat_int(0x7fffffff)) * splat(-2.0f / cap);
    exponentials(e);
    for (int k = 0; k < AT_ONCE; k++) {
        vf size = (splat(1.0f) - e[k]) / (splat(1.0f) + e[k]) * splat(cap);
        s[k] = (vf)((vi)size | ((vi)s[k] & splat_int((int)0x80000000)));
    }
}

static void scale(float *scores, int rows, int stride, const float *factor, const float *centered,
                  const float *shift, float cap)
{
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < BLOCK; t += AT_ONCE * LANES) {
            float *at = scores + r * stride + t;
            vf s[AT_ONCE];
            for (int k = 0; k < AT_ONCE; k++)
                s[k] = load(at + k * LANES) * load(factor + t + k * LANES) +
                       load(centered + t + k * LANES) * splat(shift[r]);
            if (cap > 0.0f)
                soft_cap(s, cap);
            for (int k = 0; k < AT_ONCE; k++)
                store(at + k * LANES, s[k]);
        }
}

static int any_nan(const float *x, int count)
{
    vi odd = splat_int(0);
    for (int t = 0; t < count; t += LANES) {
        const vf y = load(x + t);
        odd |= y != y;
    }
    for (int i = 0; i < LANES; i++)
        if (odd[i])
            return 1;
    return 0;
}

/* Beside NaN it may be any of the others. */
ALWAYS float largest(const float *x, int count)
{
    vf most[AT_ONCE];
    for (int k = 0; k < AT_ONCE; k++)
        most[k] = load(x + k * LANES);
    for (int t = AT_ONCE * LANES; t < count; t += AT_ONCE * LANES)
        for (int k = 0; k < AT_ONCE; k++)
            most[k] = larger(most[k], load(x + t + k * LANES));
    for (int k = 1; k < AT_ONCE; k++)
        most[0] = larger(most[0], most[k]);
    return largest_lane(most[0]);
}

static int softmax(float *scores, int rows, int count, int stride, int dim, const float *factor,
                   float *peak, float *weight, float *sums, float *top)
{
    int any = 0;
    for (int r = 0; r < rows; r++) {
        float *s = scores + r * stride;
        float best = largest(s, count);
        top[r] = 0.0f;
        if (best == -INFINITY && any_nan(s, count))
            best = NAN;
        if (best == -INFINITY) { /* nothing seen here */
            memset(s, 0, (size_t)count * sizeof(float));
            continue;
        }
        any = 1;
        if (!(best <= peak[r])) { /* or it is NaN */
            float shrink = expf(peak[r] - best);
            peak[r] = best;
            weight[r] *= shrink;
            for (int d = 0; d < dim; d += LANES)
                store(sums + r * dim + d, load(sums + r * dim + d) * splat(shrink));
        }
        vf total = splat(0.0f), base = splat(peak[r]), most = total, products = total;
        for (int t = 0; t < count; t += AT_ONCE * LANES) {
            vf p[AT_ONCE];
            for (int k = 0; k < AT_ONCE; k++)
                p[k] = load(s + t + k * LANES) - base;
            exponentials(p);
            for (int k = 0; k < AT_ONCE; k++) {
                total += p[k];
                p[k] *= load(factor + t + k * LANES);
                products += p[k];
                most = larger(most, (vf)((vi)p[k] & splat_int(0x7fffffff)));
                store(s + t + k * LANES, p[k]);
            }
        }
        weight[r] += sum_lanes(total);
        top[r] = isnan(sum_lanes(products)) ? NAN : largest_lane(most);
    }
    return any;
}

const struct ops OPS_NAME = {
    .decode_keys = decode_keys,
    .decode_values = decode_values,
    .score = score,
    .score_tokens = score_tokens,
    .project = project,
    .scales = scales,
    .scale = scale,
    .softmax = softmax,
    .accumulate = accumulate,
    .halves = halves,
};
