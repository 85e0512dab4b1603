/* Normals by Box-Muller (1958), and permutations by a Feistel network with cycle walking (Black,
 * Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), both over Philox.
 *
 * The last word of a counter tells the uses apart: 0 and 1 are dropout's. */
#include "runtime/random.h"

#include <math.h>

enum { COUNTER_NORMAL = 2, COUNTER_PERMUTE = 3 };

/* Two independent normals from 64 bits: sqrt(-2 ln u) (cos 2πv, sin 2πv), u in (0, 1]. All 32 bits
 * of u are used, so that the tails reach 6.7 deviations. */
static void box_muller(uint32_t u_bits, uint32_t v_bits, float deviation, float *a, float *b) {
    float u = ((float)u_bits + 0.5f) * (1.0f / 4294967296.0f);
    float angle = 6.28318531f * random_uniform(v_bits);
    float radius = deviation * sqrtf(-2.0f * logf(u));
    *a = radius * cosf(angle);
    *b = radius * sinf(angle);
}

/* A draw gives four values: value i is number i % 4 of draw i / 4. */
void random_normal(float *values, size_t n, uint64_t key, float deviation) {
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < n; first += 4) {
        uint64_t place = first / 4;
        Philox draw = philox(key, (uint32_t)place, (uint32_t)(place >> 32), 0, COUNTER_NORMAL);
        float normals[4];
        box_muller(draw.word[0], draw.word[1], deviation, &normals[0], &normals[1]);
        box_muller(draw.word[2], draw.word[3], deviation, &normals[2], &normals[3]);
        for (size_t i = 0; i < 4 && first + i < n; i++) values[first + i] = normals[i];
    }
}

/* One pass of the network permutes the numbers of 2·half_bits bits: (left, right) becomes
 * (right, left ^ f(right)) each round, which can be undone whatever f is. Four rounds of a random f
 * suffice for wide halves (Luby, Rackoff 1988); eight also mix halves of a bit or two. */
static uint64_t feistel(uint64_t i, unsigned half_bits, uint64_t key) {
    uint64_t mask = ((uint64_t)1 << half_bits) - 1;
    uint64_t left = i >> half_bits, right = i & mask;
    for (uint32_t round = 0; round < 8; round++) {
        Philox f = philox(key, (uint32_t)right, round, 0, COUNTER_PERMUTE);
        uint64_t swapped = left ^ (f.word[0] & mask);
        left = right;
        right = swapped;
    }
    return left << half_bits | right;
}

uint64_t random_permute(uint64_t i, uint64_t n, uint64_t key) {
    unsigned half_bits = 0;
    while (half_bits < 32 && (n - 1) >> (2 * half_bits)) half_bits++;
    /* The walk goes along i's cycle, so it comes back below n, at i itself if nowhere sooner; the
     * domain is less than 4 n, so after fewer than 4 steps on average. */
    do i = feistel(i, half_bits, key);
    while (i >= n);
    return i;
}
