/* Cross-entropy on the CPU, a row to a thread: the largest logit, the sum of exp(logit - largest),
 * and in the backward the gradient, over the same row while it is in the cache. */
#include "layers/cross_entropy.h"

#include <math.h>

#include "runtime/vector_math.h"

/* Columns whose exponentials are summed in real before the sum goes on in double. */
#define BLOCK 1024

static real largest(const real *x, size_t n) {
    real max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (size_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

/* e[i] = exp(x[i] - max) for n <= BLOCK elements; returns their sum. e may alias x. */
static double exponentials(real *e, const real *x, size_t n, real max) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        e[i] = real_exp(x[i] - max);
        sum += e[i];
    }
    return sum;
}

void LAYER(cross_entropy_forward)(void *losses_, const void *logits_, const int32_t *targets,
                                  size_t N, size_t V, size_t Vp, Device *device) {
    (void)device;
    acc *losses = losses_;
    const real *logits = logits_;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *row = logits + n * Vp;
        losses[n] = 0;
        if (targets[n] < 0) continue;
        real max = largest(row, V), e[BLOCK];
        double sum = 0;
        for (size_t v = 0; v < V; v += BLOCK)
            sum += exponentials(e, row + v, V - v < BLOCK ? V - v : BLOCK, max);
        losses[n] = (acc)(log(sum) + ((double)max - row[targets[n]]));
    }
}

void LAYER(cross_entropy_backward)(void *losses_, void *logits_, const int32_t *targets,
                                   float dloss, size_t N, size_t V, size_t Vp, Device *device) {
    (void)device;
    acc *losses = losses_;
    real *logits = logits_;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        real *row = logits + n * Vp;
        losses[n] = 0;
        if (targets[n] < 0) {
            for (size_t v = 0; v < Vp; v++) row[v] = 0;
            continue;
        }
        size_t target = (size_t)targets[n];
        real max = largest(row, V);
        double margin = (double)max - row[target], sum = 0;
        for (size_t v = 0; v < V; v += BLOCK)
            sum += exponentials(row + v, row + v, V - v < BLOCK ? V - v : BLOCK, max);
        losses[n] = (acc)(log(sum) + margin);
        real target_gradient = (real)(dloss * (row[target] / sum - 1));
        real scale = (real)(dloss / sum);
#pragma omp simd
        for (size_t v = 0; v < V; v++) row[v] *= scale;
        row[target] = target_gradient;
        for (size_t v = V; v < Vp; v++) row[v] = 0;
    }
}
