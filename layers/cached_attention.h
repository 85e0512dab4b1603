/* Attention of each sequence's newest query over all its keys, which a cache keeps, so that a token
 * costs one row of the model instead of a whole context:
 *
 *   o = softmax(q Kᵀ / sqrt(HS)) V  for each head,  K, V = the cached rows and the new one
 *
 * The cache of a layer is (B,T,2,NH,HS): a token's keys, then its values. positions (B) says on the
 * device how many rows a sequence has, so the host need not know to give the work. */
#ifndef LAYERS_CACHED_ATTENTION_H
#define LAYERS_CACHED_ATTENTION_H

#include <stdint.h>

#include "runtime/device.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Row t < n of the sequences first … first + count - 1 becomes the keys and values of row t of qkv,
 * which an ordinary forward of one sequence left. */
typedef void CacheStore(void *cache,     /* (B,T,2,C) real */
                        const void *qkv, /* (n,3,C) real */
                        size_t first, size_t count, size_t n, size_t T, size_t C, Device *device);

/* Row positions[b] of the cache becomes that of qkv; then o as above over rows 0 … positions[b]. */
typedef void CachedAttentionForward(void *out,                /* (B,NH,HS) real */
                                    void *cache,              /* (B,T,2,NH,HS) real */
                                    const void *qkv,          /* (B,3,NH,HS) real */
                                    const int32_t *positions, /* (B), each < T */
                                    void *workspace, /* zero before the first call that uses it */
                                    size_t B, size_t T, size_t NH, size_t HS, Device *device);
/* Bytes of the workspace. */
typedef size_t CachedAttentionWorkspace(size_t B, size_t T, size_t NH, size_t HS);

LAYER_TWINS(CacheStore, cache_store);
LAYER_TWINS(CachedAttentionForward, cached_attention_forward);
LAYER_TWINS(CachedAttentionWorkspace, cached_attention_workspace);

#ifdef __cplusplus
}
#endif
#endif
