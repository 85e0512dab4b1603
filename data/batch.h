/* Pieces of text, collected and then encoded by all threads, each for itself. */
#ifndef DATA_BATCH_H
#define DATA_BATCH_H

#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t start, bytes; /* of its text in the batch's */
    int32_t *ids;        /* (count) */
    size_t count;
    int tag;          /* for the caller */
    const char *path; /* for messages: the file, and where in it the piece is */
    const char *unit; /* "byte" or "line" */
    uint64_t place;
} BatchPiece;

/* All zeros is an empty batch. */
typedef struct {
    char *text;
    size_t bytes, text_capacity;
    BatchPiece *piece;
    size_t pieces, capacity;
} Batch;

/* Adds a copy of the text and gives its piece, valid until the next addition, to be filled in by
 * the caller. NULL with error_message(). */
BatchPiece *batch_add(Batch *batch, const char *text, size_t bytes);
/* `special`: as tokenizer_encode_special. False with error_message(), that of the first piece that
 * fails. */
bool batch_encode(Batch *batch, const Tokenizer *tokenizer, bool special);
/* Makes it empty; its memory stays. */
void batch_clear(Batch *batch);
void batch_free(Batch *batch);

#ifdef __cplusplus
}
#endif
#endif
