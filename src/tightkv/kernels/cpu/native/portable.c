/* Any processor: 16-byte vectors, which every compiler maps to what there is. */
#define LANES 4
#define COLUMNS 2
#define OPS_NAME portable_ops

#include "ops.h"
#include "vectors.h"
#include "half.h"

struct table {
    const float *level;
};

static inline struct table table_of(const struct book *book)
{
    return (struct table){book->level};
}

static inline vf look_up(const struct table *t, vu index)
{
    vf out;
    for (int lane = 0; lane < LANES; lane++)
        out[lane] = t->level[index[lane] & 15];
    return out;
}

#define look_up4 look_up

static inline vu gather_words(const word32 *at, int step)
{
    (void)step;
    return (vu){at[0], at[1], at[2], at[3]};
}

static inline void put_parts(vf x, int part, float *tile, int dim)
{
    store(tile + (4 * (part & 1) + (part >> 1)) * dim, x);
}

static inline vf half_vector(const word16 *in)
{
    return (vf){half_to_float(in[0]), half_to_float(in[1]), half_to_float(in[2]),
                half_to_float(in[3])};
}

static inline vf bfloat_vector(const word16 *in)
{
    return (vf){bfloat_to_float(in[0]), bfloat_to_float(in[1]), bfloat_to_float(in[2]),
                bfloat_to_float(in[3])};
}

static inline vi byte_vector(const int8_t *in) { return (vi){in[0], in[1], in[2], in[3]}; }

static inline vu spread_words(const word32 *in) { return (vu){0} + in[0]; }

#include "decode.h"
#include "simd_attend.h"
