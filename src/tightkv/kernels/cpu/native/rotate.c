/* Rotations, with the sums in the order the reference has them. */
#include <math.h>
#include <stddef.h>

#include "internal.h"

/* x H for the unscaled Hadamard matrix; the result is in `x` or in `y`, whichever is returned. */
static float *hadamard_sums(int dim, float *x, float *y)
{
    for (int half = dim / 2, left = dim; left > 1; left /= 2) {
        for (int k = 0; k < half; k++) {
            float even = x[2 * k], odd = x[2 * k + 1];
            y[k] = even + odd;
            y[half + k] = even - odd;
        }
        float *swap = x;
        x = y;
        y = swap;
    }
    return x;
}

void rotate(const struct side *side, int dim, float *restrict x, float *restrict y)
{
    if (side->rotation == ROTATION_NONE) {
        memcpy(y, x, sizeof(float) * (size_t)dim);
    } else if (side->rotation == ROTATION_HADAMARD) {
        const float factor = (float)(1.0 / sqrt((double)dim));
        for (int d = 0; d < dim; d++)
            x[d] *= side->signs[d];
        float *sums = hadamard_sums(dim, x, y);
        for (int d = 0; d < dim; d++)
            y[d] = sums[d] * factor;
    } else {
        for (int d = 0; d < dim; d++) {
            double sum[4] = {0};
            for (int e = 0; e < dim; e += 4)
                for (int k = 0; k < 4; k++)
                    sum[k] += side->matrix[d * dim + e + k] * x[e + k];
            y[d] = (float)((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
    }
}

void rotate_back(const struct side *side, int dim, float *restrict x, float *restrict y)
{
    if (side->rotation == ROTATION_NONE) {
        memcpy(y, x, sizeof(float) * (size_t)dim);
    } else if (side->rotation == ROTATION_HADAMARD) {
        const float factor = (float)(1.0 / sqrt((double)dim));
        float *sums = hadamard_sums(dim, x, y);
        for (int d = 0; d < dim; d++)
            y[d] = sums[d] * factor * side->signs[d];
    } else {
        for (int d = 0; d < dim; d++)
            y[d] = 0.0f;
        for (int e = 0; e < dim; e++)
            for (int d = 0; d < dim; d++)
                y[d] += (float)side->matrix[e * dim + d] * x[e];
    }
}
