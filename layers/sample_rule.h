/* The arithmetic of a draw, for the CPU and for CUDA: equal inputs give equal bits on both (on a CPU
 * with fused multiply-add; without, exp may differ in its last bit). */
#ifndef LAYERS_SAMPLE_RULE_H
#define LAYERS_SAMPLE_RULE_H

#include "layers/sample.h"
#include "runtime/random.h"
#include "runtime/vector_math.h"

/* Keys are ordered as the floats are; NaN is above all. */
#define SAMPLE_KEY_NAN 0xffffffffu
#define SAMPLE_KEY_INFINITY 0xff800000u

RANDOM_FUNCTION uint32_t sample_key(float logit) {
    uint32_t bits;
    memcpy(&bits, &logit, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return SAMPLE_KEY_NAN;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

RANDOM_FUNCTION float sample_logit(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float logit;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

/* Whether this is the key of a number that others can be compared with. */
RANDOM_FUNCTION int sample_key_finite(uint32_t key) {
    return key < SAMPLE_KEY_INFINITY && key > ~SAMPLE_KEY_INFINITY;
}

/* 2³¹ exp(x), rounded; x <= 0. */
RANDOM_FUNCTION uint32_t sample_weight(float x) {
    return (uint32_t)(exp_f32(x) * 2147483648.0f + 0.5f);
}

/* The least sum that a nucleus of this share must reach. */
RANDOM_FUNCTION uint64_t sample_nucleus(float top_p, uint64_t total) {
    uint64_t least = (uint64_t)((double)top_p * (double)total);
    return least == 0 ? 1 : least < total ? least : total;
}

/* A uniform integer in [0, total), total > 0: draw number n of this sequence. */
RANDOM_FUNCTION uint64_t sample_random(uint64_t seed, uint64_t n, uint32_t sequence,
                                       uint64_t total) {
    Philox bits = philox(seed, (uint32_t)n, (uint32_t)(n >> 32), sequence, 2);
    uint64_t random = (uint64_t)bits.word[1] << 32 | bits.word[0];
    return (uint64_t)(((unsigned __int128)random * total) >> 64);
}

#endif
