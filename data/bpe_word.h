/* One word to tokens; see bpe.h for the rule. */
#ifndef DATA_BPE_WORD_H
#define DATA_BPE_WORD_H

#include "data/bpe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory that a thread uses for one word after another. All zeros is an empty one. */
typedef struct {
    struct BpeSymbol *symbol; /* (capacity) */
    uint64_t *heap;           /* (2 * capacity) */
    size_t capacity;
} BpeScratch;

void bpe_scratch_free(BpeScratch *scratch);

/* Writes the ids of the word, at most `bytes` of them, and their number. All its bytes must have
 * tokens. False if memory does not suffice, without a message. */
bool bpe_word(const Bpe *bpe, BpeScratch *scratch, const char *word, size_t bytes, int32_t *ids,
              size_t *count);

#ifdef __cplusplus
}
#endif
#endif
