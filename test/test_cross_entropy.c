/* The CPU's cross-entropy, and the exp that every softmax is made of. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "runtime/vector_math.h"
#include "test/compare.h"
#include "test/cpu_layers.h"

/* ---- exp ---- */

static void exp_is_within_two_ulp(void **state) {
    (void)state;
    enum { BATCH = 4096 };
    static float x[BATCH], y[BATCH];
    double worst = 0;
    /* Every 509th bit pattern: all exponents, both signs. */
    for (uint64_t first = 0; first < (uint64_t)1 << 32; first += (uint64_t)509 * BATCH) {
        for (size_t i = 0; i < BATCH; i++) {
            uint32_t bits = (uint32_t)(first + 509 * i);
            memcpy(&x[i], &bits, sizeof bits);
        }
#pragma omp simd
        for (size_t i = 0; i < BATCH; i++) y[i] = exp_f32(x[i]);
        for (size_t i = 0; i < BATCH; i++) {
            double expected = exp((double)x[i]);
            float rounded = (float)expected;
            if (isnan(x[i])) {
                assert_true(isnan(y[i]));
            } else if (isinf(rounded) || isinf(y[i])) {
                /* They may part only in the last two floats before inf. */
                assert_true(y[i] >= nextafterf(FLT_MAX, 0) && expected >= nextafterf(FLT_MAX, 0));
            } else {
                double ulp = (double)nextafterf(rounded, INFINITY) - rounded;
                double error = fabs(y[i] - expected) / (isinf(ulp) ? 0x1p104 : ulp);
                if (!(error <= worst)) worst = error;
            }
        }
    }
    assert_true(compare("exp_f32, ulp", worst, 2));

    double worst_double = 0;
    for (uint32_t i = 0; i < 400000; i++) {
        Philox draw = philox(1, i, 0, 0, 0);
        double range = i % 2 ? 750 : 2;
        double at = range * (2 * (draw.word[0] * 0x1p-32 + draw.word[1] * 0x1p-64) - 1);
        long double expected = expl(at);
        if (expected > DBL_MAX) {
            assert_true(exp_f64(at) >= DBL_MAX);
            continue;
        }
        double rounded = (double)expected;
        double error =
            (double)(fabsl(exp_f64(at) - expected) / (nextafter(rounded, INFINITY) - rounded));
        if (!(error <= worst_double)) worst_double = error;
    }
    assert_true(compare("exp_f64, ulp", worst_double, 2));

    assert_true(exp_f32(-INFINITY) == 0 && exp_f64(-INFINITY) == 0);
    assert_true(exp_f32(-FLT_MAX) == 0 && exp_f64(-DBL_MAX) == 0);
    assert_true(isinf(exp_f32(INFINITY)) && isinf(exp_f64(INFINITY)));
    assert_true(isinf(exp_f32(FLT_MAX)) && isinf(exp_f64(DBL_MAX)));
    assert_true(isnan(exp_f32(NAN)) && isnan(exp_f64(NAN)));
    assert_true(exp_f32(0) == 1 && exp_f64(0) == 1);
}

/* ---- cross-entropy ---- */

typedef struct {
    size_t N, V, Vp;
    double *logits, *losses; /* (N,Vp), (N) */
    int32_t *targets;        /* (N) */
    float dloss;
} CrossEntropyProblem;

static double cross_entropy_loss(void *problem) {
    CrossEntropyProblem *p = problem;
    f64->cross_entropy_forward(p->losses, p->logits, p->targets, p->N, p->V, p->Vp, cpu);
    double sum = 0;
    for (size_t n = 0; n < p->N; n++) sum += p->losses[n];
    return p->dloss * sum;
}

static void cross_entropy_gradients(void **state) {
    (void)state;
    const size_t shapes[][3] = {
        {3, 1, 1}, {17, 65, 128}, {113, 48, 48}, {5, 1025, 1088}, {3, 2500, 2560}};
    const double paddings[] = {0, NAN, 1e30, INFINITY};
    for (size_t i = 0; i < 20; i++) {
        CrossEntropyProblem p = {shapes[i / 4][0], shapes[i / 4][1], shapes[i / 4][2],
                                 .dloss = 0.37f};
        size_t N = p.N, V = p.V, Vp = p.Vp;
        p.logits = random_array(N * Vp, 1);
        p.losses = filled_array(N, NAN);
        p.targets = take(N * sizeof *p.targets);
        double *expected = take(N * sizeof *expected);
        for (size_t n = 0; n < N; n++) {
            p.targets[n] = n % 4 == 2 ? -1 : (int32_t)(philox(7, (uint32_t)n, 0, 0, 0).word[0] % V);
            double *row = p.logits + n * Vp, sum = 0;
            for (size_t v = 0; v < V; v++) row[v] *= 8, sum += exp(row[v]);
            for (size_t v = V; v < Vp; v++) row[v] = paddings[i % 4];
            expected[n] = p.targets[n] < 0 ? 0 : log(sum) - row[p.targets[n]];
        }
        double *dlogits = copy_of(p.logits, N * Vp), *losses = filled_array(N, NAN);
        f64->cross_entropy_backward(losses, dlogits, p.targets, p.dloss, N, V, Vp, cpu);
        cross_entropy_loss(&p);
        check("cross-entropy losses", p.losses, expected, N, 1e-13); /* V roundings of 1e-16 */
        check("cross-entropy losses from the backward", losses, p.losses, N,
              0); /* the same operations */

        float *dlogits32 = float_copy(p.logits, N * Vp), *losses32 = take(N * sizeof(float));
        f32->cross_entropy_forward(losses32, dlogits32, p.targets, N, V, Vp, cpu);
        check_float("cross-entropy losses, float", losses32, losses, N);
        f32->cross_entropy_backward(losses32, dlogits32, p.targets, p.dloss, N, V, Vp, cpu);
        check_float("cross-entropy losses from the backward, float", losses32, losses, N);
        check_float("cross-entropy dlogits, float", dlogits32, dlogits, N * Vp);
        for (size_t n = 0; n < N; n++)
            for (size_t v = p.targets[n] < 0 ? 0 : V; v < Vp; v++)
                assert_true(dlogits[n * Vp + v] == 0 && dlogits32[n * Vp + v] == 0);
        /* The padding is checked above; its places would compare NaN with 0 here. */
        for (size_t n = 0; n < N && n < 4; n++)
            check_gradient("cross-entropy dlogits", cross_entropy_loss, &p, p.logits + n * Vp,
                           dlogits + n * Vp, V);
        release(NULL);
    }
}

static void cross_entropy_of_extreme_logits_is_finite(void **state) {
    (void)state;
    enum { V = 50, N = 3 };
    float logits[N * V], losses[N];
    const int32_t targets[N] = {0, 1, 2};
    for (size_t i = 0; i < N * V; i++) logits[i] = -1e4f;
    logits[0 * V + 0] = 1e4f; /* certain and right, certain and wrong, all alike */
    logits[1 * V + 0] = 1e4f;
    f32->cross_entropy_backward(losses, logits, targets, 1, N, V, V, cpu);
    assert_true(losses[0] == 0 && losses[1] == 2e4f);
    assert_true(fabs(losses[2] - log(V)) <= 1e-6); /* a rounding of 4 */
    assert_true(logits[0] == 0 && logits[V] == 1 && logits[V + 1] == -1);
    for (size_t i = 0; i < N * V; i++) assert_true(isfinite(logits[i]));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_ulp),
        cmocka_unit_test_teardown(cross_entropy_gradients, release),
        cmocka_unit_test(cross_entropy_of_extreme_logits_is_finite),
    };
    return cmocka_run_group_tests_name("cross-entropy", tests, open_cpu, close_cpu);
}
