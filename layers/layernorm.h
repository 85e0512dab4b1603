/* out = (x - mean) * rstd * weight + bias over each row of C, rstd = 1/sqrt(variance + eps)
 * (Ba, Kiros, Hinton 2016), alone or after the residual add that precedes it in a GPT. */
#ifndef LAYERS_LAYERNORM_H
#define LAYERS_LAYERNORM_H

#include "runtime/device.h"
#include "runtime/random.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void LayernormForward(void *out,          /* (N,C) real */
                              void *mean,         /* (N) acc, saved for the backward */
                              void *rstd,         /* (N) acc, saved */
                              const void *x,      /* (N,C) real */
                              const void *weight, /* (C) real */
                              const void *bias,   /* (C) real */
                              size_t N, size_t C, float eps, Device *device);

/* residual = x + dropout(branch), then out = layernorm(residual), in one pass. The statistics are
 * those of the residual as stored (rounded to real). residual may alias x or branch. */
typedef void ResidualLayernormForward(void *out,      /* (N,C) real */
                                      void *residual, /* (N,C) real */
                                      void *mean, void *rstd, const void *x,
                                      const void *branch, /* (N,C) real */
                                      const void *weight, const void *bias, size_t N, size_t C,
                                      float eps, Dropout dropout, Device *device);

/* dx = dresidual + the gradient through the normalisation. dresidual, the gradient that arrives at
 * x past the layernorm on the residual stream, may be NULL (none) and may alias dx. */
typedef void LayernormBackward(void *dx,              /* (N,C) real, = */
                               void *dweight,         /* (C) acc, += */
                               void *dbias,           /* (C) acc, += */
                               const void *dout,      /* (N,C) real */
                               const void *dresidual, /* (N,C) real, or NULL */
                               const void *x,         /* (N,C) real */
                               const void *mean, const void *rstd, const void *weight, size_t N,
                               size_t C, Device *device);

LAYER_TWINS(LayernormForward, layernorm_forward);
LAYER_TWINS(ResidualLayernormForward, residual_layernorm_forward);
LAYER_TWINS(LayernormBackward, layernorm_backward);

#ifdef __cplusplus
}
#endif
#endif
