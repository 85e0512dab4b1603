/* GELU on the CPU, with (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), which keeps its relative accuracy
 * where x is very negative and 1 + tanh u would cancel. */
#include "layers/gelu.h"

#include "runtime/vector_math.h"

/* 2 sqrt(2/π): the scale of -2u. */
#define SCALE ((real)1.5957691216057308)
#define CUBIC ((real)0.044715)

void LAYER(gelu_forward)(void *out_, const void *x_, size_t n, Device *device) {
    (void)device;
    real *out = out_;
    const real *x = x_;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        real v = x[i];
        real exponent = -SCALE * (v + CUBIC * v * v * v);
        out[i] = v / (1 + real_exp(exponent));
    }
}

/* With s = 1 / (1 + exp(-2u)): gelu' = s + x s (1 - s) 2u'. */
void LAYER(gelu_backward)(void *dx_, const void *dout_, const void *x_, size_t n, Device *device) {
    (void)device;
    real *dx = dx_;
    const real *dout = dout_, *x = x_;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        real v = x[i], square = CUBIC * v * v;
        real s = 1 / (1 + real_exp(-SCALE * (v + square * v)));
        real slope = SCALE * (1 + 3 * square);
        dx[i] = dout[i] * (s + v * s * (1 - s) * slope);
    }
}
