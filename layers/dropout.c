/* Dropout on the CPU: a tile of factors, then the product. */
#include "layers/dropout.h"

#include "layers/dropout_factors.h"

void LAYER(dropout_forward)(void *out_, const void *x_, size_t n, Dropout dropout, Device *device) {
    (void)device;
    real *out = out_;
    const real *x = x_;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < n; first += DROPOUT_TILE) {
        size_t count = n - first < DROPOUT_TILE ? n - first : DROPOUT_TILE;
        float factors[DROPOUT_TILE];
        dropout_factors(factors, first, count, dropout);
#pragma omp simd
        for (size_t i = 0; i < count; i++) out[first + i] = x[first + i] * factors[i];
    }
}
