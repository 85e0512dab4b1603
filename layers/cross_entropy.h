/* loss[n] = log Σ_{v<V} exp(logits[n,v]) - logits[n,target[n]]: the classifier's loss, and its
 * gradient written over the logits, so that probabilities are never stored.
 *
 * Logits have Vp columns, V of them real: the padding gets no probability and no gradient. A row
 * whose target is negative is ignored: loss 0, gradient 0. */
#ifndef LAYERS_CROSS_ENTROPY_H
#define LAYERS_CROSS_ENTROPY_H

#include <stdint.h>

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void CrossEntropyForward(void *losses,           /* (N) acc, = */
                                 const void *logits,     /* (N,Vp) real */
                                 const int32_t *targets, /* (N), each < V */
                                 size_t N, size_t V, size_t Vp, Device *device);

/* The same losses, and logits = dloss (softmax(logits) - onehot(target)), 0 in the padding. */
typedef void CrossEntropyBackward(void *losses, /* (N) acc, = */
                                  void *logits, /* (N,Vp) real, in: logits, out: their gradient */
                                  const int32_t *targets, float dloss, size_t N, size_t V,
                                  size_t Vp, Device *device);

LAYER_TWINS(CrossEntropyForward, cross_entropy_forward);
LAYER_TWINS(CrossEntropyBackward, cross_entropy_backward);

#ifdef __cplusplus
}
#endif
#endif
