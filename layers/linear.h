/* out = x W + b, optionally followed by GELU. BLAS on the CPU, cuBLASLt on CUDA.
 *
 * W is stored as Hugging Face stores it: (IC,OC) in the blocks (Conv1D), (OC,IC) in the head, which
 * is the token embedding. */
#ifndef LAYERS_LINEAR_H
#define LAYERS_LINEAR_H

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { WEIGHT_IN_OUT, WEIGHT_OUT_IN } WeightLayout;

typedef void LinearForward(void *out,      /* (N,OC) real */
                           void *pre_gelu, /* (N,OC) real, or NULL; if given it receives x W + b */
                                           /* and out = gelu(x W + b)                            */
                           const void *x,  /* (N,IC) real */
                           const void *weight, /* real, by layout */
                           const void *bias,   /* (OC) real, or NULL */
                           size_t N, size_t IC, size_t OC, WeightLayout layout, Device *device);

/* dx = dout Wᵀ; dW += xᵀ dout; db += the sum of dout's rows. With pre_gelu, x was gelu(pre_gelu) and
 * dx is the gradient of pre_gelu: (dout Wᵀ) gelu'(pre_gelu). dx must not alias its inputs. */
typedef void LinearBackward(void *dx,             /* (N,IC) real, =, or NULL */
                            void *dweight,        /* acc, by layout, += */
                            void *dbias,          /* (OC) acc, +=, or NULL */
                            const void *dout,     /* (N,OC) real */
                            const void *x,        /* (N,IC) real */
                            const void *weight,   /* real, by layout */
                            const void *pre_gelu, /* (N,IC) real, or NULL */
                            size_t N, size_t IC, size_t OC, WeightLayout layout, Device *device);

LAYER_TWINS(LinearForward, linear_forward);
LAYER_TWINS(LinearBackward, linear_backward);

#ifdef __cplusplus
}
#endif
#endif
