/* AdamW (Loshchilov, Hutter 2019) with clipping by the global norm, over a whole arena at once:
 *
 *   g = grad · min(1, clip / (norm + 1e-6))
 *   m = β₁ m + (1-β₁) g,  v = β₂ v + (1-β₂) g²
 *   w = w - lr ( (m / (1-β₁ᵗ)) / (sqrt(v / (1-β₂ᵗ)) + eps) + λ w ),  λ = 0 where decay is 0
 *
 * The 1e-6 and the place of eps are PyTorch's. */
#ifndef LAYERS_ADAMW_H
#define LAYERS_ADAMW_H

#include <stdint.h>

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements that share one entry of decay; every tensor in an arena starts at a multiple of it. */
#define ADAMW_CHUNK 1024

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float clip;    /* largest global norm; 0: no clipping */
    uint64_t step; /* t, from 1 */
} AdamW;

/* If *norm is not finite nothing is changed: a bad step does not destroy the parameters. Without
 * separate master weights (real is acc) params and master are the same pointer. */
typedef void AdamwUpdate(void *params,         /* (n) real, = master rounded */
                         void *master,         /* (n) acc */
                         void *m,              /* (n) acc */
                         void *v,              /* (n) acc */
                         const void *grads,    /* (n) acc */
                         const uint8_t *decay, /* (n / ADAMW_CHUNK), 0 or 1 */
                         const void *norm,     /* (1) acc, the global norm of grads */
                         size_t n,             /* a multiple of ADAMW_CHUNK */
                         AdamW adamw, Device *device);

LAYER_TWINS(AdamwUpdate, adamw_update);

#ifdef __cplusplus
}
#endif
#endif
