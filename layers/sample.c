/* Drawing tokens on the CPU, a sequence at a time. */
#include "layers/sample_rule.h"

/* The sum of the values >= bound, or their number. */
static uint64_t sum_from(const uint32_t *values, size_t n, uint32_t bound) {
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += values[i] >= bound ? values[i] : 0;
    return sum;
}

static uint64_t count_from(const uint32_t *values, size_t n, uint32_t bound) {
    uint32_t count = 0;
#pragma omp simd reduction(+ : count)
    for (size_t i = 0; i < n; i++) count += values[i] >= bound;
    return count;
}

/* The largest bound from which the values' measure is at least `least`, bit by bit. */
static uint32_t find_bound(uint64_t (*measure)(const uint32_t *, size_t, uint32_t),
                           const uint32_t *values, size_t n, uint64_t least) {
    uint32_t bound = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (measure(values, n, bound | bit) >= least) bound |= bit;
    return bound;
}

/* The first v whose running sum of the weights >= bound exceeds the target. */
static int32_t pick(const uint32_t *weights, uint32_t bound, uint64_t target) {
    size_t v = 0;
    for (uint64_t sum = 0;; v++) {
        sum += weights[v] >= bound ? weights[v] : 0;
        if (sum > target) return (int32_t)v;
    }
}

static int32_t draw(uint32_t *weights, const acc *logits, size_t V, const Sampling *sampling,
                    uint64_t n, size_t sequence) {
    size_t best = 0;
    for (size_t v = 0; v < V; v++) {
        weights[v] = sample_key((float)logits[v]);
        if (weights[v] > weights[best]) best = v;
    }
    if (!sample_key_finite(weights[best])) return -1;
    if (sampling->temperature == 0) return (int32_t)best;
    uint32_t bound = 0;
    if (sampling->top_k > 0 && sampling->top_k < V)
        bound = find_bound(count_from, weights, V, sampling->top_k);
    float most = (float)logits[best], temperature = sampling->temperature;
#pragma omp simd
    for (size_t v = 0; v < V; v++) {
        float x = ((float)logits[v] - most) / temperature;
        weights[v] = weights[v] >= bound ? sample_weight(x) : 0;
    }
    uint64_t total = sum_from(weights, V, 0);
    bound = 0;
    if (sampling->top_p < 1) {
        bound = find_bound(sum_from, weights, V, sample_nucleus(sampling->top_p, total));
        total = sum_from(weights, V, bound);
    }
    return pick(weights, bound, sample_random(sampling->seed, n, (uint32_t)sequence, total));
}

void LAYER(sample_forward)(int32_t *tokens, int32_t *positions, uint64_t *draws, uint32_t *weights,
                           const void *logits_, size_t N, size_t V, Sampling sampling,
                           Device *device) {
    (void)device;
    const acc *logits = logits_;
#pragma omp parallel for schedule(static) if (N > 1)
    for (size_t n = 0; n < N; n++) {
        tokens[n] = draw(weights + n * V, logits + n * V, V, &sampling, draws[n], n);
        positions[n]++;
        draws[n]++;
    }
}
