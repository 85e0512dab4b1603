#include "data/batch.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

static bool reserve(Batch *batch, size_t bytes) {
    if (bytes > batch->text_capacity - batch->bytes) {
        size_t capacity = 2 * batch->bytes + bytes + 4096;
        char *text = realloc(batch->text, capacity);
        if (text == NULL) return false;
        batch->text = text;
        batch->text_capacity = capacity;
    }
    if (batch->pieces == batch->capacity) {
        size_t capacity = 2 * batch->capacity + 64;
        BatchPiece *piece = realloc(batch->piece, capacity * sizeof *piece);
        if (piece == NULL) return false;
        batch->piece = piece;
        batch->capacity = capacity;
    }
    return true;
}

BatchPiece *batch_add(Batch *batch, const char *text, size_t bytes) {
    if (!reserve(batch, bytes)) {
        error_set("no memory for %zu bytes of text", batch->bytes + bytes);
        return NULL;
    }
    if (bytes > 0) memcpy(batch->text + batch->bytes, text, bytes);
    BatchPiece *piece = &batch->piece[batch->pieces++];
    *piece = (BatchPiece){.start = batch->bytes, .bytes = bytes};
    batch->bytes += bytes;
    return piece;
}

/* Sentences are recorded by thread, so the one of the first piece that fails is carried to the
 * caller's. */
bool batch_encode(Batch *batch, const Tokenizer *tokenizer, bool special) {
    size_t failed = batch->pieces;
    char *sentence = NULL;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < batch->pieces; i++) {
        BatchPiece *piece = &batch->piece[i];
        const char *text = batch->text + piece->start;
        piece->ids = special
                         ? tokenizer_encode_special(tokenizer, text, piece->bytes, &piece->count)
                         : tokenizer_encode(tokenizer, text, piece->bytes, &piece->count);
        if (piece->ids == NULL) {
#pragma omp critical(batch_failed)
            if (i < failed) {
                failed = i;
                free(sentence);
                sentence = strdup(error_message());
            }
        }
    }
    if (failed < batch->pieces) {
        const BatchPiece *piece = &batch->piece[failed];
        error_set("%s, from %s %llu on: %s", piece->path, piece->unit,
                  (unsigned long long)piece->place, sentence != NULL ? sentence : "no memory");
    }
    free(sentence);
    return failed == batch->pieces;
}

void batch_clear(Batch *batch) {
    for (size_t i = 0; i < batch->pieces; i++) free(batch->piece[i].ids);
    batch->pieces = batch->bytes = 0;
}

void batch_free(Batch *batch) {
    batch_clear(batch);
    free(batch->text);
    free(batch->piece);
    *batch = (Batch){0};
}
