/* Sampling from a model, one token after another. */
#ifndef GPT_SAMPLE_H
#define GPT_SAMPLE_H

#include <signal.h>

#include "data/tokenizer.h"
#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    float temperature; /* 0: the most probable token always */
    size_t top_k;      /* only the k most probable; 0: all */
    uint64_t seed;
} Sampling;

/* The token that follows tokens[0..n), n >= 1; the last T of them are read, T being the model's
 * context. Draw number n of the seed decides, so equal seeds give equal texts.
 * -1 if the logits are not finite. */
int32_t gpt_sample(Gpt *model, const int32_t *tokens, size_t n, const Sampling *sampling);

/* Writes the prompt (if it is empty: nothing, and the text goes on from a line break, or from token 0
 * where the vocabulary has none) and `count` tokens of its continuation to file as they are drawn; stops early when
 * *stop (may be NULL) becomes nonzero. False with error_message() if the prompt cannot be encoded. */
bool gpt_write_text(Gpt *model, const Tokenizer *tokenizer, const char *prompt, size_t count,
                    const Sampling *sampling, FILE *file, const volatile sig_atomic_t *stop);

#ifdef __cplusplus
}
#endif
#endif
