/* CUDA's layernorm, alone and with the residual that is added before it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "test/cuda_layers.h"

static void layernorm_case(size_t N, size_t C, float mean_of_x) {
    begin_case("layernorm", "N=%zu C=%zu mean %g", N, C, mean_of_x);
    Tensor *x = normal("x", N * C, t.type, mean_of_x, 2), *out = output("out", N * C, t.type);
    Tensor *weight = normal("weight", C, t.type, 1, .3f), *bias = normal("bias", C, t.type, 0, .3f);
    Tensor *mean = output("mean", N, TYPE_F32), *rstd = output("rstd", N, TYPE_F32);
    FOR_SIDES(s)
        t.layers[s]->layernorm_forward(at(out, s), at(mean, s), at(rstd, s), at(x, s),
                                       at(weight, s), at(bias, s), N, C, 1e-5f, t.devices[s]);
    /* The mean is good to 2^-23 of itself, which becomes an error of x - mean. */
    double shift = fabs(mean_of_x) * 0x1p-23;
    check_norm(out, rounded() + shift);
    check_norm(mean, ARITHMETIC);
    check_norm(rstd, ARITHMETIC);

    Tensor *dout = normal("dout", N * C, t.type, .1f, 1), *dx = output("dx", N * C, t.type);
    Tensor *dresidual = normal("dx on dresidual", N * C, t.type, 0, 1);
    Tensor *dweight = normal("dweight", C, TYPE_F32, 0, 1);
    Tensor *dbias = normal("dbias", C, TYPE_F32, 0, 1);
    adopt(mean);
    adopt(rstd);
    FOR_SIDES(s) {
        t.layers[s]->layernorm_backward(at(dx, s), at(dweight, s), at(dbias, s), at(dout, s), NULL,
                                        at(x, s), at(mean, s), at(rstd, s), at(weight, s), N, C,
                                        t.devices[s]);
        t.layers[s]->layernorm_backward(at(dresidual, s), at(dweight, s), at(dbias, s),
                                        at(dout, s), at(dresidual, s), at(x, s), at(mean, s),
                                        at(rstd, s), at(weight, s), N, C, t.devices[s]);
    }
    /* A row of one element has no variance: its exact gradient is 0, left by cancellation of terms
     * of size rstd = eps^-1/2. So dx is compared with 0 in absolute terms, N roundings of them. */
    double cancelled = C == 1 ? 0x1p-23 / sqrt(1e-5) : 0;
    check_norm(dx, rounded() + cancelled * sqrt((double)N));
    check_norm(dresidual, rounded() + cancelled);
    check_norm(dweight, ARITHMETIC);
    check_norm(dbias, ARITHMETIC);
    end_case();
}

typedef enum { RESIDUAL_APART, RESIDUAL_IS_X, RESIDUAL_IS_BRANCH } Alias;

static void residual_layernorm_case(size_t N, size_t C, Dropout dropout, Alias alias) {
    begin_case("residual_layernorm", "N=%zu C=%zu p=%g alias %d", N, C, dropout.probability, alias);
    const char *const on_x = alias == RESIDUAL_IS_X ? "residual on x" : "x";
    const char *const on_branch = alias == RESIDUAL_IS_BRANCH ? "residual on branch" : "branch";
    Tensor *x = normal(on_x, N * C, t.type, .5f, 2);
    Tensor *branch = normal(on_branch, N * C, t.type, 0, 1);
    Tensor *weight = normal("weight", C, t.type, 1, .3f), *bias = normal("bias", C, t.type, 0, .3f);
    Tensor *out = output("out", N * C, t.type);
    Tensor *residual = alias == RESIDUAL_IS_X        ? x
                       : alias == RESIDUAL_IS_BRANCH ? branch
                                                     : output("residual", N * C, t.type);
    Tensor *mean = output("mean", N, TYPE_F32), *rstd = output("rstd", N, TYPE_F32);
    FOR_SIDES(s)
        t.layers[s]->residual_layernorm_forward(
            at(out, s), at(residual, s), at(mean, s), at(rstd, s), at(x, s), at(branch, s),
            at(weight, s), at(bias, s), N, C, 1e-5f, dropout, t.devices[s]);
    check_norm(residual, rounded());

    /* The rest is that of the residual as stored. */
    adopt(residual);
    const Layers *cpu = t.layers[REFERENCE];
    cpu->layernorm_forward(at(out, REFERENCE), at(mean, REFERENCE), at(rstd, REFERENCE),
                           at(residual, REFERENCE), at(weight, REFERENCE), at(bias, REFERENCE), N,
                           C, 1e-5f, t.devices[REFERENCE]);
    check_norm(out, rounded());
    check_norm(mean, ARITHMETIC);
    check_norm(rstd, ARITHMETIC);
    end_case();
}

static void layernorm(void **state) {
    start(state);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(widths); j++) layernorm_case(rows[i], widths[j], .5f);
    layernorm_case(MAX_N, 768, .5f);
    layernorm_case(17, 1280, .5f);
    layernorm_case(17, 4096, .5f);
    layernorm_case(3, MAX_C, .5f); /* too wide for registers */
    layernorm_case(257, 768, 1000); /* a variance from Σx² would be all rounding */
    t.shift = 1; /* no 16-byte access is allowed */
    layernorm_case(17, 768, .5f);
    finish();
}

static void residual_layernorm(void **state) {
    start(state);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(widths); j++)
            residual_layernorm_case(rows[i], widths[j], dropout_tenth, RESIDUAL_APART);
    residual_layernorm_case(MAX_N, 768, no_dropout, RESIDUAL_IS_X);
    residual_layernorm_case(257, 384, dropout_tenth, RESIDUAL_IS_X);
    residual_layernorm_case(257, 384, dropout_tenth, RESIDUAL_IS_BRANCH);
    residual_layernorm_case(17, 65, dropout_tenth, RESIDUAL_IS_X);
    residual_layernorm_case(17, 65, dropout_tenth, RESIDUAL_IS_BRANCH);
    residual_layernorm_case(3, MAX_C, dropout_tenth, RESIDUAL_APART);
    t.shift = 1;
    residual_layernorm_case(17, 768, dropout_tenth, RESIDUAL_APART);
    finish();
}

int main(void) {
    struct CMUnitTest tests[] = {
        IN_BOTH_TYPES(layernorm),
        IN_BOTH_TYPES(residual_layernorm),
    };
    choose_tests(tests);
    return cmocka_run_group_tests_name("layernorm on CUDA", tests, open_sides, close_sides);
}
