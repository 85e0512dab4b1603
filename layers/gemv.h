/* Few rows times a whole matrix, as in generating text, where each token reads every weight once
 * and that reading is the time it takes. What surrounds the product in a GPT is done with it:
 *
 *   out = f(norm(x) W + b),  norm: a layernorm or nothing,  f: GELU, a residual add or nothing
 *
 * Any N is right; on CUDA each 8 rows read the matrix again. */
#ifndef LAYERS_GEMV_H
#define LAYERS_GEMV_H

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The layernorm of x (layers/layernorm.h). */
typedef struct {
    const void *weight, *bias; /* (IC) real */
    float eps;
} GemvNorm;

typedef enum { GEMV_WRITE, GEMV_GELU, GEMV_ADD } GemvOutput; /* =, = gelu(…), += */

/* W is stored as the blocks' Conv1D is, (IC,OC). out must not alias x. On the CPU it takes
 * layers_gemv_scratch_bytes of the device's scratch. */
typedef void GemvForward(void *out,            /* (N,OC) real */
                         const void *x,        /* (N,IC) real */
                         const GemvNorm *norm, /* NULL: none */
                         const void *weight,   /* (IC,OC) real */
                         const void *bias,     /* (OC) real */
                         size_t N, size_t IC, size_t OC, GemvOutput output, Device *device);

/* logits = norm(x) Wᵀ with the head's matrix, whose rows are the vocabulary's. Not rounded to real,
 * so that tokens of nearly the same probability stay apart. C <= 12,032 on CUDA. */
typedef void GemvHead(void *logits,         /* (N,V) acc */
                      const void *x,        /* (N,C) real */
                      const GemvNorm *norm, /* not NULL */
                      const void *weight,   /* (V,C) real */
                      size_t N, size_t C, size_t V, Device *device);

LAYER_TWINS(GemvForward, gemv_forward);
LAYER_TWINS(GemvHead, gemv_head);

#ifdef __cplusplus
}
#endif
#endif
