/* Vectors of LANES floats as the compiler knows them. */
#ifndef TIGHTKV_VECTORS_H
#define TIGHTKV_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vf load(const float *at) { return *(const vf_anywhere *)at; }
static inline void store(float *at, vf x) { *(vf_anywhere *)at = x; }
static inline vf splat(float x) { return (vf){0} + x; }
static inline vi splat_int(int32_t x) { return (vi){0} + x; }
static inline vf larger(vf a, vf b)
{
#ifdef LARGER /* in one instruction */
    return (vf)LARGER(a, b);
#endif
    vi first = a > b;
    return (vf)((first & (vi)a) | (~first & (vi)b));
}

/* Halving the lanes until one is left. */
static inline float sum_lanes(vf x)
{
#ifdef SUM_LANES
    return SUM_LANES(x);
#endif
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a[i] += a[i + half];
    return a[0];
}

static inline float largest_lane(vf x)
{
#ifdef LARGEST_LANE
    return LARGEST_LANE(x);
#endif
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
}

#endif
