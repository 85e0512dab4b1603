/* Multiple-choice questions such as HellaSwag's, in llm.c's format and judged as llm.c does: of the
 * completions of a context, the model prefers the one whose tokens have the least mean loss.
 *
 * Little-endian: 256 int32, [0] 20240522, [1] 1, [2] number of examples, [3] bytes of the longest;
 * then the examples one after the other, in uint16: 65535, its bytes in all, its number from 0, the
 * right completion, the number of completions, the context's length and tokens, and each
 * completion's length and tokens. */
#ifndef GPT_MULTIPLE_CHOICE_H
#define GPT_MULTIPLE_CHOICE_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the file begins with the magic number. */
bool multiple_choice_is(const char *path);

/* The number of examples and of those where the model prefers the right completion. The whole file
 * is checked first: false with error_message() if it is damaged, or if an example has a token
 * beyond the vocabulary or is longer than the model's sequence. */
bool gpt_multiple_choice(Gpt *model, const char *path, size_t *correct, size_t *examples);

#ifdef __cplusplus
}
#endif
#endif
