/* Which keys a query sees, and so which tiles of scores need no work and which need a test. Plain
 * arithmetic, for C and for CUDA.
 *
 * Causal is aligned at the bottom right: the last query sees every key, so query i sees keys
 * j <= i + TK - TQ. A query sees a prefix of the keys and a key is seen by a suffix of the queries;
 * the two functions are the lengths of that prefix and the start of that suffix. */
#ifndef ATTENTION_MASK_H
#define ATTENTION_MASK_H

#include "attention/attention.h"

#ifdef __CUDACC__
#define MASK_FUNCTION static __host__ __device__ __forceinline__
#else
#define MASK_FUNCTION static inline
#endif

/* Query i < TQ sees keys 0 … keys_seen - 1; 0 if it sees none. */
MASK_FUNCTION size_t keys_seen(AttentionMask mask, size_t i, size_t TQ, size_t TK) {
    if (mask == ATTENTION_FULL) return TK;
    return i + 1 + TK > TQ ? i + 1 + TK - TQ : 0;
}

/* Key j < TK is seen by queries first_query … TQ - 1. */
MASK_FUNCTION size_t first_query(AttentionMask mask, size_t j, size_t TQ, size_t TK) {
    if (mask == ATTENTION_FULL) return 0;
    return j + TQ > TK ? j + TQ - TK : 0;
}

/* Keys [first, end) are all seen by all queries from q on: the tile needs no test per score. */
MASK_FUNCTION int all_seen(AttentionMask mask, size_t q, size_t end, size_t TQ, size_t TK) {
    return end <= keys_seen(mask, q, TQ, TK);
}

#endif
