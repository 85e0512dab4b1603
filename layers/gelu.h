/* gelu(x) = x/2 (1 + tanh(sqrt(2/π) (x + 0.044715 x³))), GPT-2's form (Hendrycks, Gimpel 2016). */
#ifndef LAYERS_GELU_H
#define LAYERS_GELU_H

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void GeluForward(void *out /* (n) real */, const void *x /* (n) real */, size_t n,
                         Device *device);
/* dx = dout gelu'(x). dx may alias dout. */
typedef void GeluBackward(void *dx /* (n) real, = */, const void *dout /* (n) real */,
                          const void *x /* (n) real */, size_t n, Device *device);

LAYER_TWINS(GeluForward, gelu_forward);
LAYER_TWINS(GeluBackward, gelu_backward);

#ifdef __cplusplus
}
#endif
#endif
