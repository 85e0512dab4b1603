/* Linear layers on the CPU: three matrix products, with bias and GELU around them.
 *
 * The bias costs no pass of its own: rows are filled with it and the product is added to them,
 * which a BLAS does at the price of the zeroing that it would do otherwise. */
#include "layers/linear.h"

#include <string.h>

#include "layers/gelu.h"
#include "layers/matmul.h"

static Matmul *const matmul = LAYER(matmul);

/* Columns whose sums one thread carries down all rows. */
#define COLUMNS 64

void LAYER(linear_forward)(void *out, void *pre_gelu, const void *x, const void *weight,
                           const void *bias, size_t N, size_t IC, size_t OC, WeightLayout layout,
                           Device *device) {
    real *sum = pre_gelu ? pre_gelu : out;
    if (bias) {
#pragma omp parallel for schedule(static)
        for (size_t n = 0; n < N; n++) memcpy(sum + n * OC, bias, OC * sizeof(real));
    }
    matmul(sum, bias ? MATMUL_ADD : MATMUL_WRITE, x, MATMUL_PLAIN, weight,
           layout == WEIGHT_IN_OUT ? MATMUL_PLAIN : MATMUL_TRANSPOSED, N, OC, IC);
    if (pre_gelu) LAYER(gelu_forward)(out, pre_gelu, N * OC, device);
}

static void add_column_sums(acc *sums, const real *x, size_t N, size_t C) {
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < C; first += COLUMNS) {
        size_t count = C - first < COLUMNS ? C - first : COLUMNS;
        double column[COLUMNS] = {0};
        for (size_t n = 0; n < N; n++) {
            const real *row = x + n * C + first;
#pragma omp simd
            for (size_t c = 0; c < count; c++) column[c] += row[c];
        }
        for (size_t c = 0; c < count; c++) sums[first + c] += (acc)column[c];
    }
}

void LAYER(linear_backward)(void *dx, void *dweight, void *dbias, const void *dout, const void *x,
                            const void *weight, const void *pre_gelu, size_t N, size_t IC,
                            size_t OC, WeightLayout layout, Device *device) {
    if (dx) {
        matmul(dx, MATMUL_WRITE, dout, MATMUL_PLAIN, weight,
               layout == WEIGHT_IN_OUT ? MATMUL_TRANSPOSED : MATMUL_PLAIN, N, IC, OC);
        if (pre_gelu) LAYER(gelu_backward)(dx, dx, pre_gelu, N * IC, device);
    }
    if (layout == WEIGHT_IN_OUT)
        matmul(dweight, MATMUL_ADD, x, MATMUL_TRANSPOSED, dout, MATMUL_PLAIN, IC, OC, N);
    else
        matmul(dweight, MATMUL_ADD, dout, MATMUL_TRANSPOSED, x, MATMUL_PLAIN, OC, IC, N);
    if (dbias) add_column_sums(dbias, dout, N, OC);
}
