/* Byte-level BPE in Hugging Face's files: tokenizer.json, and GPT-2's vocab.json and merges.txt.
 * What these may say and this program does not do (a normalizer, another pre-tokenizer, dropout,
 * ...) is refused, so that what is read is encoded as the tokenizers library does. */
#ifndef DATA_BPE_FILES_H
#define DATA_BPE_FILES_H

#include <cjson/cJSON.h>
#include <stdio.h>

#include "data/bpe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `root` is a tokenizer.json with a BPE model; path is for messages. */
Bpe *bpe_from_json(const char *path, const cJSON *root);

/* In merges.txt every token but the bytes, and names in angle brackets such as "<|endoftext|>",
 * must be made by a merge: else it was cut short. "<|endoftext|>" is special. */
Bpe *bpe_from_vocab(const char *vocab_path, const char *merges_path);

void bpe_write_json(const Bpe *bpe, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
