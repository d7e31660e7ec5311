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

static void halves(const word16 *in, int count, float *out)
{
    for (int k = 0; k < count; k++)
        out[k] = half_to_float(in[k]);
}

#include "decode.h"
#include "simd_attend.h"
