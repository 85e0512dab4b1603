/* Text to token ids and back. Three kinds: characters (the distinct Unicode characters of a text,
 * in code point order), bytes (V = 256) and GPT-2's byte-level BPE (data/bpe.h). All are written as
 * Hugging Face tokenizer.json, which the tokenizers library loads and encodes with identically.
 *
 * A tokenizer is not changed by use: threads may encode and decode with one at the same time. */
#ifndef DATA_TOKENIZER_H
#define DATA_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/sha256.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

Tokenizer *tokenizer_bytes(void);
/* NULL with error_message() if the text is empty or not UTF-8 (the message gives the byte
 * offset). */
Tokenizer *tokenizer_characters(const char *text, size_t bytes);

/* Byte-level BPE: ids 0 to 255 are the bytes in GPT-2's order, where '!' is 0; each merge joins two
 * tokens, given by their ids, into the next id, or into an earlier token if there is one of these
 * bytes; the special tokens come last. */
Tokenizer *tokenizer_bpe(const int32_t (*merges)[2], size_t merge_count, const char *const *special,
                         size_t special_count);

/* Reads DIR/tokenizer.json, or where there is none DIR/vocab.json and DIR/merges.txt as GPT-2 has
 * them, in which "<|endoftext|>" is special. */
Tokenizer *tokenizer_load(const char *directory);
/* Writes DIR/tokenizer.json. */
bool tokenizer_save(const Tokenizer *tokenizer, const char *directory);
/* The SHA-256 of that file. */
bool tokenizer_hash(const Tokenizer *tokenizer, char sha256[SHA256_HEX_BYTES]);
void tokenizer_free(Tokenizer *tokenizer);

const char *tokenizer_kind(const Tokenizer *tokenizer); /* "char", "bytes", "bpe" */
size_t tokenizer_vocabulary(const Tokenizer *tokenizer);

/* The id of the special token of this name, such as "<|endoftext|>"; -1 if there is none. */
int32_t tokenizer_special(const Tokenizer *tokenizer, const char *name);

/* The ids of the text in a malloc'd array that the caller frees; *count receives their number. NULL
 * with error_message() naming the character and its offset if one is not in the vocabulary. Large
 * texts are encoded by all OpenMP threads, with the same result.
 *
 * To _encode the names of special tokens are text like any other: for training data, where a
 * document must not be able to end itself. To _encode_special they are these tokens, which is what
 * Hugging Face's encode() does: for prompts. (Added tokens that are not special are found by
 * both.) */
int32_t *tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes,
                          size_t *count);
int32_t *tokenizer_encode_special(const Tokenizer *tokenizer, const char *text, size_t bytes,
                                  size_t *count);

/* The largest n <= bytes that is sure to be a place where text[0..n) and text[n..), with whatever
 * follows, may be encoded one after the other and give the ids of the whole; 0 if there is none.
 * For texts that are read in pieces. */
size_t tokenizer_cut(const Tokenizer *tokenizer, const char *text, size_t bytes);

/* The bytes of one token, *bytes of them, valid as long as the tokenizer; not NUL-terminated. ""
 * for an id out of range. */
const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t id, size_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
