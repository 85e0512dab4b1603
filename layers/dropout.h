/* out = x m / (1 - p), with the 0/1 mask m of runtime/random.h (Srivastava et al. 2014). The
 * backward is the same function on the gradient, so there is one. */
#ifndef LAYERS_DROPOUT_H
#define LAYERS_DROPOUT_H

#include "runtime/device.h"
#include "runtime/random.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out may alias x. */
typedef void DropoutForward(void *out /* (n) real */, const void *x /* (n) real */, size_t n,
                            Dropout dropout, Device *device);

LAYER_TWINS(DropoutForward, dropout_forward);

#ifdef __cplusplus
}
#endif
#endif
