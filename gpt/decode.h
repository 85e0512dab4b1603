/* The model one token at a time: the keys and values of earlier tokens are kept, so that the next
 * token costs one row of the model, and the token is drawn on the device, so that the step after it
 * needs no word from the host. On a GPU a step is one replay of a recorded graph. */
#ifndef GPT_DECODE_H
#define GPT_DECODE_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct GptDecoder GptDecoder;

/* Sequences at most, since a step's tokens are fetched together. */
#define GPT_DECODER_SEQUENCES (DEVICE_FETCH_BYTES / sizeof(int32_t))

/* A decoder of B sequences, whose context is the T of the model's options. It takes its memory from
 * the device, mostly 2 L C values a token for the keys and values; NULL with error_message() if
 * there is not enough. The model must outlive it. */
GptDecoder *gpt_decoder_create(Gpt *model, size_t B, const Sampling *sampling);
void gpt_decoder_free(GptDecoder *decoder); /* NULL is allowed */

/* All sequences become tokens[0..n), n >= 1; the last T of them are read. */
void gpt_decoder_start(GptDecoder *decoder, const int32_t *tokens, size_t n);

/* The next token of each sequence, drawn as layers/sample.h says, which becomes part of it: draw
 * number n follows n tokens. On a GPU later steps are under way when this returns.
 *
 * Where T tokens are full, learned positions leave no way to shift what is cached: the last T/2 of
 * them are read again from position 0 and the text goes on from there. */
void gpt_decoder_next(GptDecoder *decoder, int32_t *tokens /* (B) */);

#ifdef __cplusplus
}
#endif
#endif
