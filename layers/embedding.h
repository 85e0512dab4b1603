/* out[n] = dropout(wte[tokens[n]] + wpe[n mod T]): token and position embeddings. */
#ifndef LAYERS_EMBEDDING_H
#define LAYERS_EMBEDDING_H

#include <stdint.h>

#include "runtime/device.h"
#include "runtime/random.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef void EmbeddingForward(void *out,             /* (B,T,C) real */
                              const int32_t *tokens, /* (B,T), each in [0, V) */
                              const void *wte,       /* (V,C) real */
                              const void *wpe,       /* (T,C) real */
                              size_t B, size_t T, size_t C, Dropout dropout, Device *device);

/* Sums in an order that does not depend on timing, so equal inputs give equal bits. */
typedef void EmbeddingBackward(void *dwte,       /* (V,C) acc, += */
                               void *dwpe,       /* (T,C) acc, += */
                               const void *dout, /* (B,T,C) real */
                               const int32_t *tokens, size_t B, size_t T, size_t C, size_t V,
                               Dropout dropout, Device *device);

/* out[n] = wte[tokens[n]] + wpe[positions[n]]: one token of each of N sequences, each at a place of
 * its own. A negative token, which stands for none, reads row 0. */
typedef void EmbeddingStep(void *out,                /* (N,C) real */
                           const int32_t *tokens,    /* (N) */
                           const int32_t *positions, /* (N) */
                           const void *wte, const void *wpe, size_t N, size_t C, Device *device);

LAYER_TWINS(EmbeddingForward, embedding_forward);
LAYER_TWINS(EmbeddingStep, embedding_step);
LAYER_TWINS(EmbeddingBackward, embedding_backward);

#ifdef __cplusplus
}
#endif
#endif
