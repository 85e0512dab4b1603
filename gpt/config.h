/* The table of a configuration's tensors: private to gpt/. */
#ifndef GPT_CONFIG_H
#define GPT_CONFIG_H

#include <math.h>

#include "gpt/gpt.h"

/* The name of an untied head's tensor, the only one outside Hugging Face's "transformer.". */
#define GPT_HEAD "lm_head.weight"

typedef struct {
    GptTensor *tensors; /* gpt_table_capacity entries, the caller's */
    size_t count;
    size_t elements; /* of an arena: a multiple of ADAMW_CHUNK */
} GptTable;

size_t gpt_table_capacity(const GptConfig *config);
/* Fills the table: the embeddings, block after block, the last layernorm, the head if it is untied. */
void gpt_table(GptTable *table, const GptConfig *config);

#endif
