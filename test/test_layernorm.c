/* The CPU's layernorm, alone and with the residual that is added before it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>

#include "test/cpu_layers.h"

typedef struct {
    size_t N, C;
    double *x, *weight, *bias;              /* (N,C), (C), (C) */
    double *out, *mean, *rstd, *out_weight; /* (N,C), (N), (N), (N,C) */
} LayernormProblem;

#define EPS 1e-5f

static double layernorm_loss(void *problem) {
    LayernormProblem *p = problem;
    f64->layernorm_forward(p->out, p->mean, p->rstd, p->x, p->weight, p->bias, p->N, p->C, EPS,
                           cpu);
    return dot(p->out, p->out_weight, p->N * p->C);
}

static LayernormProblem layernorm_problem(size_t N, size_t C) {
    return (LayernormProblem){.N = N,
                              .C = C,
                              .x = random_array(N * C, 1),
                              .weight = random_array(C, 2),
                              .bias = random_array(C, 3),
                              .out = filled_array(N * C, NAN),
                              .mean = filled_array(N, NAN),
                              .rstd = filled_array(N, NAN),
                              .out_weight = random_array(N * C, 4)};
}

static const size_t layernorm_shapes[][2] = {{5, 1}, {1, 7}, {17, 48}, {113, 65}, {3, 300}};

static void layernorm_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof layernorm_shapes / sizeof layernorm_shapes[0]; i++) {
        size_t N = layernorm_shapes[i][0], C = layernorm_shapes[i][1], n = N * C;
        LayernormProblem p = layernorm_problem(N, C);
        layernorm_loss(&p);
        double *dx = filled_array(n, NAN), *dweight = filled_array(C, BEFORE);
        double *dbias = filled_array(C, BEFORE);
        f64->layernorm_backward(dx, dweight, dbias, p.out_weight, NULL, p.x, p.mean, p.rstd,
                                p.weight, N, C, cpu);
        subtract(dweight, BEFORE, C);
        subtract(dbias, BEFORE, C);

        float *out32 = take(n * sizeof(float)), *mean32 = take(N * sizeof(float));
        float *rstd32 = take(N * sizeof(float)), *x32 = float_copy(p.x, n);
        float *weight32 = float_copy(p.weight, C), *dx32 = take(n * sizeof(float));
        float *dweight32 = float_copy(filled_array(C, 0), C),
              *dbias32 = float_copy(filled_array(C, 0), C);
        f32->layernorm_forward(out32, mean32, rstd32, x32, weight32, float_copy(p.bias, C), N, C,
                               EPS, cpu);
        f32->layernorm_backward(dx32, dweight32, dbias32, float_copy(p.out_weight, n), NULL, x32,
                                mean32, rstd32, weight32, N, C, cpu);
        check_float("layernorm out, float", out32, p.out, n);
        check_float("layernorm dx, float", dx32, dx, n);
        check_float("layernorm dweight, float", dweight32, dweight, C);
        check_float("layernorm dbias, float", dbias32, dbias, C);

        double *expected = take(n * sizeof *expected);
        for (size_t k = 0; k < N; k++) {
            double mean = 0, variance = 0;
            for (size_t c = 0; c < C; c++) mean += p.x[k * C + c] / (double)C;
            for (size_t c = 0; c < C; c++) variance += pow(p.x[k * C + c] - mean, 2) / (double)C;
            for (size_t c = 0; c < C; c++)
                expected[k * C + c] =
                    (p.x[k * C + c] - mean) / sqrt(variance + EPS) * p.weight[c] + p.bias[c];
        }
        check("layernorm out", p.out, expected, n, 1e-13); /* sums of C terms in another order */
        check_gradient("layernorm dx", layernorm_loss, &p, p.x, dx, n);
        check_gradient("layernorm dweight", layernorm_loss, &p, p.weight, dweight, C);
        check_gradient("layernorm dbias", layernorm_loss, &p, p.bias, dbias, C);

        /* The gradient of the residual stream is added, in place or not. */
        double *dresidual = random_array(n, 5), *both = filled_array(n, NAN);
        f64->layernorm_backward(both, dweight, dbias, p.out_weight, dresidual, p.x, p.mean, p.rstd,
                                p.weight, N, C, cpu);
        for (size_t k = 0; k < n; k++) expected[k] = dx[k] + dresidual[k];
        check("layernorm dx + dresidual", both, expected, n, 0); /* the same addition */
        f64->layernorm_backward(dresidual, dweight, dbias, p.out_weight, dresidual, p.x, p.mean,
                                p.rstd, p.weight, N, C, cpu);
        check("layernorm dx in dresidual's place", dresidual, both, n, 0);
        release(NULL);
    }
}

static void layernorm_keeps_digits_beside_a_large_mean(void **state) {
    (void)state;
    enum { C = 48 };
    float x[C], weight[C], bias[C] = {0}, out[C], mean, rstd;
    for (size_t c = 0; c < C; c++) x[c] = 4096 + (float)(c % 3), weight[c] = 1;
    f32->layernorm_forward(out, &mean, &rstd, x, weight, bias, 1, C, EPS, cpu);
    /* Values 0, 1, 2 above the mean 4097: deviation sqrt(2/3). All are exact in float. */
    for (size_t c = 0; c < C; c++)
        assert_true(fabs(out[c] - ((double)(c % 3) - 1) / sqrt(2.0 / 3 + EPS)) <= 1e-6);
}

static void residual_layernorm_is_add_then_layernorm(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof layernorm_shapes / sizeof layernorm_shapes[0]; i++) {
        for (size_t d = 0; d < 2; d++) {
            size_t N = layernorm_shapes[i][0], C = layernorm_shapes[i][1], n = N * C;
            LayernormProblem p = layernorm_problem(N, C);
            double *x = copy_of(p.x, n), *branch = random_array(n, 6),
                   *residual = filled_array(n, NAN);
            double *out = filled_array(n, NAN), *mean = filled_array(N, NAN),
                   *rstd = filled_array(N, NAN);
            f64->dropout_forward(p.x, branch, n, dropouts[d], cpu);
            for (size_t k = 0; k < n; k++) p.x[k] += x[k];
            layernorm_loss(&p);
            f64->residual_layernorm_forward(out, residual, mean, rstd, x, branch, p.weight, p.bias,
                                            N, C, EPS, dropouts[d], cpu);
            /* The same operations, so the same bits. */
            check("residual", residual, p.x, n, 0);
            check("residual layernorm out", out, p.out, n, 0);
            check("residual layernorm mean", mean, p.mean, N, 0);
            check("residual layernorm rstd", rstd, p.rstd, N, 0);

            float *in_x = float_copy(x, n), *in_branch = float_copy(branch, n),
                  *x32 = float_copy(x, n);
            float *out32 = take(n * sizeof(float)), *mean32 = take(N * sizeof(float));
            float *rstd32 = take(N * sizeof(float)), *weight32 = float_copy(p.weight, C);
            float *bias32 = float_copy(p.bias, C);
            f32->residual_layernorm_forward(out32, in_x, mean32, rstd32, in_x, in_branch, weight32,
                                            bias32, N, C, EPS, dropouts[d], cpu);
            check_float("residual in x's place, float", in_x, residual, n);
            check_float("residual layernorm out, float", out32, out, n);
            f32->residual_layernorm_forward(out32, in_branch, mean32, rstd32, x32, in_branch,
                                            weight32, bias32, N, C, EPS, dropouts[d], cpu);
            check_float("residual in branch's place, float", in_branch, residual, n);
            release(NULL);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(layernorm_gradients, release),
        cmocka_unit_test(layernorm_keeps_digits_beside_a_large_mean),
        cmocka_unit_test_teardown(residual_layernorm_is_add_then_layernorm, release),
    };
    return cmocka_run_group_tests_name("layernorm", tests, open_cpu, close_cpu);
}
