/* Random numbers by counter: the value at a place is a pure function of a 64-bit key and the place,
 * so the backward pass regenerates the forward's dropout mask, and a resumed run continues exactly.
 *
 * Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., "Parallel random numbers:
 * as easy as 1, 2, 3", SC 2011, table 2). Usable from C and from CUDA kernels. */
#ifndef RUNTIME_RANDOM_H
#define RUNTIME_RANDOM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define RANDOM_FUNCTION static __host__ __device__ __forceinline__
#else
#define RANDOM_FUNCTION static inline
#endif

/* 128 random bits for one (key, counter). Byte i of the draw, 0 <= i < 16, is
 * (word[i / 4] >> 8 * (i % 4)) & 255. */
typedef struct {
    uint32_t word[4];
} Philox;

RANDOM_FUNCTION Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 7; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox draw = {{c0, c1, c2, c3}};
    return draw;
}

RANDOM_FUNCTION unsigned philox_byte(const Philox *draw, int i) {
    return (draw->word[i / 4] >> (8 * (i % 4))) & 255u;
}

/* A 64-bit mixing function (SplitMix64's finaliser): keys for independent uses from one seed. */
RANDOM_FUNCTION uint64_t random_mix(uint64_t seed, uint64_t use) {
    uint64_t z = seed + (use + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Dropout. One byte decides one element: it is dropped if byte < threshold, with threshold =
 * round(256 p), and kept elements are scaled by 256 / (256 - threshold). The probability is thus
 * rounded to a multiple of 1/256 and the expectation is exact.
 *
 * Elementwise (layers): element i takes byte i % 16 of philox(key, low32(i/16), high32(i/16), 0, 0).
 *
 * Attention: the score of query i and key j of head h of batch b (bh = b*NH + h) takes byte
 * 2*((j/8) % 8) + j % 2 of philox(key, 4*(j/64) + (j % 8)/2, i, bh, 1): the 16 bytes of a draw are
 * the 16 columns of a 64-wide tile that one lane of a tensor-core accumulator holds in one row. */
typedef struct {
    float probability; /* 0: no dropout */
    uint64_t key;
} Dropout;

RANDOM_FUNCTION unsigned dropout_threshold(float probability) {
    return (unsigned)(256.0f * probability + 0.5f);
}

RANDOM_FUNCTION float dropout_scale(float probability) {
    return 256.0f / (256.0f - (float)dropout_threshold(probability));
}

RANDOM_FUNCTION Philox dropout_draw(uint64_t key, uint64_t i) {
    return philox(key, (uint32_t)(i / 16), (uint32_t)(i / 16 >> 32), 0, 0);
}

RANDOM_FUNCTION Philox dropout_attention_draw(uint64_t key, uint32_t bh, uint32_t i, uint32_t j) {
    return philox(key, 4 * (j / 64) + (j % 8) / 2, i, bh, 1);
}

RANDOM_FUNCTION int dropout_attention_byte(uint32_t j) { return (int)(2 * ((j / 8) % 8) + j % 2); }

/* A uniform float in [0, 1) with 24 bits. */
RANDOM_FUNCTION float random_uniform(uint32_t bits) {
    return (float)(bits >> 8) * (1.0f / 16777216.0f);
}

#ifdef __cplusplus
extern "C" {
#endif

/* values[0..n) = independent normals of mean 0 and this deviation; value i depends only on key and
 * i. In parallel. */
void random_normal(float *values, size_t n, uint64_t key, float deviation);

/* The image of i under a pseudo-random permutation of 0..n-1 chosen by key (a Feistel network on
 * the next even power of two, walked until it lands below n). No memory, so any place of a shuffled
 * order is reached at once. */
uint64_t random_permute(uint64_t i, uint64_t n, uint64_t key);

#ifdef __cplusplus
}
#endif
#endif
