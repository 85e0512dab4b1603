/* Texts to token shards: a directory with train_NNNNNN.bin, val_NNNNNN.bin (data/shard.h), the
 * tokenizer's tokenizer.json, and manifest.json, which says what went in and what came out.
 *
 * The files are looked at first (data/survey.h). Then they are read again, encoded by all threads,
 * and written into OUTPUT.tmp, which becomes OUTPUT when all is there. A run that was interrupted
 * is taken up by the next one with the same inputs, tokenizer and options, which ends in the same
 * bytes: OUTPUT.tmp/progress.json says how far it had come. A second process is refused. */
#ifndef DATA_TOKENIZE_H
#define DATA_TOKENIZE_H

#include <signal.h>
#include <stdio.h>

#include "data/paths.h"
#include "data/text_source.h"
#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the validation set is made of. */
typedef enum {
    SPLIT_AUTO,      /* of one plain text its end, else whole documents */
    SPLIT_END,       /* the end of each text; not for lines of JSON */
    SPLIT_DOCUMENTS, /* documents drawn by the seed and their numbers */
} TokenizeSplit;

typedef struct {
    const Paths *inputs;
    TextFormat format;
    const Tokenizer *tokenizer; /* its <|endoftext|>, if it has one, begins each document */
    bool special;               /* special tokens' names in the text are these tokens */
    const char *output;         /* free, or an empty directory, or what an equal call made */
    double val_fraction;        /* of the bytes of each text, or of the documents */
    TokenizeSplit split;
    uint64_t seed;
    size_t shard_tokens;
    const volatile sig_atomic_t *stop; /* NULL, or becomes nonzero to interrupt */
} TokenizeOptions;

typedef struct {
    uint64_t tokens, documents;
    size_t shards;
} TokenizePart;

typedef struct {
    uint64_t text_bytes;
    TokenizePart train, validation;
    bool was_complete; /* there was nothing to do */
    bool interrupted;
} TokenizeReport;

/* False with error_message(). */
bool tokenize(const TokenizeOptions *options, TokenizeReport *report);

/* Prints the ids of each line, or of each document of JSON lines, on a line. */
bool tokenize_print(const TokenizeOptions *options, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
