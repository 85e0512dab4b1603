/* Text from a model: prompts are continued token by token, several samples at once if wanted. */
#ifndef GPT_SAMPLE_H
#define GPT_SAMPLE_H

#include <signal.h>
#include <stdio.h>

#include "data/tokenizer.h"
#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Sampling sampling;
    size_t tokens;  /* of each sample, at most */
    size_t samples; /* at once. 1: written as it is drawn; more: one after the other, at the end */
    bool echo;      /* the prompt is written too */
    const char *until; /* a sample ends before this text; "" or NULL: there is none */
    FILE *file;
    const volatile sig_atomic_t *stop; /* nonzero: end with what there is; may be NULL */
} TextOptions;

/* A text that grows: what it was given and what the model made of it. The tokenizer's
 * "<|endoftext|>", if it has one, ends a sample. */
typedef struct GptText GptText;

/* Takes memory as gpt_decoder_create does; NULL with error_message(). */
GptText *gpt_text_open(Gpt *model, const Tokenizer *tokenizer, const TextOptions *options);
void gpt_text_close(GptText *text); /* NULL is allowed */

/* Appends `more` to the text, after a line break if it is not the beginning, and writes the text's
 * continuation; only whole UTF-8 characters at a time where the tokens' bytes make some. If nothing
 * has been given yet the text goes on from an "<|endoftext|>", a line break or token 0, the first
 * that exists. Several samples are each written with a line above, and the text itself goes on with
 * the first. False with error_message() if `more` cannot be encoded, which leaves the text as it
 * was, or the model's logits are not finite. */
bool gpt_text_continue(GptText *text, const char *more, size_t bytes);

/* Tokens in the text's last continuation, of all samples, and the seconds they took. */
void gpt_text_speed(const GptText *text, size_t *tokens, double *seconds);

/* The whole of it at once. */
bool gpt_write_text(Gpt *model, const Tokenizer *tokenizer, const char *prompt,
                    const TextOptions *options);

#ifdef __cplusplus
}
#endif
#endif
