/* Small models for the tests. */
#ifndef TEST_MODEL_H
#define TEST_MODEL_H

#include "gpt/gpt.h"

/* As gpt_create, on one rank; the test fails if it fails. */
Gpt *create_model(const GptConfig *config, const GptOptions *options, Device *device);

/* Gives it random parameters so large that no gradient is negligible, that the tokens'
 * probabilities differ, and that the likeliest token is so by far. */
void randomize(Gpt *model);

/* A randomized one, for texts as long as its config's T. */
Gpt *random_model(Device *device, GptConfig config, size_t B, DataType type, GptUse use);

/* Whether the two have the same bits. */
bool same_arena(const Gpt *a, const Gpt *b, GptArena arena);

#endif
