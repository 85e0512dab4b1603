/* Attention on the CPU, and its interface, against the definition.
 *
 * The chain of proof: central differences in double prove the CPU's backward against its forward;
 * the two CPU families prove each other; the double naive family on the CPU is the reference of
 * everything in less precision (test_attention_cuda.c). */
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

static _Alignas(256) char call_workspace[1 << 20];

/* --- the CPU --- */

static void check_gradients(const Case *c, AttentionFamily family) {
    Run r = new_run(c);
    r.problem.family = family;
    run(&r, FORWARD_AND_BACKWARD);
    Run analytic = r;
    for (int i = 0; i < OUTPUTS; i++) r.out[i] = doubles(r.out_size[i]);

    /* loss = Σ dout ∘ o. The difference's error is of order h² ≈ 1e-10 by truncation and 1e-16 / h
     * ≈ 1e-11 by rounding, of gradients of order 1. */
    const double h = 1e-5;
    for (int input = Q; input <= V; input++) {
        double *numeric = doubles(r.in_size[input]);
        for (size_t i = 0; i < r.in_size[input]; i++) {
            const double x = r.in[input][i];
            for (int side = -1; side <= 1; side += 2) {
                r.in[input][i] = x + side * h;
                run(&r, FORWARD);
                for (size_t j = 0; j < r.out_size[O]; j++)
                    numeric[i] += side * r.in[DOUT][j] * r.out[O][j] / (2 * h);
            }
            r.in[input][i] = x;
        }
        assert_error(&r, DQ + input,
                     relative_error(analytic.out[DQ + input], numeric, r.in_size[input]), 1e-6);
        free(numeric);
    }
    for (int i = 0; i < OUTPUTS; i++) free(analytic.out[i]);
    free_run(&r);
}

static void test_gradients(void **state) {
    (void)state;
    static const Case small[] = {
        {2, 2, 2, 6, 6, 4, ATTENTION_CAUSAL, 0, PACKED},
        {1, 2, 2, 5, 7, 3, ATTENTION_FULL, 0, GAPS},
        {1, 4, 2, 4, 9, 3, ATTENTION_CAUSAL, 0, SEPARATE},
        {1, 2, 1, 9, 4, 3, ATTENTION_CAUSAL, 0, HEADS_FIRST},
        {1, 2, 1, 7, 8, 3, ATTENTION_CAUSAL, 0.4f, SEPARATE},
        {1, 1, 1, 67, 67, 2, ATTENTION_CAUSAL, 0.2f, PACKED}, /* two tiles each way */
        {1, 1, 1, 65, 130, 1, ATTENTION_FULL, 0, SEPARATE},
    };
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++) {
        check_gradients(&small[i], ATTENTION_NAIVE);
        check_gradients(&small[i], ATTENTION_FLASH_V1);
    }
}

static void test_cpu_families_agree(void **state) {
    (void)state;
    for (size_t i = 0; i < case_count; i++) {
        Run reference = new_run(&cases[i]);
        run(&reference, FORWARD_AND_BACKWARD);
        Run flash = run_like(&reference, DEVICE_CPU, TYPE_F64, ATTENTION_FLASH_V1);
        Run flash_float = run_like(&reference, DEVICE_CPU, TYPE_F32, ATTENTION_FLASH_V1);
        Run naive_float = run_like(&reference, DEVICE_CPU, TYPE_F32, ATTENTION_NAIVE);
        assert_close(&flash, &reference, double_tolerance);
        assert_close(&flash_float, &reference, float_tolerance);
        assert_close(&naive_float, &reference, float_tolerance);
        free_run(&reference);
        free_run(&flash);
        free_run(&flash_float);
        free_run(&naive_float);
    }
}

static void test_every_length(void **state) {
    (void)state;
    for (int mask = ATTENTION_FULL; mask <= ATTENTION_CAUSAL; mask++)
        for (size_t i = 1; i <= 73; i++) {
            const size_t longer[] = {113, 257, 1023}, T = i <= 70 ? i : longer[i - 71];
            Case c = {1, 2, 2, T, T, 16, (AttentionMask)mask, 0, PACKED};
            Run reference = new_run(&c);
            run(&reference, FORWARD_AND_BACKWARD);
            Run flash = run_like(&reference, DEVICE_CPU, TYPE_F64, ATTENTION_FLASH_V1);
            assert_close(&flash, &reference, double_tolerance);
            free_run(&reference);
            free_run(&flash);
        }
}

static void test_layouts_agree(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        Case c = {2, 3, 3, 75, 75, 20, ATTENTION_CAUSAL, 0.1f, PACKED};
        Run packed = new_run(&c);
        packed.problem.family = (AttentionFamily)family;
        run(&packed, FORWARD_AND_BACKWARD);
        for (int layout = SEPARATE; layout <= GAPS; layout++) {
            Run other = packed;
            other.layout = (Layout)layout;
            Run result = run_like(&other, DEVICE_CPU, TYPE_F64, (AttentionFamily)family);
            if (family == ATTENTION_NAIVE) /* a BLAS may order its sums by alignment */
                assert_close(&result, &packed, double_tolerance);
            else
                assert_same_bits(&result, &packed);
            free_run(&result);
        }
        free_run(&packed);
    }
}

/* O = P ∘ Z when V is the identity: each factor is seen, at its place of runtime/random.h. */
static void test_dropout_mask(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        const size_t TQ = 70, TK = 200;
        Case c = {2, 2, 2, TQ, TK, 200, ATTENTION_FULL, 0.3f, SEPARATE};
        Run r = new_run(&c);
        r.problem.family = (AttentionFamily)family;
        for (size_t i = 0; i < r.in_size[V]; i++) /* (B,TK,NH,HS) */
            r.in[V][i] = i % c.HS == i / c.HS / c.NH % TK;
        run(&r, FORWARD);
        Run plain = r;
        plain.problem.dropout.probability = 0;
        Run kept = run_like(&plain, DEVICE_CPU, TYPE_F64, (AttentionFamily)family);
        size_t dropped = 0, i = 0;
        for (uint32_t b = 0; b < c.B; b++)
            for (uint32_t t = 0; t < TQ; t++)
                for (uint32_t h = 0; h < c.NH; h++)
                    for (uint32_t j = 0; j < TK; j++, i++) {
                        Philox draw = philox(r.problem.dropout.key, 4 * (j / 64) + j % 8 / 2, t,
                                             b * (uint32_t)c.NH + h, 1);
                        unsigned byte = philox_byte(&draw, (int)(2 * (j / 8 % 8) + j % 2));
                        /* 0.3 is 77/256. */
                        double factor = byte < 77 ? 0 : 256.0 / (256 - 77);
                        dropped += byte < 77;
                        /* The factor is a float: 6e-8. */
                        assert_true(fabs(r.out[O][i] - factor * kept.out[O][i]) <=
                                    1e-7 * kept.out[O][i]);
                    }
        /* Five deviations of the count. */
        assert_true(fabs((double)dropped / (double)i - 77 / 256.0) <= 5 * sqrt(0.21 / (double)i));
        free_run(&r);
        free_run(&kept);
    }
}

/* With equal keys every key that is seen gets the same probability. */
static void test_equal_logits(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        Case c = {1, 1, 1, 100, 130, 8, ATTENTION_CAUSAL, 0, SEPARATE};
        Run r = new_run(&c);
        r.problem.family = (AttentionFamily)family;
        for (size_t i = 0; i < r.in_size[K]; i++) r.in[K][i] = 1;
        run(&r, FORWARD);
        for (size_t i = 0; i < c.TQ; i++) {
            const size_t seen = i + 1 + c.TK - c.TQ;
            double score = 0;
            for (size_t d = 0; d < c.HS; d++) {
                double mean = 0;
                for (size_t j = 0; j < seen; j++) mean += r.in[V][j * c.HS + d] / (double)seen;
                assert_true(fabs(r.out[O][i * c.HS + d] - mean) <= double_tolerance);
                score += r.in[Q][i * c.HS + d] / sqrt((double)c.HS);
            }
            /* The default scale is a float: 6e-8 of a score up to 6. */
            assert_true(fabs(r.out[LSE][i] - score - log((double)seen)) <= 1e-6);
        }
        free_run(&r);
    }
}

static void test_queries_without_keys(void **state) {
    (void)state;
    Case c = {2, 2, 1, 140, 70, 8, ATTENTION_CAUSAL, 0, SEPARATE};
    Run naive = new_run(&c);
    run(&naive, FORWARD_AND_BACKWARD);
    Run flash = run_like(&naive, DEVICE_CPU, TYPE_F32, ATTENTION_FLASH_V1);
    assert_no_keys(&naive, 70);
    assert_no_keys(&flash, 70);
    free_run(&naive);
    free_run(&flash);
}

/* The token stride of a lone query, and of a lone key, is not read: BLAS could not even hold these. */
static void test_stride_of_one_token(void **state) {
    (void)state;
    static const size_t strides[] = {0, (size_t)1 << 31, (size_t)1 << 32, SIZE_MAX};
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++)
        for (size_t i = 0; i < sizeof strides / sizeof strides[0]; i++) {
            enum { HS = 4, HEADS = 2, N = HEADS * HS };
            float in[4][N], out[2][4][N], lse[HEADS];
            Attention p = {.type = TYPE_F32,
                           .B = 1,
                           .NH = HEADS,
                           .TQ = 1,
                           .TK = 1,
                           .HS = HS,
                           .family = (AttentionFamily)family};
            for (int j = 0; j < 4 * N; j++) (&in[0][0])[j] = (float)(j % 7 - 3);
            for (int odd = 0; odd < 2; odd++) {
                AttentionView view[8];
                for (int v = 0; v < 8; v++) {
                    view[v] = attention_view(v < 4 ? in[v] : out[odd][v - 4], 1, HEADS, HS);
                    if (odd) view[v].token = strides[i];
                }
                AttentionTensors x = {view[0], view[1], view[2], view[4], lse};
                AttentionGradients g = {view[3], view[5], view[6], view[7]};
                memset(out[odd], 0xff, sizeof out[odd]);
                assert_null(attention_forward(&p, &x, call_workspace, NULL));
                assert_null(attention_backward(&p, &x, &g, call_workspace, NULL));
            }
            assert_memory_equal(out[0], out[1], sizeof out[0]);
            assert_memory_equal(out[0][0], in[2], sizeof in[2]); /* the only value */
        }
}

static void test_large_scores(void **state) {
    (void)state;
    Run naive = large_scores();
    for (int i = 0; i < OUTPUTS; i++)
        for (size_t j = 0; j < naive.out_size[i]; j++) assert_true(isfinite(naive.out[i][j]));
    Run flash = run_like(&naive, DEVICE_CPU, TYPE_F64, ATTENTION_FLASH_V1);
    Run single = run_like(&naive, DEVICE_CPU, TYPE_F32, ATTENTION_FLASH_V1);
    assert_close(&flash, &naive, 1e-9); /* scores of 1e4 times 1e-16, and what follows */
    assert_close(&single, &naive, large_score_tolerance);
    free_run(&naive);
    free_run(&flash);
    free_run(&single);
}

static void test_workspace(void **state) {
    (void)state;
    size_t forward[2], backward[2];
    for (int i = 0; i < 2; i++) {
        Attention p = {.type = TYPE_F32, .B = 2, .NH = 3, .HS = 64, .family = ATTENTION_FLASH_V1};
        p.TQ = p.TK = i ? (size_t)1 << 18 : (size_t)1 << 14;
        forward[i] = attention_forward_workspace(&p);
        backward[i] = attention_backward_workspace(&p);
        p.family = ATTENTION_NAIVE;
        assert_true(attention_forward_workspace(&p) == p.B * p.NH * p.TQ * p.TK * sizeof(float));
    }
    assert_true(forward[0] > 0 && forward[1] == forward[0]);
    assert_true(backward[0] > 0 && backward[1] <= 16 * backward[0]);
}

static void test_repeats(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        Case c = {1, 2, 1, 300, 300, 40, ATTENTION_CAUSAL, 0.1f, SEPARATE};
        Run r = new_run(&c);
        r.problem.deterministic = 1;
        Run x = run_repeatedly(&r, DEVICE_CPU, TYPE_F32, (AttentionFamily)family, 1);
        free_run(&r);
        free_run(&x);
    }
}

/* --- the interface --- */

static void test_names(void **state) {
    (void)state;
    for (int family = 0; family < ATTENTION_FAMILIES; family++)
        assert_int_equal(attention_by_name(attention_name((AttentionFamily)family)), family);
    assert_int_equal(attention_by_name("flash"), ATTENTION_FAMILIES);
    assert_int_equal(attention_by_name(""), ATTENTION_FAMILIES);
}

static void test_choice(void **state) {
    (void)state;
    Attention p = {.type = TYPE_F32, .B = 1, .NH = 2, .TQ = 8, .TK = 8, .HS = 64};
    assert_int_equal(attention_choose(&p), ATTENTION_FLASH_V1);
    p.family = ATTENTION_NAIVE;
    assert_int_equal(attention_choose(&p), ATTENTION_NAIVE);
    p.family = ATTENTION_FLASH_MMA;
    assert_int_equal(attention_choose(&p), ATTENTION_AUTO);
    assert_non_null(strstr(error_message(), "flash_mma does not run on the CPU"));
    if (!gpu) return;
    p.device = DEVICE_CUDA;
    p.family = ATTENTION_AUTO;
    assert_int_equal(attention_choose(&p), ATTENTION_FLASH_V1);
    p.type = TYPE_BF16;
    AttentionFamily mma = gpu->architecture >= 80 ? ATTENTION_FLASH_MMA : ATTENTION_FLASH_V1;
    assert_int_equal(attention_choose(&p), gpu->architecture == 90 ? ATTENTION_FLASH_HOPPER : mma);
    p.HS = 60;
    assert_int_equal(attention_choose(&p), mma);
    p.family = ATTENTION_FLASH_HOPPER;
    assert_int_equal(attention_choose(&p), ATTENTION_AUTO);
    assert_non_null(strstr(error_message(), "flash_hopper needs a Hopper GPU"));
}

/* A valid problem with its tensors; the tests of errors break one thing at a time. */
typedef struct {
    Attention problem;
    AttentionTensors tensors;
    AttentionGradients gradients;
    void *workspace;
} Call;

static float call_memory[9][2 * 4 * 2 * 8];
static Call valid_call(void) {
    Call c = {.problem = {.type = TYPE_F32,
                          .B = 2,
                          .NH = 2,
                          .TQ = 4,
                          .TK = 4,
                          .HS = 8,
                          .family = ATTENTION_NAIVE},
              .workspace = call_workspace};
    memset(call_memory, 0xff, sizeof call_memory);
    AttentionView views[9];
    for (int i = 0; i < 9; i++) views[i] = attention_view(call_memory[i], 4, 2, 8);
    c.tensors = (AttentionTensors){views[0], views[1], views[2], views[3], call_memory[8]};
    c.gradients = (AttentionGradients){views[4], views[5], views[6], views[7]};
    return c;
}

/* The backward must refuse the call with these words, and so must the forward if the fault `begins`
 * there; nothing is written. */
static void refused(Call c, const char *words, Passes begins) {
    const char *wrong = attention_backward(&c.problem, &c.tensors, &c.gradients, c.workspace, NULL);
    if (!wrong || !strstr(wrong, words)) fail_msg("\"%s\" lacks \"%s\"", wrong ? wrong : "", words);
    if (begins == FORWARD) {
        wrong = attention_forward(&c.problem, &c.tensors, c.workspace, NULL);
        if (!wrong || !strstr(wrong, words))
            fail_msg("\"%s\" lacks \"%s\"", wrong ? wrong : "", words);
    }
    assert_true(all_bytes(call_memory, 0xff, sizeof call_memory));
}

static void test_errors(void **state) {
    (void)state;
    Call c = valid_call();
    assert_null(attention_forward(&c.problem, &c.tensors, c.workspace, NULL));
    assert_null(attention_backward(&c.problem, &c.tensors, &c.gradients, c.workspace, NULL));

#define REFUSED(change, words)      \
    do {                            \
        c = valid_call();           \
        change;                     \
        refused(c, words, FORWARD); \
    } while (0)
    REFUSED(c.problem.B = 0, "B=0");
    REFUSED(c.problem.NH = 0, "NH=0");
    REFUSED(c.problem.TQ = 0, "TQ=0");
    REFUSED(c.problem.TK = 0, "TK=0");
    REFUSED(c.problem.HS = 0, "HS=0");
    REFUSED(c.problem.HS = 257, "HS=257");
    REFUSED(c.problem.TK = (size_t)1 << 31, "2^31");
    REFUSED((c.problem.B = (size_t)1 << 62, c.problem.NH = 4), "2^31");
    REFUSED((c.problem.TQ = 1 << 30, c.problem.B = 1 << 10), "B·NH·TQ must be at most 2^40");
    REFUSED(c.problem.TQ = c.problem.TK = 1 << 30, "naive stores every score");
    REFUSED((c.problem.NH = 6, c.problem.NKV = 4), "NKV=4 does not divide NH=6");
    REFUSED(c.problem.NKV = 4, "NKV=4 does not divide NH=2");
    REFUSED(c.problem.mask = (AttentionMask)2, "mask 2");
    REFUSED(c.problem.device = (DeviceType)7, "device 7");
    REFUSED(c.problem.family = ATTENTION_FAMILIES, "no family");
    REFUSED(c.problem.family = ATTENTION_FLASH_MMA, "flash_mma does not run on the CPU");
    REFUSED(c.problem.type = TYPE_BF16, "no kernels for bf16");
    REFUSED(c.problem.type = TYPE_I32, "no kernels for int32");
    REFUSED(c.problem.type = (DataType)99, "no type 99");
    REFUSED(c.problem.scale = -1, "scale is -1");
    REFUSED(c.problem.scale = NAN, "scale is");
    REFUSED(c.problem.dropout.probability = 1, "dropout probability is 1");
    REFUSED(c.problem.dropout.probability = -0.1f, "dropout probability is -0.1");
    REFUSED(c.problem.dropout.probability = NAN, "dropout probability is");
    REFUSED(c.problem.dropout.probability = 0.999f, "drops everything");
    REFUSED(c.tensors.q.data = NULL, "q is NULL");
    REFUSED(c.tensors.o.data = NULL, "o is NULL");
    REFUSED(c.tensors.lse = NULL, "lse is NULL");
    REFUSED(c.tensors.k.token = 7, "token stride of k is 7");
    REFUSED(c.tensors.q.batch = SIZE_MAX, "the strides of q span 1.84e+19 elements");
    REFUSED(c.tensors.v.head = (size_t)1 << 61, "the strides of v span 2.31e+18 elements");
    REFUSED(c.workspace = NULL, "workspace is NULL");
    REFUSED(c.workspace = call_workspace + 4, "aligned");
#ifndef TILEGPT_CUDA
    REFUSED(c.problem.device = DEVICE_CUDA, "built without CUDA");
#endif
#undef REFUSED
    c = valid_call();
    c.gradients.dk.data = NULL;
    refused(c, "dk is NULL", FORWARD_AND_BACKWARD);
    c = valid_call();
    c.gradients.dq.head = 0;
    refused(c, "dq is written", FORWARD_AND_BACKWARD);
    /* Heads fill the gaps between tokens, or come whole; a head may not begin at the next token. */
    c = valid_call();
    c.gradients.dv.token = c.gradients.dv.head = 8;
    refused(c, "dv is written", FORWARD_AND_BACKWARD);
    c.gradients.dv.head = 4 * 8;
    assert_null(attention_backward(&c.problem, &c.tensors, &c.gradients, c.workspace, NULL));
    c = valid_call();
    c.gradients.dv.batch = 4 * 2 * 8 - 1;
    refused(c, "its batch stride is 63, but HS=8 and the smaller strides span 64",
            FORWARD_AND_BACKWARD);
    c = valid_call();
    c.tensors.o.batch = 0;
    const char *wrong = attention_forward(&c.problem, &c.tensors, c.workspace, NULL);
    assert_true(wrong && strstr(wrong, "o is written"));
    c = valid_call();
    c.gradients.dq.batch = SIZE_MAX;
    refused(c, "the strides of dq span", FORWARD_AND_BACKWARD);
    c = valid_call();
    c.tensors.o.batch = SIZE_MAX;
    refused(c, "the strides of o span", FORWARD);
    assert_non_null(attention_forward(NULL, &c.tensors, c.workspace, NULL));
    assert_non_null(attention_forward(&c.problem, NULL, c.workspace, NULL));
    c = valid_call();
    assert_non_null(attention_backward(&c.problem, &c.tensors, NULL, c.workspace, NULL));
}

/* A test of the tests: a NaN is never close, and neither is a wrong -inf. */
static void test_comparison_fails_on_nan(void **state) {
    (void)state;
    Case c = {1, 1, 1, 2, 2, 2, ATTENTION_FULL, 0, PACKED};
    Run r = new_run(&c), s = new_run(&c);
    assert_true(error_of(&r, &s, O) <= 0);
    r.out[O][1] = NAN;
    r.out[LSE][1] = -INFINITY;
    assert_false(error_of(&r, &s, O) <= 1e30);
    assert_false(error_of(&r, &s, LSE) <= 1e30);
    assert_false(error_of(&s, &r, LSE) <= 1e30);
    free_run(&r);
    free_run(&s);
}

int main(void) {
    open_devices();
    struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_cpu_families_agree),
        cmocka_unit_test(test_every_length),
        cmocka_unit_test(test_layouts_agree),
        cmocka_unit_test(test_dropout_mask),
        cmocka_unit_test(test_equal_logits),
        cmocka_unit_test(test_queries_without_keys),
        cmocka_unit_test(test_stride_of_one_token),
        cmocka_unit_test(test_large_scores),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_comparison_fails_on_nan),
    };
    choose_tests(tests);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();
    return failures;
}
