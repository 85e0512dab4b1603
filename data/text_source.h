/* The documents of a file, read piece by piece in bounded memory: of plain text or JSON lines,
 * either of them compressed with gzip or not (by content). */
#ifndef DATA_TEXT_SOURCE_H
#define DATA_TEXT_SOURCE_H

#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    TEXT_AUTO,  /* JSON lines if the name ends in .jsonl or .ndjson (before .gz), else plain */
    TEXT_PLAIN, /* the file is one document */
    TEXT_LINES, /* each line is one, without its line feed */
    TEXT_JSONL, /* each line is a JSON object whose "text" is one; blank lines are none */
} TextFormat;

typedef struct TextSource TextSource;

typedef struct {
    const char *text; /* valid until the next call */
    size_t bytes;
    bool ends; /* it is the last piece of its document */
} TextPiece;

/* Pieces of a plain document end where this tokenizer can be cut (tokenizer_cut), so their ids are
 * those of the whole. NULL with error_message(), as for a directory. */
TextSource *text_open(const char *path, TextFormat format, const Tokenizer *tokenizer);
void text_close(TextSource *source);
/* The format that a file is read in. */
TextFormat text_choose_format(const char *path, TextFormat format);

/* 1 and the next piece, 0 after the last, -1 with error_message(), which names the file and, of
 * lines, the line. A piece, and so a line, has at most 64 MiB. */
int text_next(TextSource *source, TextPiece *piece);

/* Plain: no piece goes past this place of the text, if it can be cut before it. */
void text_cut_before(TextSource *source, uint64_t place);

/* How far the uncompressed file is read; a source opened anew goes on from there, in that line. */
typedef struct {
    uint64_t bytes, lines;
} TextPlace;

TextPlace text_place(const TextSource *source);
bool text_seek(TextSource *source, TextPlace place);

#ifdef __cplusplus
}
#endif
#endif
