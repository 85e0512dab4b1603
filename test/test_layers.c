/* The CPU layers. Gradients against central differences in double, forward passes against plain
 * loops or formulas, float against double, and the promises of the headers: what is added to, what
 * is written, what may be NULL or the same array, what padding and bad steps must not do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "layers/layers.h"
#include "runtime/vector_math.h"
#include "test/compare.h"

static const Layers *f64, *f32;
static Device *cpu;

/* ---- arrays, freed after each test ---- */

static void *taken[1024];
static size_t taken_count;

static void *take(size_t bytes) {
    assert_true(taken_count < sizeof taken / sizeof taken[0]);
    void *memory = malloc(bytes + 1);
    assert_non_null(memory);
    return taken[taken_count++] = memory;
}

static int release(void **state) {
    (void)state;
    while (taken_count) free(taken[--taken_count]);
    return 0;
}

/* Uniform in [-1, 1) with 24 bits, so that the same numbers exist in float. */
static double *random_array(size_t n, uint64_t key) {
    double *x = take(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = 2 * (double)random_uniform(philox(key, (uint32_t)i, 0, 0, 0).word[0]) - 1;
    return x;
}

static double *filled_array(size_t n, double value) {
    double *x = take(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = value;
    return x;
}

static double *copy_of(const double *x, size_t n) {
    return memcpy(take(n * sizeof *x), x, n * sizeof *x);
}

static float *float_copy(const double *x, size_t n) {
    float *y = take(n * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = (float)x[i];
    return y;
}

static double *double_copy(const float *x, size_t n) {
    double *y = take(n * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = x[i];
    return y;
}

static void subtract(double *x, double value, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] -= value;
}

static double dot(const double *x, const double *y, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* ---- comparisons ---- */

/* Accumulators start from this value, so that = in place of += is seen; arrays that are written
 * start from NaN, so that += in place of =, or an element left out, is seen. */
#define BEFORE 0.75

static void check(const char *name, const double *x, const double *reference, size_t n,
                  double tolerance) {
    assert_true(compare(name, relative_error(x, reference, n), tolerance));
}

/* The inputs are the same numbers in both types, so only roundings differ, 6e-8 each at most; they
 * add up like a random walk over the few hundred terms of the sums here. */
static void check_float(const char *name, const float *x, const double *reference, size_t n) {
    check(name, double_copy(x, n), reference, n, 2e-6);
}

typedef double Loss(void *problem);

/* Compares gradient with (loss(x + h) - loss(x - h)) / 2h at every place, or at 32 random ones.
 * With h = 1e-5 the truncation is h² ~ 1e-10 and the rounding 1e-16 / h ~ 1e-11, relative to values
 * near 1. */
static void check_gradient(const char *name, Loss *loss, void *problem, double *x,
                           const double *gradient, size_t n) {
    enum { MOST = 32 };
    const double h = 1e-5;
    double numeric[MOST], analytic[MOST];
    size_t count = n < MOST ? n : MOST;
    for (size_t i = 0; i < count; i++) {
        size_t at = n <= MOST ? i : philox(n, (uint32_t)i, 0, 0, 0).word[0] % n;
        double kept = x[at];
        x[at] = kept + h;
        double above = loss(problem);
        x[at] = kept - h;
        double below = loss(problem);
        x[at] = kept;
        numeric[i] = (above - below) / (2 * h);
        analytic[i] = gradient[at];
    }
    check(name, analytic, numeric, count, 1e-6);
}

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

static const Dropout dropouts[] = {{0, 0}, {0.3f, 1234567890123}};

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

/* ---- embedding ---- */

typedef struct {
    size_t B, T, C, V;
    int32_t *tokens;                      /* (B,T) */
    double *wte, *wpe, *out, *out_weight; /* (V,C), (T,C), (B,T,C), (B,T,C) */
    Dropout dropout;
} EmbeddingProblem;

static double embedding_loss(void *problem) {
    EmbeddingProblem *p = problem;
    f64->embedding_forward(p->out, p->tokens, p->wte, p->wpe, p->B, p->T, p->C, p->dropout, cpu);
    return dot(p->out, p->out_weight, p->B * p->T * p->C);
}

static void embedding_gradients(void **state) {
    (void)state;
    const size_t channels[] = {1, 7, 48, 65};
    for (size_t i = 0; i < 8; i++) {
        EmbeddingProblem p = {
            .B = 3, .T = 17, .C = channels[i / 2], .V = 11, .dropout = dropouts[i % 2]};
        size_t N = p.B * p.T, n = N * p.C;
        p.tokens = take(N * sizeof *p.tokens);
        /* Few distinct tokens: rows of dwte collect many positions. Token 10 never occurs. */
        for (size_t k = 0; k < N; k++)
            p.tokens[k] = (int32_t)(philox(5, (uint32_t)k, 0, 0, 0).word[0] % 10);
        p.wte = random_array(p.V * p.C, 1);
        p.wpe = random_array(p.T * p.C, 2);
        p.out = filled_array(n, NAN);
        p.out_weight = random_array(n, 3);
        double *dwte = filled_array(p.V * p.C, BEFORE), *dwpe = filled_array(p.T * p.C, BEFORE);
        float *dwte32 = float_copy(dwte, p.V * p.C), *dwpe32 = float_copy(dwpe, p.T * p.C);
        f64->embedding_backward(dwte, dwpe, p.out_weight, p.tokens, p.B, p.T, p.C, p.V, p.dropout,
                                cpu);
        f32->embedding_backward(dwte32, dwpe32, float_copy(p.out_weight, n), p.tokens, p.B, p.T,
                                p.C, p.V, p.dropout, cpu);
        check_float("embedding dwte, float", dwte32, dwte, p.V * p.C);
        check_float("embedding dwpe, float", dwpe32, dwpe, p.T * p.C);
        for (size_t c = 0; c < p.C; c++) assert_true(dwte[10 * p.C + c] == BEFORE);
        subtract(dwte, BEFORE, p.V * p.C);
        subtract(dwpe, BEFORE, p.T * p.C);
        check_gradient("embedding dwte", embedding_loss, &p, p.wte, dwte, p.V * p.C);
        check_gradient("embedding dwpe", embedding_loss, &p, p.wpe, dwpe, p.T * p.C);

        embedding_loss(&p);
        double *sum = filled_array(n, NAN), *expected = filled_array(n, NAN);
        for (size_t k = 0; k < n; k++)
            sum[k] = p.wte[(size_t)p.tokens[k / p.C] * p.C + k % p.C] +
                     p.wpe[k / p.C % p.T * p.C + k % p.C];
        f64->dropout_forward(expected, sum, n, p.dropout, cpu);
        check("embedding out", p.out, expected, n, 0); /* the same operations */
        float *out32 = take(n * sizeof *out32);
        f32->embedding_forward(out32, p.tokens, float_copy(p.wte, p.V * p.C),
                               float_copy(p.wpe, p.T * p.C), p.B, p.T, p.C, p.dropout, cpu);
        check_float("embedding out, float", out32, p.out, n);
        release(NULL);
    }
}

/* ---- dropout ---- */

static void dropout_follows_the_counter(void **state) {
    (void)state;
    const size_t sizes[] = {1, 15, 17, 100003};
    for (size_t i = 0; i < 4; i++) {
        size_t n = sizes[i], kept = 0;
        double *x = filled_array(n, 1.0), *out = filled_array(n, NAN),
               *expected = take(n * sizeof(double));
        for (size_t k = 0; k < n; k++) {
            Philox draw = philox(99, (uint32_t)(k / 16), 0, 0, 0);
            unsigned byte = (draw.word[k % 16 / 4] >> 8 * (k % 4)) & 255;
            /* p = 0.3 is 77/256. */
            expected[k] = byte < 77 ? 0 : (double)(256.0f / 179.0f);
            kept += byte >= 77;
        }
        f64->dropout_forward(out, x, n, (Dropout){0.3f, 99}, cpu);
        check("dropout", out, expected, n, 0); /* one multiplication by one factor */
        float *x32 = float_copy(x, n);
        f32->dropout_forward(x32, x32, n, (Dropout){0.3f, 99}, cpu);
        check("dropout in place, float", double_copy(x32, n), expected, n, 0);
        /* Five standard deviations, sqrt(p (1-p) / n) = 1.45e-3. */
        if (n > 100000) assert_true(fabs((double)kept / (double)n - 179.0 / 256) <= 5 * 1.45e-3);
        double *y = random_array(n, 1);
        f64->dropout_forward(out, y, n, (Dropout){0, 99}, cpu);
        check("dropout of probability 0", out, y, n, 0);
        release(NULL);
    }
}

/* ---- gelu ---- */

typedef struct {
    size_t n;
    double *x, *out, *out_weight; /* (n) */
} GeluProblem;

static double gelu_loss(void *problem) {
    GeluProblem *p = problem;
    f64->gelu_forward(p->out, p->x, p->n, cpu);
    return dot(p->out, p->out_weight, p->n);
}

static void gelu_gradients(void **state) {
    (void)state;
    const size_t sizes[] = {1, 17, 1023};
    for (size_t i = 0; i < 3; i++) {
        GeluProblem p = {.n = sizes[i]};
        p.x = random_array(p.n, 1);
        for (size_t k = 0; k < p.n; k++) p.x[k] *= 4;
        p.out = filled_array(p.n, NAN);
        p.out_weight = random_array(p.n, 2);
        double *dx = filled_array(p.n, NAN), *in_place = copy_of(p.out_weight, p.n);
        f64->gelu_backward(dx, p.out_weight, p.x, p.n, cpu);
        f64->gelu_backward(in_place, in_place, p.x, p.n, cpu);
        check("gelu dx in place", in_place, dx, p.n, 0); /* the same operations */
        check_gradient("gelu dx", gelu_loss, &p, p.x, dx, p.n);

        gelu_loss(&p);
        double *expected = take(p.n * sizeof *expected);
        for (size_t k = 0; k < p.n; k++) {
            double v = p.x[k], u = sqrt(2 / acos(-1)) * (v + 0.044715 * v * v * v);
            expected[k] = v / 2 * (1 + tanh(u));
        }
        check("gelu out", p.out, expected, p.n, 1e-14); /* some roundings of 1e-16 */
        float *x32 = float_copy(p.x, p.n), *out32 = take(p.n * sizeof(float));
        f32->gelu_forward(out32, x32, p.n, cpu);
        check_float("gelu out, float", out32, p.out, p.n);
        f32->gelu_backward(out32, float_copy(p.out_weight, p.n), x32, p.n, cpu);
        check_float("gelu dx, float", out32, dx, p.n);
        release(NULL);
    }

    const float extremes[] = {-1e4f, -100, -12, 0, 12, 100, 1e4f};
    float ones[7] = {1, 1, 1, 1, 1, 1, 1}, out[7], dx[7];
    f32->gelu_forward(out, extremes, 7, cpu);
    f32->gelu_backward(dx, ones, extremes, 7, cpu);
    for (size_t k = 0; k < 7; k++) {
        /* Past ±12 the step is over in float: gelu is 0 or x, its slope 0 or 1; at 0, 0 and 1/2. */
        assert_true(fabsf(out[k] - (extremes[k] > 0 ? extremes[k] : 0)) <= FLT_MIN);
        assert_true(fabsf(dx[k] - (k < 3 ? 0 : k == 3 ? 0.5f : 1)) <= FLT_MIN);
    }
}

/* ---- layernorm ---- */

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

/* ---- linear ---- */

/* out = gelu(x W1 + b1) W2 + b2, the way an MLP uses the layer. */
typedef struct {
    size_t N, IC, H, OC;
    WeightLayout layout;
    double *x, *w1, *b1, *pre_gelu, *hidden; /* (N,IC), (IC,H) or (H,IC), (H), (N,H), (N,H) */
    double *w2, *b2, *out, *out_weight;      /* (H,OC) or (OC,H), (OC) or NULL, (N,OC), (N,OC) */
} LinearProblem;

static double linear_loss(void *problem) {
    LinearProblem *p = problem;
    f64->linear_forward(p->hidden, p->pre_gelu, p->x, p->w1, p->b1, p->N, p->IC, p->H, p->layout,
                        cpu);
    f64->linear_forward(p->out, NULL, p->hidden, p->w2, p->b2, p->N, p->H, p->OC, p->layout, cpu);
    return dot(p->out, p->out_weight, p->N * p->OC);
}

static double *plain_linear(const double *x, const double *w, const double *b, size_t N, size_t IC,
                            size_t OC, WeightLayout layout) {
    double *out = take(N * OC * sizeof *out);
    for (size_t n = 0; n < N; n++) {
        for (size_t o = 0; o < OC; o++) {
            double sum = b ? b[o] : 0;
            for (size_t i = 0; i < IC; i++)
                sum += x[n * IC + i] * (layout == WEIGHT_IN_OUT ? w[i * OC + o] : w[o * IC + i]);
            out[n * OC + o] = sum;
        }
    }
    return out;
}

static void check_linear(size_t N, size_t IC, size_t H, size_t OC, WeightLayout layout,
                         bool biased) {
    LinearProblem p = {.N = N, .IC = IC, .H = H, .OC = OC, .layout = layout};
    p.x = random_array(N * IC, 1);
    p.w1 = random_array(IC * H, 2);
    p.b1 = biased ? random_array(H, 3) : NULL;
    p.w2 = random_array(H * OC, 4);
    p.b2 = biased ? random_array(OC, 5) : NULL;
    p.pre_gelu = filled_array(N * H, NAN);
    p.hidden = filled_array(N * H, NAN);
    p.out = filled_array(N * OC, NAN);
    p.out_weight = random_array(N * OC, 6);
    linear_loss(&p);
    /* Sums of at most 131 terms in another order. */
    check("linear pre_gelu", p.pre_gelu, plain_linear(p.x, p.w1, p.b1, N, IC, H, layout), N * H,
          1e-13);
    check("linear out", p.out, plain_linear(p.hidden, p.w2, p.b2, N, H, OC, layout), N * OC, 1e-13);

    double *dpre_gelu = filled_array(N * H, NAN), *dx = filled_array(N * IC, NAN);
    double *dw1 = filled_array(IC * H, BEFORE), *db1 = filled_array(H, BEFORE);
    double *dw2 = filled_array(H * OC, BEFORE), *db2 = filled_array(OC, BEFORE);
    f64->linear_backward(dpre_gelu, dw2, biased ? db2 : NULL, p.out_weight, p.hidden, p.w2,
                         p.pre_gelu, N, H, OC, layout, cpu);
    f64->linear_backward(dx, dw1, biased ? db1 : NULL, dpre_gelu, p.x, p.w1, NULL, N, IC, H, layout,
                         cpu);

    double *dw1_alone = filled_array(IC * H, BEFORE);
    f64->linear_backward(NULL, dw1_alone, NULL, dpre_gelu, p.x, p.w1, NULL, N, IC, H, layout, cpu);
    check("linear dweight without dx", dw1_alone, dw1, IC * H, 0); /* the same product */

    float *pre32 = take(N * H * sizeof(float)), *hidden32 = take(N * H * sizeof(float));
    float *out32 = take(N * OC * sizeof(float)), *dpre32 = take(N * H * sizeof(float));
    float *dw32 = float_copy(filled_array(H * OC, BEFORE), H * OC);
    float *db32 = float_copy(filled_array(OC, BEFORE), OC), *w2_32 = float_copy(p.w2, H * OC);
    f32->linear_forward(hidden32, pre32, float_copy(p.x, N * IC), float_copy(p.w1, IC * H),
                        biased ? float_copy(p.b1, H) : NULL, N, IC, H, layout, cpu);
    f32->linear_forward(out32, NULL, hidden32, w2_32, biased ? float_copy(p.b2, OC) : NULL, N, H,
                        OC, layout, cpu);
    f32->linear_backward(dpre32, dw32, biased ? db32 : NULL, float_copy(p.out_weight, N * OC),
                         hidden32, w2_32, pre32, N, H, OC, layout, cpu);
    check_float("linear out, float", out32, p.out, N * OC);
    check_float("linear dpre_gelu, float", dpre32, dpre_gelu, N * H);
    check_float("linear dweight, float", dw32, dw2, H * OC);
    check_float("linear dbias, float", db32, db2, OC);

    subtract(dw1, BEFORE, IC * H);
    subtract(dw2, BEFORE, H * OC);
    check_gradient("linear dx", linear_loss, &p, p.x, dx, N * IC);
    check_gradient("linear dweight before gelu", linear_loss, &p, p.w1, dw1, IC * H);
    check_gradient("linear dweight after gelu", linear_loss, &p, p.w2, dw2, H * OC);
    if (biased) {
        subtract(db1, BEFORE, H);
        subtract(db2, BEFORE, OC);
        check_gradient("linear dbias before gelu", linear_loss, &p, p.b1, db1, H);
        check_gradient("linear dbias after gelu", linear_loss, &p, p.b2, db2, OC);
    }
    release(NULL);
}

static void linear_gradients(void **state) {
    (void)state;
    for (int layout = WEIGHT_IN_OUT; layout <= WEIGHT_OUT_IN; layout++) {
        for (int biased = 0; biased < 2; biased++) {
            check_linear(1, 7, 1, 65, (WeightLayout)layout, biased);
            check_linear(17, 48, 65, 7, (WeightLayout)layout, biased);
            check_linear(113, 65, 130, 48, (WeightLayout)layout, biased);
        }
    }
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
    f32->layernorm_forward(at, mean, rstd, x, weight, weight, N, C, EPS, cpu);
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

static int open_cpu(void **state) {
    (void)state;
    f64 = layers_get(DEVICE_CPU, TYPE_F64);
    f32 = layers_get(DEVICE_CPU, TYPE_F32);
    cpu = device_open(DEVICE_CPU, 0);
    return f64 && f32 && cpu &&
                   device_reserve_scratch(cpu, layers_scratch_bytes(DEVICE_CPU, 113))
               ? 0
               : -1;
}

static int close_cpu(void **state) {
    (void)state;
    device_close(cpu);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_ulp),
        cmocka_unit_test_teardown(embedding_gradients, release),
        cmocka_unit_test_teardown(dropout_follows_the_counter, release),
        cmocka_unit_test_teardown(gelu_gradients, release),
        cmocka_unit_test_teardown(layernorm_gradients, release),
        cmocka_unit_test(layernorm_keeps_digits_beside_a_large_mean),
        cmocka_unit_test_teardown(residual_layernorm_is_add_then_layernorm, release),
        cmocka_unit_test_teardown(linear_gradients, release),
        cmocka_unit_test_teardown(cross_entropy_gradients, release),
        cmocka_unit_test(cross_entropy_of_extreme_logits_is_finite),
        cmocka_unit_test_teardown(adamw_follows_the_formula, release),
        cmocka_unit_test_teardown(adamw_ignores_a_step_that_is_not_finite, release),
        cmocka_unit_test_teardown(sums_are_exact_in_double, release),
        cmocka_unit_test_teardown(sums_do_not_depend_on_the_number_of_threads, release),
    };
    return cmocka_run_group_tests_name("layers", tests, open_cpu, close_cpu);
}
