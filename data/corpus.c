#include "data/corpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/token_cache.h"
#include "data/tokenize_record.h"
#include "runtime/error.h"
#include "runtime/files.h"

#define TEXT_LIMIT ((size_t)4 << 30)

/* A smaller text is encoded in less than a second. */
static const off_t cached_bytes = (off_t)16 << 20;

bool corpus_is_shards(const char *path) {
    size_t n = strlen(path);
    struct stat status;
    if (n > 4 && strcmp(path + n - 4, ".bin") == 0) return true;
    return stat(path, &status) == 0 ? S_ISDIR(status.st_mode) : strpbrk(path, "*?[") != NULL;
}

/* A validation predicts tokens, each from those before it. */
static bool check_validation(const Corpus *corpus) {
    return !corpus->validation || dataset_tokens(corpus->validation) >= 2 ||
           error_set("the validation part has 1 token, and it needs at least 2 tokens");
}

/* ---- a text ---- */

/* The tokens of a text as a document: after the token that begins one, if there is such. */
static int32_t *encode_document(const Tokenizer *tokenizer, const char *text, size_t bytes,
                                size_t *count) {
    int32_t *tokens = tokenizer_encode(tokenizer, text, bytes, count);
    int32_t separator = tokenizer_special(tokenizer, "<|endoftext|>");
    if (tokens == NULL || separator < 0 || *count == 0) return tokens;
    int32_t *separated = realloc(tokens, (*count + 1) * sizeof *tokens);
    if (separated == NULL) {
        error_set("out of host memory");
        free(tokens);
        return NULL;
    }
    memmove(separated + 1, separated, *count * sizeof *separated);
    separated[0] = separator;
    ++*count;
    return separated;
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

/* How many of the tokens, the last ones, are for validation. */
static bool hold_out(size_t count, double fraction, size_t *held_out) {
    *held_out = (size_t)((double)count * fraction);
    return *held_out > 0 || fraction == 0 ||
           error_set(
               "%zu token%s are too few to hold out %g of them for validation; "
               "--val-fraction=0 trains on all",
               count, count == 1 ? "" : "s", fraction);
}

static bool encode_in_memory(Corpus *corpus, const char *path, const char *name, double fraction) {
    size_t bytes, count = 0, held_out = 0;
    int32_t *tokens = NULL;
    char *text = file_read(path, TEXT_LIMIT, &bytes);
    if (!text) return false;
    if (!corpus->tokenizer)
        corpus->tokenizer =
            strcmp(name, "bytes") == 0 ? tokenizer_bytes() : tokenizer_characters(text, bytes);
    if (corpus->tokenizer) tokens = encode_document(corpus->tokenizer, text, bytes, &count);
    free(text);
    bool good = tokens != NULL;
    if (good) {
        corpus->V = tokenizer_vocabulary(corpus->tokenizer);
        good = hold_out(count, fraction, &held_out) &&
               (corpus->train = part(tokens, 0, count - held_out, corpus->V)) != NULL;
    }
    if (good && held_out > 0)
        good = (corpus->validation = part(tokens, count - held_out, count, corpus->V)) != NULL;
    free(tokens);
    return good;
}

static bool open_cached(Corpus *corpus, const char *shards, double fraction) {
    size_t V = corpus->V = tokenizer_vocabulary(corpus->tokenizer), held_out;
    if (!(corpus->train = dataset_from_shards(shards, V, /*scan=*/false))) return false;
    size_t count = dataset_tokens(corpus->train);
    if (!hold_out(count, fraction, &held_out)) return false;
    dataset_restrict(corpus->train, 0, count - held_out);
    if (held_out == 0) return true;
    if (!(corpus->validation = dataset_from_shards(shards, V, /*scan=*/false))) return false;
    dataset_restrict(corpus->validation, count - held_out, held_out);
    return true;
}

static bool is_large(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size >= cached_bytes;
}

/* The shards of a text that is worth a cache; false if it is to be encoded in memory, as if there
 * is no place to keep them. */
static bool find_cached(const Corpus *corpus, const char *path, char shards[FILE_PATH_BYTES]) {
    if (!corpus->tokenizer || strcmp(tokenizer_kind(corpus->tokenizer), "bpe") != 0 ||
        !is_large(path))
        return false;
    if (token_cache_find(path, corpus->tokenizer, shards)) return true;
    fprintf(stderr, "the tokens of the text are not kept for the next run: %s\n", error_message());
    return false;
}

static bool ends_in(const char *path, const char *ending) {
    size_t n = strlen(path), m = strlen(ending);
    return n > m && strcmp(path + n - m, ending) == 0;
}

static bool is_gzip(const char *path) {
    struct stat status;
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return false;
    FILE *file = fopen(path, "rbe");
    bool gzip = file != NULL && fgetc(file) == 0x1f && fgetc(file) == 0x8b;
    if (file != NULL) fclose(file);
    return gzip;
}

/* Of anything else a model would learn the packing instead of the text. */
static bool check_plain(const char *path) {
    static const char *const json[] = {".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"};
    bool lines = false;
    for (size_t i = 0; i < sizeof json / sizeof json[0]; i++) lines |= ends_in(path, json[i]);
    return (!lines && !is_gzip(path)) ||
           error_set("%s is %s, not a plain text; use tokenize first, and then what it makes", path,
                     lines ? "JSON lines by its name" : "gzipped");
}

bool corpus_open_text(Corpus *corpus, const char *path, Tokenizer *tokenizer, const char *name,
                      double fraction) {
    memset(corpus, 0, sizeof *corpus);
    corpus->tokenizer = tokenizer;
    if (!check_plain(path)) {
        corpus_close(corpus);
        return false;
    }
    if (!tokenizer && strcmp(name, "bytes") != 0 && strcmp(name, "char") != 0 &&
        !(corpus->tokenizer = tokenizer_load(name)))
        return false;
    char shards[FILE_PATH_BYTES];
    bool good =
        (find_cached(corpus, path, shards) ? open_cached(corpus, shards, fraction)
                                           : encode_in_memory(corpus, path, name, fraction)) &&
        check_validation(corpus);
    if (!good) {
        error_set("%s: %s", path, error_message());
        corpus_close(corpus);
    }
    return good;
}

/* ---- shards ---- */

static bool has_file(const char *directory, const char *name) {
    char path[FILE_PATH_BYTES];
    return file_join(path, directory, name) && file_exists(path);
}

static Dataset *open_format(CorpusFormat format, const char *pattern, size_t V) {
    return format == CORPUS_NANOGPT ? dataset_from_nanogpt(pattern, V)
                                    : dataset_from_shards(pattern, V, /*scan=*/false);
}

/* A directory that holds both parts: patterns of their files, and the first one of validation,
 * which need not be there. */
typedef struct {
    const char *train, *validation, *first;
} Parts;

static bool open_parts(Corpus *corpus, CorpusFormat format, const char *directory, Parts parts) {
    char pattern[FILE_PATH_BYTES];
    if (!file_join(pattern, directory, parts.train) ||
        !(corpus->train = open_format(format, pattern, corpus->V)))
        return false;
    if (corpus->validation || !has_file(directory, parts.first)) return true;
    return file_join(pattern, directory, parts.validation) &&
           (corpus->validation = open_format(format, pattern, corpus->V)) != NULL;
}

static bool open_train(Corpus *corpus, CorpusFormat format, const char *train) {
    static const Parts ours = {"train_*.bin", "val_*.bin", "val_000000.bin"};
    static const Parts nanogpt = {"train.bin", "val.bin", "val.bin"};
    if (corpus->tokenizer) return open_parts(corpus, format, train, ours);
    if (format == CORPUS_NANOGPT && has_file(train, nanogpt.train))
        return open_parts(corpus, format, train, nanogpt);
    return (corpus->train = open_format(format, train, corpus->V)) != NULL;
}

bool corpus_open_shards(Corpus *corpus, CorpusFormat format, const char *train,
                        const char *validation, size_t V) {
    memset(corpus, 0, sizeof *corpus);
    corpus->V = V;
    bool good = true;
    if (format == CORPUS_SHARDS && has_file(train, "manifest.json")) {
        good = tokenize_check_shards(train) && (corpus->tokenizer = tokenizer_load(train)) != NULL;
        if (good) corpus->V = tokenizer_vocabulary(corpus->tokenizer);
    }
    if (good && validation)
        good = (corpus->validation = open_format(format, validation, corpus->V)) != NULL;
    good = good && open_train(corpus, format, train) && check_validation(corpus);
    if (!good) corpus_close(corpus);
    return good;
}

void corpus_close(Corpus *corpus) {
    tokenizer_free(corpus->tokenizer);
    dataset_close(corpus->train);
    dataset_close(corpus->validation);
    memset(corpus, 0, sizeof *corpus);
}
