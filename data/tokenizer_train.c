#include "data/tokenizer_train.h"

#include "data/bpe_train.h"
#include "runtime/error.h"
#include "runtime/progress.h"

/* These bound the memory to about 2.5 GB, most of it for the lists of the words that hold a pair. A
 * gigabyte of English and code has 1.3 million distinct words and takes 0.7 GB. */
static const size_t most_words = (size_t)4 << 20, most_letters = (size_t)64 << 20;

/* Rarer pairs are no use to a model. */
static const uint64_t least_count = 2;

static bool count_file(WordCounts *counts, const char *path, TextFormat format,
                       const Tokenizer *cutter, Progress *progress, uint64_t *text_bytes) {
    TextSource *source = text_open(path, format, cutter);
    if (source == NULL) return false;
    uint64_t before = *text_bytes;
    TextPiece piece;
    int got;
    bool good = true;
    while (good && (got = text_next(source, &piece)) != 0) {
        good = got > 0 && word_counts_add(counts, piece.text, piece.bytes);
        *text_bytes = before + text_place(source).bytes;
        progress_show(progress, *text_bytes);
    }
    text_close(source);
    return good;
}

static bool count_files(WordCounts *counts, const Paths *inputs, TextFormat format,
                        uint64_t *text_bytes) {
    /* Without merges it still knows where words end. */
    Tokenizer *cutter = tokenizer_bpe(NULL, 0, NULL, 0);
    Progress progress = progress_begin("counting words", "B", 0, 0);
    bool good = cutter != NULL;
    for (size_t i = 0; good && i < inputs->count; i++)
        good = count_file(counts, inputs->path[i], format, cutter, &progress, text_bytes);
    progress_end(&progress);
    tokenizer_free(cutter);
    if (good && counts->words.count == 0)
        good = error_set("%s: there is no text to learn from", inputs->path[0]);
    return good;
}

Tokenizer *tokenizer_train(const Paths *inputs, TextFormat format, size_t V,
                           TokenizerTraining *training) {
    static const char *const special[] = {"<|endoftext|>"};
    WordCounts counts;
    BpeVocabulary vocabulary;
    Tokenizer *tokenizer = NULL;
    word_counts_begin(&counts, most_words, most_letters);
    *training = (TokenizerTraining){0};
    if (count_files(&counts, inputs, format, &training->text_bytes) &&
        bpe_train(&counts, V - 1, least_count, &vocabulary)) {
        const int32_t(*merges)[2] = (const int32_t(*)[2])vocabulary.merge;
        tokenizer = tokenizer_bpe(merges, vocabulary.tokens.count - 256, special, 1);
        bpe_vocabulary_free(&vocabulary);
    }
    training->words = counts.total;
    training->distinct_words = counts.words.count;
    training->dropped_words = counts.dropped;
    word_counts_free(&counts);
    return tokenizer;
}
