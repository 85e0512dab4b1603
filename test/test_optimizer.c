/* AdamW on the CPU, and sums: of losses, of the gradients' squares, over rows; the same bits from
 * any number of threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "test/cpu_layers.h"

/* ---- AdamW ---- */

enum { ADAMW_N = 3 * ADAMW_CHUNK, ADAMW_STEPS = 5 };

static void plain_adamw(double *w, double *m, double *v, const double *grads, double norm,
                        AdamW a) {
    const double lr = a.lr, beta1 = a.beta1, beta2 = a.beta2, t = (double)a.step;
    for (size_t i = 0; i < ADAMW_N; i++) {
        double g = grads[i];
        if (a.clip > 0 && a.clip / (norm + 1e-6) < 1) g *= a.clip / (norm + 1e-6);
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        double m_hat = m[i] / (1 - pow(beta1, t)), v_hat = v[i] / (1 - pow(beta2, t));
        double decay = i / ADAMW_CHUNK == 1 ? 0 : a.weight_decay;
        w[i] -= lr * (m_hat / (sqrt(v_hat) + a.eps) + decay * w[i]);
    }
}

static void adamw_follows_the_formula(void **state) {
    (void)state;
    const uint8_t decay[3] = {1, 0, 1};
    const float clips[] = {0, 1, 1e6f}; /* none, at work, too large to matter */
    for (size_t c = 0; c < 3; c++) {
        double *w = random_array(ADAMW_N, 1), *m = filled_array(ADAMW_N, 0),
               *v = filled_array(ADAMW_N, 0);
        double *w64 = copy_of(w, ADAMW_N), *m64 = copy_of(m, ADAMW_N), *v64 = copy_of(v, ADAMW_N);
        float *w32 = float_copy(w, ADAMW_N), *m32 = float_copy(m, ADAMW_N),
              *v32 = float_copy(v, ADAMW_N);
        for (uint64_t step = 1; step <= ADAMW_STEPS; step++) {
            AdamW adamw = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, clips[c], step};
            double *g = random_array(ADAMW_N, 10 + step), norm64;
            float *g32 = float_copy(g, ADAMW_N), norm32;
            f64->grad_norm(&norm64, g, ADAMW_N, cpu);
            f32->grad_norm(&norm32, g32, ADAMW_N, cpu);
            f64->adamw_update(w64, w64, m64, v64, g, decay, &norm64, ADAMW_N, adamw, cpu);
            f32->adamw_update(w32, w32, m32, v32, g32, decay, &norm32, ADAMW_N, adamw, cpu);
            plain_adamw(w, m, v, g, sqrt(dot(g, g, ADAMW_N)), adamw);
        }
        /* The same formula, but the norm is a sum of 3072 roundings of 1e-16 in another order. */
        check("adamw parameters", w64, w, ADAMW_N, 1e-13);
        check("adamw m", m64, m, ADAMW_N, 1e-13);
        check("adamw v", v64, v, ADAMW_N, 1e-13);
        check_float("adamw parameters, float", w32, w, ADAMW_N);
        check_float("adamw m, float", m32, m, ADAMW_N);
        check_float("adamw v, float", v32, v, ADAMW_N);
        release(NULL);
    }
}

static void adamw_ignores_a_step_that_is_not_finite(void **state) {
    (void)state;
    const uint8_t decay[3] = {1, 1, 1};
    const float norms[] = {NAN, INFINITY, -INFINITY};
    size_t bytes = ADAMW_N * sizeof(float);
    float *w = float_copy(random_array(ADAMW_N, 1), ADAMW_N),
          *m = float_copy(random_array(ADAMW_N, 2), ADAMW_N);
    float *v = float_copy(filled_array(ADAMW_N, 1), ADAMW_N),
          *g = float_copy(filled_array(ADAMW_N, 1), ADAMW_N);
    float *before[] = {memcpy(take(bytes), w, bytes), memcpy(take(bytes), m, bytes),
                       memcpy(take(bytes), v, bytes)};
    for (size_t i = 0; i < 3; i++) {
        AdamW adamw = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, /*clip=*/i == 2 ? 0.0f : 1.0f, 1};
        f32->adamw_update(w, w, m, v, g, decay, &norms[i], ADAMW_N, adamw, cpu);
        assert_memory_equal(w, before[0], bytes);
        assert_memory_equal(m, before[1], bytes);
        assert_memory_equal(v, before[2], bytes);
    }
}

/* ---- sums ---- */

static void sums_are_exact_in_double(void **state) {
    (void)state;
    const size_t sizes[] = {0, 1, 255, 257, 100003};
    for (size_t i = 0; i < 5; i++) {
        size_t n = sizes[i];
        double *x = random_array(n, 1), sum = 0, norm = NAN, expected = 0;
        float *x32 = float_copy(x, n), sum32 = BEFORE, norm32 = NAN;
        for (size_t k = 0; k < n; k++) expected += x[k];
        sum = BEFORE;
        f64->sum_forward(&sum, x, 0.5f, n, cpu);
        f64->grad_norm(&norm, x, n, cpu);
        f32->sum_forward(&sum32, x32, 0.5f, n, cpu);
        f32->grad_norm(&norm32, x32, n, cpu);
        expected = BEFORE + 0.5 * expected;
        double expected_norm = sqrt(dot(x, x, n));
        check("sum", &sum, &expected, 1,
              1e-12); /* n roundings of 1e-16, of partial sums up to 300 */
        check("norm", &norm, &expected_norm, 1, 1e-12);
        /* Carried in double, what is left is the rounding of the result, 6e-8. */
        check("sum, float", &(double){sum32}, &expected, 1, 1e-7);
        check("norm, float", &(double){norm32}, &expected_norm, 1, 1e-7);
        release(NULL);
    }
    /* Ten million times 0.1 in float stops growing digits early; in double it does not. */
    size_t n = 10000000;
    float *x = take(n * sizeof *x), sum = 0;
    for (size_t k = 0; k < n; k++) x[k] = 0.1f;
    f32->sum_forward(&sum, x, 1, n, cpu);
    check("sum of ten million, float", &(double){sum}, &(double){(double)0.1f * (double)n}, 1,
          1e-7);
    float norm, bad[3] = {1, NAN, 2};
    f32->grad_norm(&norm, bad, 3, cpu);
    assert_true(isnan(norm));
}

/* ---- threads ---- */

static void set_threads(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

static int default_threads(void) {
#ifdef _OPENMP
    return omp_get_num_procs();
#else
    return 1;
#endif
}

/* The float sums over rows and over arrays, by this many threads, one after another in `all`. */
static size_t sums_by(int threads, float *all) {
    enum { N = 113, C = 65, V = 11 };
    int32_t tokens[N];
    for (size_t n = 0; n < N; n++) tokens[n] = (int32_t)(n * n % V);
    float *x = float_copy(random_array(N * C, 1), N * C),
          *dout = float_copy(random_array(N * C, 2), N * C);
    float *weight = float_copy(random_array(C, 3), C), mean[N], rstd[N];
    float *at = all;
    set_threads(threads);
    memset(all, 0, (2 * N * C + 3 * C + V * C + N * C + 2) * sizeof(float));
    f32->layernorm_forward(at, mean, rstd, x, weight, weight, N, C, 1e-5f, cpu);
    at += N * C;
    f32->layernorm_backward(at, at + N * C, at + N * C + C, dout, NULL, x, mean, rstd, weight, N, C,
                            cpu);
    at += N * C + 2 * C;
    f32->embedding_backward(at, at + V * C, dout, tokens, 1, N, C, V, dropouts[1], cpu);
    at += V * C + N * C;
    f32->sum_forward(at++, x, 1, N * C, cpu);
    f32->grad_norm(at++, x, N * C, cpu);
    set_threads(default_threads());
    return (size_t)(at - all);
}

static void sums_do_not_depend_on_the_number_of_threads(void **state) {
    (void)state;
    float *one = take(1 << 20), *three = take(1 << 20);
    size_t n = sums_by(1, one);
    assert_true(sums_by(3, three) == n);
    assert_memory_equal(one, three, n * sizeof(float));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(adamw_follows_the_formula, release),
        cmocka_unit_test_teardown(adamw_ignores_a_step_that_is_not_finite, release),
        cmocka_unit_test_teardown(sums_are_exact_in_double, release),
        cmocka_unit_test_teardown(sums_do_not_depend_on_the_number_of_threads, release),
    };
    return cmocka_run_group_tests_name("optimizer", tests, open_cpu, close_cpu);
}
