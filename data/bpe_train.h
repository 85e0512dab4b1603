/* Learning byte-level BPE merges (Sennrich, Haddow and Birch, ACL 2016, on bytes as in GPT-2).
 *
 * Every word begins as its bytes. Again and again the pair of neighbouring tokens that occurs most
 * often, over all words by their counts, is merged into one token. Of pairs that occur equally
 * often the one with the smaller left id is taken, then the one with the smaller right id: so
 * equal texts give equal tokenizers, and the merges are those that Hugging Face's BpeTrainer
 * learns. */
#ifndef DATA_BPE_TRAIN_H
#define DATA_BPE_TRAIN_H

#include "data/word_counts.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    StringTable tokens;  /* by id: the 256 bytes in GPT-2's order, then what each merge made */
    int32_t (*merge)[2]; /* (tokens.count - 256) */
} BpeVocabulary;

/* Merges until there are V tokens, at least 256, or no pair occurs `least` times. False with
 * error_message(). */
bool bpe_train(const WordCounts *counts, size_t V, uint64_t least, BpeVocabulary *vocabulary);
void bpe_vocabulary_free(BpeVocabulary *vocabulary);

#ifdef __cplusplus
}
#endif
#endif
