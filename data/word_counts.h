/* How often each word of a text occurs, a word being what GPT-2's pre-tokenizer splits off
 * (data/pretokenize.h), in bounded memory.
 *
 * When there are more distinct words than the limit, the rarest are dropped: all that were seen at
 * most k times since they were last new, with the smallest power of two k that leaves at most half
 * (in the manner of lossy counting, Manku and Motwani, VLDB 2002). A word's count is then low by at
 * most the sum of the ks. */
#ifndef DATA_WORD_COUNTS_H
#define DATA_WORD_COUNTS_H

#include "data/string_table.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    StringTable words;
    uint64_t *count; /* (capacity), words.count of them used */
    size_t capacity;
    size_t limit;            /* of distinct words */
    size_t byte_limit;       /* of their letters together */
    uint64_t total, dropped; /* occurrences seen; of them, those of dropped words */
    uint64_t threshold;      /* the sum of the ks */
} WordCounts;

void word_counts_begin(WordCounts *counts, size_t limit, size_t byte_limit);
/* Adds a text's words. It must end where a word ends. False with error_message(). */
bool word_counts_add(WordCounts *counts, const char *text, size_t bytes);
void word_counts_free(WordCounts *counts);

#ifdef __cplusplus
}
#endif
#endif
