/* Sums over a whole array in an order that does not depend on timing: the mean loss and the global
 * gradient norm. Sums of many floats are carried in double on the CPU, in a tree on CUDA. */
#ifndef LAYERS_REDUCE_H
#define LAYERS_REDUCE_H

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

/* *sum += scale Σ x. */
typedef void SumForward(void *sum /* (1) acc, += */, const void *x /* (n) acc */, float scale,
                        size_t n, Device *device);
/* *norm = sqrt(Σ grads²). */
typedef void GradNorm(void *norm /* (1) acc, = */, const void *grads /* (n) acc */, size_t n,
                      Device *device);

LAYER_TWINS(SumForward, sum_forward);
LAYER_TWINS(GradNorm, grad_norm);

#ifdef __cplusplus
}
#endif
#endif
