/* What a run trains on: a text file, encoded here and split in two, or token shards. */
#ifndef DATA_CORPUS_H
#define DATA_CORPUS_H

#include "data/dataset.h"
#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Tokenizer *tokenizer; /* NULL for shards that have none beside them */
    size_t V;
    Dataset *train;
    Dataset *validation; /* NULL if there is none */
} Corpus;

/* Whether the path names token shards: a directory, a file ending in .bin, or, where there is no
 * file of that name, a glob. */
bool corpus_is_shards(const char *path);

/* A text, neither gzipped nor JSON lines: `tokenizer` is used and owned if not NULL (a checkpoint's), else the one that `name`
 * says is made: "char", "bytes", or that of a directory. A large text with a BPE tokenizer is
 * tokenized into a cache (data/token_cache.h). The last `fraction` of the tokens is for
 * validation. */
bool corpus_open_text(Corpus *corpus, const char *path, Tokenizer *tokenizer, const char *name,
                      double fraction);

typedef enum { CORPUS_SHARDS, CORPUS_NANOGPT } CorpusFormat;

/* Shards with tokens below V; validation may be NULL. A directory that `train_gpt tokenize` made
 * has its own tokenizer, V and validation, and one of nanoGPT has train.bin and val.bin. */
bool corpus_open_shards(Corpus *corpus, CorpusFormat format, const char *train,
                        const char *validation, size_t V);
void corpus_close(Corpus *corpus);

#ifdef __cplusplus
}
#endif
#endif
