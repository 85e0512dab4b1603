/* What a run trains on: a text file, encoded here and split in two, or token shards. */
#ifndef DATA_CORPUS_H
#define DATA_CORPUS_H

#include "data/dataset.h"
#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Tokenizer *tokenizer; /* NULL for shards */
    size_t V;
    Dataset *train;
    Dataset *validation; /* NULL if there is none */
} Corpus;

/* Whether the path names token shards: a directory, a glob, or a file ending in .bin. */
bool corpus_is_shards(const char *path);

/* A text: `tokenizer` is used and owned if not NULL (a checkpoint's), else one of this kind, "char" or
 * "bytes", is made. The last `fraction` of the tokens is for validation. */
bool corpus_open_text(Corpus *corpus, const char *path, Tokenizer *tokenizer, const char *kind,
                      double fraction);
/* Shards with tokens below V; validation may be NULL. */
bool corpus_open_shards(Corpus *corpus, const char *train, const char *validation, size_t V);
void corpus_close(Corpus *corpus);

#ifdef __cplusplus
}
#endif
#endif
