#include "data/corpus.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/error.h"
#include "runtime/files.h"

#define TEXT_LIMIT ((size_t)4 << 30)

bool corpus_is_shards(const char *path) {
    size_t n = strlen(path);
    struct stat status;
    return (n > 4 && strcmp(path + n - 4, ".bin") == 0) || strpbrk(path, "*?[") ||
           (stat(path, &status) == 0 && S_ISDIR(status.st_mode));
}

/* A validation predicts tokens, each from those before it. */
static bool check_validation(const Corpus *corpus) {
    return !corpus->validation || dataset_tokens(corpus->validation) >= 2 ||
           error_set("the validation part has 1 token, and it needs at least 2 tokens");
}

/* A dataset of a copy of tokens[first..end). */
static Dataset *part(const int32_t *tokens, size_t first, size_t end, size_t V) {
    size_t count = end - first;
    int32_t *copy = malloc((count ? count : 1) * sizeof *copy);
    if (!copy) {
        error_set("out of host memory");
        return NULL;
    }
    memcpy(copy, tokens + first, count * sizeof *copy);
    return dataset_from_tokens(copy, count, V);
}

bool corpus_open_text(Corpus *corpus, const char *path, Tokenizer *tokenizer, const char *kind,
                      double fraction) {
    memset(corpus, 0, sizeof *corpus);
    corpus->tokenizer = tokenizer;
    size_t bytes, count = 0;
    int32_t *tokens = NULL;
    char *text = file_read(path, TEXT_LIMIT, &bytes);
    if (!text) {
        corpus_close(corpus);
        return false;
    }
    if (!corpus->tokenizer)
        corpus->tokenizer =
            strcmp(kind, "bytes") == 0 ? tokenizer_bytes() : tokenizer_characters(text, bytes);
    if (corpus->tokenizer) tokens = tokenizer_encode(corpus->tokenizer, text, bytes, &count);
    free(text);
    if (tokens) {
        size_t held_out = (size_t)((double)count * fraction);
        corpus->V = tokenizer_vocabulary(corpus->tokenizer);
        corpus->train = part(tokens, 0, count - held_out, corpus->V);
        if (fraction > 0 && held_out == 0)
            error_set(
                "%zu token%s are too few to hold out %g of them for validation; "
                "--val-fraction=0 trains on all",
                count, count == 1 ? "" : "s", fraction);
        else if (fraction > 0)
            corpus->validation = part(tokens, count - held_out, count, corpus->V);
    }
    free(tokens);
    bool good = tokens && corpus->train && (corpus->validation || fraction == 0) &&
                check_validation(corpus);
    if (!good) {
        error_set("%s: %s", path, error_message());
        corpus_close(corpus);
    }
    return good;
}

bool corpus_open_shards(Corpus *corpus, const char *train, const char *validation, size_t V) {
    memset(corpus, 0, sizeof *corpus);
    corpus->V = V;
    corpus->train = dataset_from_shards(train, V, false);
    if (corpus->train && validation) corpus->validation = dataset_from_shards(validation, V, false);
    if (corpus->train && (corpus->validation || !validation) && check_validation(corpus))
        return true;
    corpus_close(corpus);
    return false;
}

void corpus_close(Corpus *corpus) {
    tokenizer_free(corpus->tokenizer);
    dataset_close(corpus->train);
    dataset_close(corpus->validation);
    memset(corpus, 0, sizeof *corpus);
}
