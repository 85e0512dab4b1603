/* Tokens drawn from logits by a device's layer. */
#ifndef TEST_DRAW_TOKENS_H
#define TEST_DRAW_TOKENS_H

#include "layers/layers.h"
#include "runtime/device.h"

/* One draw for each of N rows of logits; draw number `first` of the first sequence, and so on. */
void draw_tokens(Device *device, const float *logits, size_t N, size_t V, Sampling sampling,
                 uint64_t first, int32_t *tokens);

#endif
