/* Draws from logits: their frequencies against the rule's probabilities, what has no probabilities,
 * and CUDA's draws against the CPU's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/random.h"
#include "test/devices.h"
#include "test/draw_tokens.h"
#include "test/part.h"

/* Draws many times from one row and holds the counts against these probabilities. */
static void check_frequencies(Device *device, const float *logits, size_t V, Sampling sampling,
                              const double *expected) {
    enum { ALL = 10000, ROUNDS = 2 };
    const size_t N = part_of(ALL);
    float *rows = malloc(N * V * sizeof *rows);
    size_t *counts = calloc(V, sizeof *counts);
    int32_t tokens[ALL];
    for (size_t n = 0; n < N; n++) memcpy(rows + n * V, logits, V * sizeof *logits);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        draw_tokens(device, rows, N, V, sampling, round, tokens);
        for (size_t n = 0; n < N; n++) counts[tokens[n]]++;
    }
    for (size_t v = 0; v < V; v++) {
        /* Five deviations of a binomial; the seeds are fixed, so this holds always or never. */
        double mean = expected[v] * (double)(N * ROUNDS);
        double bound = 5 * sqrt(mean * (1 - expected[v]));
        if (!(fabs((double)counts[v] - mean) <= bound))
            fail_msg("token %zu: drawn %zu times, expected %.1f", v, counts[v], mean);
    }
    free(rows);
    free(counts);
}

static void check_draws(Device *device) {
    static const float logits[] = {1, 3, 2, 2, -5, 0, -INFINITY};
    enum { V = sizeof logits / sizeof logits[0] };
    double w[V], sum = 0, p[V];
    for (size_t v = 0; v < V; v++) sum += w[v] = exp((double)logits[v] / 0.7);
    for (size_t v = 0; v < V; v++) p[v] = w[v] / sum;
    check_frequencies(device, logits, V, (Sampling){0.7f, 1, 0, 3}, p);
    /* The two largest, and the one that is equal to the second; as a share: 0.64 + 2 · 0.15. */
    double kept = w[1] + w[2] + w[3];
    for (size_t v = 0; v < V; v++) p[v] = v >= 1 && v <= 3 ? w[v] / kept : 0;
    check_frequencies(device, logits, V, (Sampling){0.7f, 1, 2, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0.7f, 1, 3, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0.7f, 0.7f, 0, 3}, p);
    /* A share of what top_k has kept, not of all. */
    for (size_t v = 0; v < V; v++) p[v] = v == 1;
    check_frequencies(device, logits, V, (Sampling){0.7f, 0.6f, 3, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0.7f, 0, 0, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0, 1, 0, 3}, p);
    check_frequencies(device, logits, V, (Sampling){1e-42f, 1, 0, 3}, p);

    float bad[][3] = {
        {0, NAN, 1}, {0, -NAN, 1}, {0, INFINITY, 1}, {-INFINITY, -INFINITY, -INFINITY}, {5, 5, 5}};
    int32_t tokens[5];
    draw_tokens(device, bad[0], 5, 3, (Sampling){0, 1, 0, 0}, 0, tokens);
    for (size_t n = 0; n < 4; n++) assert_int_equal(tokens[n], -1);
    assert_int_equal(tokens[4], 0);
    draw_tokens(device, bad[0], 5, 3, (Sampling){1, 0.5f, 2, 0}, 0, tokens);
    for (size_t n = 0; n < 4; n++) assert_int_equal(tokens[n], -1);
}

static void draws_on_the_cpu(void **state) {
    (void)state;
    check_draws(cpu);
}

static void draws_on_cuda(void **state) {
    (void)state;
    if (no_gpu()) skip();
    check_draws(gpu);
}

/* Lists that hold all, and lists that overflow; vocabularies below, at and above a block. */
static void cuda_draws_what_the_cpu_draws(void **state) {
    (void)state;
    if (no_gpu()) skip();
    static const size_t sizes[] = {2, 31, 1000, 1024, 1025, 5000, 50257};
    static const Sampling rules[] = {{0, 1, 0, 1},         {1, 1, 0, 2},        {0.8f, 1, 200, 3},
                                     {0.8f, 0.9f, 200, 4}, {0.8f, 0.9f, 0, 5},  {3, 0.99f, 0, 6},
                                     {1, 1, 1, 7},         {1, 1, 1024, 8},     {1, 1, 1025, 9},
                                     {2, 0.95f, 4500, 10}, {0.01f, 0.5f, 3, 11}};
    enum { N = 16 };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s += stride()) {
        size_t V = sizes[s];
        float *logits = malloc(N * V * sizeof *logits);
        random_normal(logits, N * V, V, 3);
        /* Half of the rows have many equal values. */
        for (size_t i = 0; i < N / 2 * V; i++) logits[i] = roundf(2 * logits[i]) / 2;
        for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
            int32_t expected[N], drawn[N];
            for (uint64_t round = 0; round < 4; round++) {
                draw_tokens(cpu, logits, N, V, rules[r], round, expected);
                draw_tokens(gpu, logits, N, V, rules[r], round, drawn);
                assert_memory_equal(drawn, expected, sizeof drawn);
            }
        }
        free(logits);
    }
}

int main(void) {
    open_devices();
    struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_on_the_cpu),
        cmocka_unit_test(draws_on_cuda),
        cmocka_unit_test(cuda_draws_what_the_cpu_draws),
    };
    choose_tests(tests);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();
    return failed;
}
