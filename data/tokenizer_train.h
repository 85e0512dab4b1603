/* Learns a byte-level BPE tokenizer from texts: words are counted as the files are read, in bounded
 * memory (data/word_counts.h), then merges are learnt from the counts (data/bpe_train.h). */
#ifndef DATA_TOKENIZER_TRAIN_H
#define DATA_TOKENIZER_TRAIN_H

#include "data/paths.h"
#include "data/text_source.h"
#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t text_bytes, words;
    uint64_t distinct_words; /* that merges were learnt from */
    uint64_t dropped_words;  /* occurrences of rare words that were dropped for memory */
} TokenizerTraining;

/* At most V tokens, at least 257: the bytes in GPT-2's order, the merged ones, "<|endoftext|>"
 * last, as GPT-2 and llm.c have it. Fewer if no pair of tokens is left that occurs twice. NULL
 * with error_message(). */
Tokenizer *tokenizer_train(const Paths *inputs, TextFormat format, size_t V,
                           TokenizerTraining *training);

#ifdef __cplusplus
}
#endif
#endif
