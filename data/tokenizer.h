/* Text to token ids and back. Two kinds here: characters (the distinct Unicode characters of a
 * text, in code point order) and bytes (V = 256). Both are written as Hugging Face tokenizer.json,
 * which the tokenizers library loads and encodes with identically. */
#ifndef DATA_TOKENIZER_H
#define DATA_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

Tokenizer *tokenizer_bytes(void);
/* NULL with error_message() if the text is empty or not UTF-8 (the message gives the byte
 * offset). */
Tokenizer *tokenizer_characters(const char *text, size_t bytes);

/* Reads and writes DIR/tokenizer.json. */
Tokenizer *tokenizer_load(const char *directory);
bool tokenizer_save(const Tokenizer *tokenizer, const char *directory);
void tokenizer_free(Tokenizer *tokenizer);

const char *tokenizer_kind(const Tokenizer *tokenizer); /* "char" or "bytes" */
size_t tokenizer_vocabulary(const Tokenizer *tokenizer);

/* The ids of the text in a malloc'd array that the caller frees; *count receives their number. NULL
 * with error_message() naming the character and its offset if one is not in the vocabulary. */
int32_t *tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes,
                          size_t *count);
/* The bytes of one token, *bytes of them, valid as long as the tokenizer; not NUL-terminated. ""
 * for an id out of range. */
const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t id, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
