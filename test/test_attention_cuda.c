/* Attention on CUDA, every family in every type, against the CPU's naive family in double. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "test/attention_case.h"
#include "test/compare.h"
#include "test/part.h"

/* bf16: P, dS and the results are rounded to 2^-9, in the naive family too. A tiled family has
 * other partial sums: it may err twice as much as naive forward and three times backward, or by
 * 2^-9, the rounding of the result, where naive happens to be exact. LSE is a float in all. */
static void assert_close_to_naive(const Run *x, const Run *naive, const Run *reference) {
    for (int i = 0; i < OUTPUTS; i++) {
        double factor = i == O || i == LSE ? 2 : 3, floor = i == LSE ? float_tolerance : 1.0 / 512;
        assert_error(x, i, error_of(x, reference, i), factor * error_of(naive, reference, i) + floor);
    }
}

static const AttentionFamily flash_families[] = {ATTENTION_FLASH_V1, ATTENTION_FLASH_MMA,
                                                 ATTENTION_FLASH_HOPPER};

/* Whether this family takes the problem on the GPU in this type. */
static bool available(const Run *r, DataType type, AttentionFamily family) {
    Attention p = r->problem;
    p.device = DEVICE_CUDA;
    p.type = type;
    p.family = family;
    return attention_choose(&p) == family;
}

/* naive's own bf16 error: P and dS rounded to 2^-9 and averaged over keys; dP - D loses a digit. */
static const double naive_bf16_tolerance = 5e-2;

/* Every flash family in bf16, held against naive's error on the same inputs; those on tensor cores
 * have another backward where the order of additions is fixed. */
static void assert_flash_close(const Run *naive, const Run *reference) {
    for (size_t f = 0; f < sizeof flash_families / sizeof flash_families[0]; f++)
        for (int fixed = 0; fixed <= (flash_families[f] != ATTENTION_FLASH_V1); fixed++) {
            Run asked = *reference;
            asked.problem.deterministic = fixed;
            if (!available(&asked, TYPE_BF16, flash_families[f])) continue;
            Run flash = run_like(&asked, DEVICE_CUDA, TYPE_BF16, flash_families[f]);
            assert_close_to_naive(&flash, naive, reference);
            free_run(&flash);
        }
}

static void check_flash_on_cuda(const Case *c) {
    Run reference = new_run(c);
    run(&reference, FORWARD_AND_BACKWARD);
    Run naive = run_like(&reference, DEVICE_CUDA, TYPE_BF16, ATTENTION_NAIVE);
    assert_flash_close(&naive, &reference);
    free_run(&reference);
    free_run(&naive);
}

static void test_cuda_cases(void **state) {
    (void)state;
    if (no_gpu()) skip();
    for (size_t i = 0; i < case_count; i += stride()) {
        Run reference = new_run(&cases[i]);
        run(&reference, FORWARD_AND_BACKWARD);
        Run naive_float = run_like(&reference, DEVICE_CUDA, TYPE_F32, ATTENTION_NAIVE);
        Run flash_float = run_like(&reference, DEVICE_CUDA, TYPE_F32, ATTENTION_FLASH_V1);
        Run naive = run_like(&reference, DEVICE_CUDA, TYPE_BF16, ATTENTION_NAIVE);
        assert_close(&naive_float, &reference, float_tolerance);
        assert_close(&flash_float, &reference, float_tolerance);
        assert_close(&naive, &reference, naive_bf16_tolerance);
        assert_flash_close(&naive, &reference);
        free_run(&reference);
        free_run(&naive_float);
        free_run(&flash_float);
        free_run(&naive);
    }
}

static void test_cuda_every_length(void **state) {
    (void)state;
    if (no_gpu()) skip();
    for (int mask = ATTENTION_FULL; mask <= ATTENTION_CAUSAL; mask++)
        for (size_t T = 1; T <= 300; T += stride()) {
            Case narrow = {1, 2, 2, T, T, 64, (AttentionMask)mask, 0, PACKED};
            Case wide = {1, 1, 1, T, T, 128, (AttentionMask)mask, 0, PACKED};
            check_flash_on_cuda(&narrow);
            check_flash_on_cuda(&wide);
        }
}

static void test_cuda_every_head_size(void **state) {
    (void)state;
    if (no_gpu()) skip();
    for (size_t HS = 256; HS >= 1; HS -= HS < stride() ? HS : stride()) {
        Case c = {1, 1, 1, 70, 70, HS, ATTENTION_CAUSAL, 0, HS % 2 ? SEPARATE : PACKED};
        check_flash_on_cuda(&c);
    }
}

static void test_cuda_repeats_and_no_keys(void **state) {
    (void)state;
    if (no_gpu()) skip();
    static const Case repeated[] = {
        {2, 3, 3, 500, 500, 64, ATTENTION_CAUSAL, 0.1f, PACKED},
        {1, 4, 2, 300, 200, 128, ATTENTION_CAUSAL, 0, SEPARATE},
    };
    const DataType types[] = {TYPE_F32, TYPE_BF16};
    for (int i = 0; i < 2; i++)
        for (int t = 0; t < 2; t++)
            for (int family = ATTENTION_NAIVE; family < ATTENTION_FAMILIES; family++) {
                Run r = new_run(&repeated[i]);
                r.problem.deterministic = 1;
                if (available(&r, types[t], (AttentionFamily)family)) {
                    /* Then flash_hopper alone adds from several blocks, in turns. */
                    int repeats = family == ATTENTION_FLASH_HOPPER ? 50 : 1;
                    Run x = run_repeatedly(&r, DEVICE_CUDA, types[t], (AttentionFamily)family,
                                           repeats);
                    if (r.problem.TQ > r.problem.TK)
                        assert_no_keys(&x, r.problem.TQ - r.problem.TK);
                    free_run(&x);
                }
                free_run(&r);
            }
}

/* More work than a GPU has multiprocessors, so that blocks which stay take a second item and a third:
 * both passes, both widths of a tile, shared keys, queries that see no key. */
static void test_cuda_many_items(void **state) {
    (void)state;
    if (no_gpu()) skip();
    static const Case many[] = {
        {6, 12, 12, 400, 400, 64, ATTENTION_CAUSAL, 0, PACKED},
        {6, 12, 12, 400, 400, 128, ATTENTION_CAUSAL, 0, PACKED},
        {8, 12, 6, 500, 333, 128, ATTENTION_CAUSAL, 0.1f, SEPARATE},
        {9, 12, 4, 257, 500, 64, ATTENTION_FULL, 0, SEPARATE},
    };
    for (size_t i = 0; i < sizeof many / sizeof many[0]; i += stride()) {
        check_flash_on_cuda(&many[i]);
        Run r = new_run(&many[i]);
        r.problem.deterministic = 1;
        if (available(&r, TYPE_BF16, ATTENTION_FLASH_HOPPER)) {
            Run x = run_repeatedly(&r, DEVICE_CUDA, TYPE_BF16, ATTENTION_FLASH_HOPPER, 1);
            free_run(&x);
        }
        free_run(&r);
    }
}

static void test_cuda_large_scores(void **state) {
    (void)state;
    if (no_gpu()) skip();
    /* Multiples of 30/64 are not exact in bf16, which is only held to be finite. */
    Run reference = large_scores();
    for (int family = ATTENTION_NAIVE; family < ATTENTION_FAMILIES; family++) {
        if (available(&reference, TYPE_F32, (AttentionFamily)family)) {
            Run x = run_like(&reference, DEVICE_CUDA, TYPE_F32, (AttentionFamily)family);
            assert_close(&x, &reference, large_score_tolerance);
            free_run(&x);
        }
        if (available(&reference, TYPE_BF16, (AttentionFamily)family)) {
            Run x = run_like(&reference, DEVICE_CUDA, TYPE_BF16, (AttentionFamily)family);
            for (int i = 0; i < OUTPUTS; i++)
                for (size_t j = 0; j < x.out_size[i]; j++) assert_true(isfinite(x.out[i][j]));
            free_run(&x);
        }
    }
    free_run(&reference);
}

int main(void) {
    open_devices();
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cuda_cases),
        cmocka_unit_test(test_cuda_every_length),
        cmocka_unit_test(test_cuda_every_head_size),
        cmocka_unit_test(test_cuda_repeats_and_no_keys),
        cmocka_unit_test(test_cuda_many_items),
        cmocka_unit_test(test_cuda_large_scores),
    };
    choose_tests(tests);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();
    return failures;
}
