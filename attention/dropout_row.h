/* What dropout multiplies the probabilities of one query by: 0, or the scale that keeps the
 * expectation. The places of the random bytes are fixed in runtime/random.h: one draw serves 16
 * keys out of 64, so a row is generated in blocks of 64 keys from four draws. */
#ifndef ATTENTION_DROPOUT_ROW_H
#define ATTENTION_DROPOUT_ROW_H

#include "runtime/random.h"
#include "runtime/real.h"

#define DROPOUT_BLOCK 64

/* factor[0 … 63] for keys first … first + 63 of query i, head bh = b*NH + h. first is a multiple of
 * 64. */
static inline void dropout_row(real factor[DROPOUT_BLOCK], Dropout dropout, size_t bh, size_t i,
                               size_t first) {
    const unsigned threshold = dropout_threshold(dropout.probability);
    const real scale = (real)dropout_scale(dropout.probability);
    Philox draw[4];
    for (uint32_t pair = 0; pair < 4; pair++)
        draw[pair] = dropout_attention_draw(dropout.key, (uint32_t)bh, (uint32_t)i,
                                            (uint32_t)first + 2 * pair);
    for (uint32_t j = 0; j < DROPOUT_BLOCK; j++) {
        unsigned byte = philox_byte(&draw[j % 8 / 2], dropout_attention_byte(j));
        factor[j] = byte < threshold ? 0 : scale;
    }
}

#endif
