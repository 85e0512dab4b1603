/* What transformers reads beside a model when it writes or reads text: private to gpt/. */
#ifndef GPT_GENERATION_H
#define GPT_GENERATION_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The id of "<|endoftext|>" in the directory's tokenizer.json, below V; -1 if there is none. */
int32_t generation_end(const char *directory, size_t V);

/* Writes generation_config.json and, beside a tokenizer.json that has none, tokenizer_config.json.
 * end: of generation_end; T: the longest sequence. */
bool generation_write(const char *directory, int32_t end, size_t T);

#ifdef __cplusplus
}
#endif
#endif
