/* The CPU layers whose weights are matrices, embedding and linear, and what is fused into them,
 * GELU and dropout. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>

#include "test/cpu_layers.h"

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(embedding_gradients, release),
        cmocka_unit_test_teardown(linear_gradients, release),
        cmocka_unit_test_teardown(gelu_gradients, release),
        cmocka_unit_test_teardown(dropout_follows_the_counter, release),
    };
    return cmocka_run_group_tests_name("linear layers", tests, open_cpu, close_cpu);
}
