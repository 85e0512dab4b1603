#include "data/word_counts.h"

#include <stdlib.h>
#include <string.h>

#include "data/pretokenize.h"
#include "runtime/error.h"

void word_counts_begin(WordCounts *counts, size_t limit, size_t byte_limit) {
    *counts = (WordCounts){.limit = limit, .byte_limit = byte_limit};
}

void word_counts_free(WordCounts *counts) {
    string_table_free(&counts->words);
    free(counts->count);
    *counts = (WordCounts){0};
}

static bool count_word(WordCounts *counts, const char *text, size_t bytes, uint64_t times) {
    uint32_t word, known = counts->words.count;
    if (!string_table_add(&counts->words, text, bytes, &word)) return false;
    if (counts->words.count > counts->capacity) {
        size_t capacity = counts->capacity + counts->capacity / 2 + 1024;
        uint64_t *count = realloc(counts->count, capacity * sizeof *count);
        if (count == NULL) return error_set("no memory for the counts of %zu words", capacity);
        counts->count = count;
        counts->capacity = capacity;
    }
    if (word == known) counts->count[word] = 0;
    counts->count[word] += times;
    return true;
}

/* The smallest power of two k such that the words seen more than k times are at most half of both
 * limits. */
static uint64_t choose_threshold(const WordCounts *counts) {
    for (uint64_t k = 1;; k *= 2) {
        size_t kept = 0, kept_bytes = 0, bytes;
        for (uint32_t i = 0; i < counts->words.count; i++) {
            if (counts->count[i] <= k) continue;
            string_table_get(&counts->words, i, &bytes);
            kept++;
            kept_bytes += bytes;
        }
        if (kept <= counts->limit / 2 && kept_bytes <= counts->byte_limit / 2) return k;
    }
}

static bool drop_rare(WordCounts *counts) {
    uint64_t k = choose_threshold(counts);
    WordCounts kept;
    word_counts_begin(&kept, counts->limit, counts->byte_limit);
    kept.total = counts->total;
    kept.dropped = counts->dropped;
    kept.threshold = counts->threshold + k;
    bool good = true;
    for (uint32_t i = 0; good && i < counts->words.count; i++) {
        size_t bytes;
        const char *word = string_table_get(&counts->words, i, &bytes);
        if (counts->count[i] <= k)
            kept.dropped += counts->count[i];
        else
            good = count_word(&kept, word, bytes, counts->count[i]);
    }
    word_counts_free(counts);
    *counts = kept;
    return good;
}

bool word_counts_add(WordCounts *counts, const char *text, size_t bytes) {
    for (size_t at = 0, length; at < bytes; at += length) {
        length = pretokenize_word(text + at, bytes - at);
        if (!count_word(counts, text + at, length, 1)) return false;
        counts->total++;
        bool full =
            counts->words.count > counts->limit || counts->words.text_bytes > counts->byte_limit;
        if (full && !drop_rare(counts)) return false;
    }
    return true;
}
