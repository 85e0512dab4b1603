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

LAYER_TWINS(EmbeddingForward, embedding_forward);
LAYER_TWINS(EmbeddingBackward, embedding_backward);

#ifdef __cplusplus
}
#endif
#endif
