/* Feeds tightkv_static_attention operands of exactly the size they say, good ones and changed
   ones, for sanitizers to watch. argv: a file of specs, each a count of words and the words. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "static_cache.h"

enum { ROUNDS = 250, STEPS = 12, MOST_OPERANDS = 13 };

static uint64_t seed = 1;

static int64_t draw(int64_t below)
{
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (int64_t)((seed >> 33) % (uint64_t)below);
}

static int64_t item(int64_t dtype)
{
    return dtype == INT64 ? 8 : dtype == FLOAT32 ? 4 : dtype == BFLOAT16 || dtype == FLOAT16 ? 2 : 1;
}

/* A new contiguous tensor; its bytes are small numbers in every dtype. */
static struct operand tensor(int64_t dtype, int64_t rank, const int64_t *size)
{
    struct operand x = {.dtype = dtype, .rank = rank};
    int64_t count = 1;
    for (int64_t k = rank - 1; k >= 0; k--)
        x.size[k] = size[k], x.stride[k] = count, count *= size[k];
    const size_t bytes = (size_t)(count * item(dtype));
    if ((x.data = malloc(bytes + !bytes)) == NULL)
        exit(2);
    for (size_t k = 0; k < bytes; k++)
        ((uint8_t *)x.data)[k] = dtype == FLOAT32 && k % 4 == 3 ? (uint8_t)(63 + draw(2) * 128)
                                                                : (uint8_t)draw(64);
    return x;
}
#define TENSOR(dtype, ...) \
    tensor(dtype, sizeof((int64_t[]){__VA_ARGS__}) / 8, (const int64_t[]){__VA_ARGS__})

static struct operand numbers(int64_t count, int64_t first, int64_t step)
{
    struct operand x = TENSOR(INT64, count);
    for (int64_t k = 0; k < count; k++)
        ((int64_t *)x.data)[k] = first + k * step;
    return x;
}

static const int64_t words[] = {INT64_MIN, -1, 0, 1, 2, 3, 5, 16, 31, 32, 33, 48, 63, 64, 65, 96,
                                1000, 4096, 1 << 20, INT32_MAX, 1LL << 40, INT64_MAX};

static int64_t odd_word(void) { return words[draw(sizeof words / sizeof *words)]; }

/* Other numbers in a spec or a state. */
static void change_words(struct operand *x, int64_t count)
{
    for (int64_t k = draw(2) + 1; k > 0; k--) {
        int64_t *at = (int64_t *)x->data + draw(count);
        *at = draw(2) ? odd_word() : (int64_t)((uint64_t)*at + (uint64_t)draw(5) - 2);
    }
}

/* Numbers that could be a state, but for one thing: that pages hold what the ring does not. Returns
   the length. */
static int64_t invent_state(struct operand *x, const int64_t *spec)
{
    const int64_t most = spec[12], ring = spec[10];
    const int64_t length = draw(2) ? draw(most + 1) : most - draw(8);
    const int64_t held = length > ring ? length - ring : 0;
    for (int64_t b = 0; b < x->size[0]; b++) {
        int64_t *state = (int64_t *)x->data + b * STATE_WORDS;
        state[STATE_LENGTH] = length;
        state[STATE_EXACT] = held + draw(length - held + 1);
        state[STATE_RING] = state[STATE_EXACT] + draw(length - state[STATE_EXACT] + 1);
        state[STATE_SINKS] = draw(spec[11] + 1);
        state[STATE_START] = draw(length + 1);
    }
    return length;
}

/* A tensor of another size, dtype or rank in place of a good one, as long as it says; or no memory. */
static void change_operand(struct operand *x)
{
    struct operand old = *x;
    if (old.rank < 1)
        return;
    switch (draw(5)) {
    case 0: old.rank += draw(2) && old.rank < MOST_RANK ? 1 : -1; break;
    case 1: old.dtype = draw(OTHER_DTYPE + 1); break;
    case 2: free(x->data), x->data = NULL; return;
    default: old.size[draw(old.rank)] += draw(3) - 1; break;
    }
    if (old.rank > 0 && old.size[old.rank - 1] < 1)
        old.size[old.rank - 1] = 1;
    for (int64_t k = 0; k < old.rank; k++)
        if (old.size[k] < 0)
            old.size[k] = 0;
    free(x->data);
    *x = tensor(old.dtype, old.rank, old.size);
}

static void round_of(const int64_t *spec, int64_t count, int kind, int *accepted, int *refused)
{
    const int64_t dim = spec[2], heads = spec[3], full = spec[12] / spec[4];
    const int64_t read = (spec[12] + spec[4] - 1) / spec[4] - spec[9];
    const int64_t batch = 1 + draw(3), share = 1 + draw(3), dtype = draw(3), ring = draw(3);
    struct static_args a = {.scale = 0.1, .causal = 1, .threads = 1 + draw(2)};
    struct operand none = {.rank = -1};
    a.spec = TENSOR(INT64, count);
    memcpy(a.spec.data, spec, (size_t)count * 8);
    a.pages = TENSOR(UINT8, batch, draw(4) ? read : full, heads, spec[5]);
    a.ring = draw(2) ? TENSOR(ring, 2, batch, spec[10], heads, dim)
                     : TENSOR(UINT8, batch, spec[10], heads, dim * 5 / 2 + 4); /* codes */
    a.sinks = TENSOR(ring, 2, batch, spec[11], heads, dim);
    a.state = TENSOR(INT64, batch, STATE_WORDS);
    a.feedback = spec[13] >= 8 || draw(2) ? none
                 : draw(4) ? TENSOR(FLOAT32, heads, dim * (dim + 1) / 2)
                           : TENSOR(FLOAT32, heads, dim, dim);
    a.window = draw(2) ? 0 : 1 + draw(90);
    if (a.window > 0 && a.window <= (spec[9] - 1) * spec[4]) { /* the ring holds it */
        free(a.pages.data);
        a.pages = TENSOR(UINT8, batch, 0, heads, spec[5]);
    }
    int64_t position = 0;
    for (int step = 0; step < STEPS; step++) {
        if (kind == 2 && draw(2))
            position = invent_state(&a.state, spec);
        const int64_t sizes[] = {1, 1, 2, 16, 17, 33, 70, 0}, tokens = sizes[draw(8)];
        a.query = TENSOR(dtype, batch, heads * share, tokens, dim);
        a.key = TENSOR(dtype, batch, heads, tokens, dim);
        a.value = TENSOR(dtype, batch, heads, tokens, dim);
        a.position = numbers(tokens, position, 1);
        a.left_pad = step == 0 && draw(2) ? numbers(batch, draw(40), draw(30)) : none;
        a.mask = draw(3) ? none
                         : TENSOR(draw(2) ? BOOLEAN : FLOAT32, draw(2) ? 1 : batch, 1, tokens,
                                  position + tokens);
        a.out = TENSOR(dtype, batch, tokens, heads * share, dim);
        struct operand *all[MOST_OPERANDS] = {&a.query, &a.key, &a.value, &a.position, &a.left_pad,
                                              &a.mask, &a.spec, &a.feedback, &a.pages, &a.ring,
                                              &a.sinks, &a.state, &a.out};
        if (kind == 1 && step == 2)
            change_words(&a.spec, draw(2) ? 27 : count);
        if (kind == 2 && draw(3) == 0)
            change_words(&a.state, batch * STATE_WORDS);
        if (kind == 3 && draw(3) == 0)
            change_operand(all[draw(MOST_OPERANDS)]);
        if (kind == 4 && tokens > 0)
            *(int64_t *)a.position.data = odd_word();
        char why[512] = "";
        const int result = tightkv_static_attention(&a, why, sizeof why);
        if ((result != 0) != (why[0] != 0))
            exit(3);
        *(result == 0 ? accepted : refused) += 1;
        position = result != 0 ? 0 : position + tokens - (draw(4) ? 0 : draw(tokens + 1));
        for (int k = 0; k < 6; k++)
            free(all[k]->rank >= 0 ? all[k]->data : NULL);
        free(a.out.data);
    }
    free(a.spec.data), free(a.pages.data), free(a.ring.data), free(a.sinks.data);
    free(a.state.data), free(a.feedback.rank >= 0 ? a.feedback.data : NULL);
}

int main(int count, char **arguments)
{
    FILE *file = count == 2 ? fopen(arguments[1], "rb") : NULL;
    int64_t words_of[16], specs = 0, *spec[16];
    if (file == NULL)
        return 2;
    while (specs < 16 && fread(&words_of[specs], 8, 1, file) == 1) {
        spec[specs] = malloc((size_t)words_of[specs] * 8);
        if (fread(spec[specs], 8, (size_t)words_of[specs], file) != (size_t)words_of[specs])
            return 2;
        specs++;
    }
    fclose(file);
    for (int kind = 0; kind < 5; kind++) {
        int accepted = 0, refused = 0;
        for (int n = 0; n < ROUNDS / 5; n++)
            round_of(spec[n % specs], words_of[n % specs], kind, &accepted, &refused);
        printf("%d %d\n", accepted, refused);
    }
    for (int64_t k = 0; k < specs; k++)
        free(spec[k]);
    return 0;
}
