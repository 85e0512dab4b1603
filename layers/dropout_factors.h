/* The factors of elementwise dropout, 0 or 1/(1-p), for the CPU layers that apply it. */
#ifndef LAYERS_DROPOUT_FACTORS_H
#define LAYERS_DROPOUT_FACTORS_H

#include "runtime/random.h"

/* Elements that callers ask for at a time: a few draws, and a buffer that stays in the first cache.
 * */
#define DROPOUT_TILE 256

/* factors[0..n) = those of elements first .. first + n of the tensor; all 1 without dropout. */
static inline void dropout_factors(float *factors, size_t first, size_t n, Dropout dropout) {
    unsigned threshold = dropout_threshold(dropout.probability);
    if (threshold == 0) {
        for (size_t i = 0; i < n; i++) factors[i] = 1;
        return;
    }
    float scale = dropout_scale(dropout.probability);
    for (size_t i = 0; i < n;) {
        size_t begin = (first + i) % 16;
        size_t count = n - i < 16 - begin ? n - i : 16 - begin;
        Philox draw = dropout_draw(dropout.key, first + i);
        for (size_t j = 0; j < count; j++)
            factors[i + j] = philox_byte(&draw, (int)(begin + j)) < threshold ? 0 : scale;
        i += count;
    }
}

#endif
