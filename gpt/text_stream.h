/* Bytes of tokens on their way to a file: whole UTF-8 characters at a time, and nothing from the
 * stop text on. Private to gpt/. */
#ifndef GPT_TEXT_STREAM_H
#define GPT_TEXT_STREAM_H

#include <stdbool.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Zero-initialised but for file and until. */
typedef struct {
    FILE *file;
    const char *until; /* the stop text; "": none */
    char *held;        /* bytes that may yet become part of a character or of the stop text */
    size_t bytes, capacity;
} TextStream;

/* Writes what is now sure. False if the stop text has come: nothing more is to be added. */
bool text_stream_add(TextStream *stream, const char *text, size_t bytes);
/* Writes what is still held and frees the memory, not the file. */
void text_stream_end(TextStream *stream);

#ifdef __cplusplus
}
#endif
#endif
