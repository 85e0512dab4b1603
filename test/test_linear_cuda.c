/* The CUDA layers whose weights are matrices, embedding and linear, and what is fused into them,
 * GELU and dropout. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "test/cuda_layers.h"

/* Embedding. */

typedef enum { TOKENS_RANDOM, TOKENS_ALL_EQUAL } Tokens;

static void embedding_case(size_t B, size_t T, size_t C, size_t V, Dropout dropout, Tokens kind) {
    begin_case("embedding", "B=%zu T=%zu C=%zu V=%zu p=%g %s", B, T, C, V, dropout.probability,
               kind == TOKENS_ALL_EQUAL ? "one token" : "random tokens");
    const size_t N = B * T;
    int32_t *values = malloc(N * sizeof(int32_t));
    for (size_t n = 0; n < N; n++)
        values[n] = (int32_t)(kind == TOKENS_ALL_EQUAL ? V / 2 : n == 0 ? V - 1 : random_below(V));
    Tensor *tokens = integers("tokens", N, values);
    free(values);
    Tensor *wte = normal("wte", V * C, t.type, 0, 1), *wpe = normal("wpe", T * C, t.type, 0, 1);
    Tensor *out = output("out", N * C, t.type), *dout = normal("dout", N * C, t.type, .1f, 1);
    Tensor *dwte = normal("dwte", V * C, TYPE_F32, 0, 1);
    Tensor *dwpe = normal("dwpe", T * C, TYPE_F32, 0, 1);
    FOR_SIDES(s) {
        t.layers[s]->embedding_forward(at(out, s), at(tokens, s), at(wte, s), at(wpe, s), B, T, C,
                                       dropout, t.devices[s]);
        t.layers[s]->embedding_backward(at(dwte, s), at(dwpe, s), at(dout, s), at(tokens, s), B, T,
                                        C, V, dropout, t.devices[s]);
    }
    check_each(out, rounded(), 1e-6); /* zeros are dropped elements; a sum of two may cancel */
    check_norm(dwte, ARITHMETIC);
    check_norm(dwpe, ARITHMETIC);
    end_case();
}

static void embedding(void **state) {
    start(state);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(widths); j++)
            embedding_case(1, rows[i], widths[j], 65, dropout_tenth, TOKENS_RANDOM);
    embedding_case(5, 17, 48, 65, no_dropout, TOKENS_RANDOM);
    embedding_case(3, 257, 384, 65, dropout_tenth, TOKENS_RANDOM);
    embedding_case(4, 113, 768, 5003, no_dropout, TOKENS_RANDOM);
    embedding_case(MAX_N / 64, 64, 65, 257, dropout_tenth, TOKENS_ALL_EQUAL);
    embedding_case(MAX_N / 256, 256, 384, 65, no_dropout, TOKENS_ALL_EQUAL);
    embedding_case(MAX_N, 1, 48, 1, no_dropout, TOKENS_RANDOM);
    t.shift = 1;
    embedding_case(3, 17, 384, 65, dropout_tenth, TOKENS_RANDOM);
    finish();
}

/* Linear. */

static void linear_case(size_t N, size_t IC, size_t OC, WeightLayout layout) {
    begin_case("linear", "N=%zu IC=%zu OC=%zu %s", N, IC, OC,
               layout == WEIGHT_IN_OUT ? "in-out" : "out-in");
    const float scale = 1 / sqrtf((float)IC);
    Tensor *x = normal("x", N * IC, t.type, 0, 1), *bias = normal("bias", OC, t.type, 0, 1);
    Tensor *weight = normal("weight", IC * OC, t.type, 0, scale);
    Tensor *out = output("out", N * OC, t.type), *unbiased = output("out, no bias", N * OC, t.type);
    Tensor *pre_gelu = output("pre_gelu", N * OC, t.type);
    Tensor *activated = output("out, GELU", N * OC, t.type);
    FOR_SIDES(s) {
        LinearForward *forward = t.layers[s]->linear_forward;
        forward(at(out, s), NULL, at(x, s), at(weight, s), at(bias, s), N, IC, OC, layout,
                t.devices[s]);
        forward(at(unbiased, s), NULL, at(x, s), at(weight, s), NULL, N, IC, OC, layout,
                t.devices[s]);
        forward(at(activated, s), at(pre_gelu, s), at(x, s), at(weight, s), at(bias, s), N, IC, OC,
                layout, t.devices[s]);
    }
    check_norm(out, matmul_rounded());
    check_norm(unbiased, matmul_rounded());
    check_norm(pre_gelu, matmul_rounded());
    check_norm(activated, matmul_rounded_twice());

    Tensor *dout = normal("dout", N * OC, t.type, .1f, 1), *dx = output("dx", N * IC, t.type);
    Tensor *activation = normal("activation", N * IC, t.type, 0, 1);
    Tensor *dactivation = output("dx, GELU", N * IC, t.type);
    Tensor *dweight = normal("dweight", IC * OC, TYPE_F32, 0, 1);
    Tensor *dbias = normal("dbias", OC, TYPE_F32, 0, 1);
    FOR_SIDES(s) {
        LinearBackward *backward = t.layers[s]->linear_backward;
        backward(at(dx, s), at(dweight, s), at(dbias, s), at(dout, s), at(x, s), at(weight, s),
                 NULL, N, IC, OC, layout, t.devices[s]);
        backward(at(dactivation, s), at(dweight, s), at(dbias, s), at(dout, s), at(x, s),
                 at(weight, s), at(activation, s), N, IC, OC, layout, t.devices[s]);
        backward(NULL, at(dweight, s), NULL, at(dout, s), at(x, s), at(weight, s), NULL, N, IC, OC,
                 layout, t.devices[s]);
    }
    check_norm(dx, matmul_rounded());
    check_norm(dactivation, matmul_rounded_twice());
    check_norm(dweight, matmul());
    check_norm(dbias, ARITHMETIC);
    end_case();
}

static void linear(void **state) {
    start(state);
    static const size_t shapes[][2] = {{1, 1},   {7, 65},     {65, 7},    {48, 144},
                                       {128, 65}, {384, 1536}, {768, 2304}, {1600, 64}};
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(shapes); j++) {
            linear_case(rows[i], shapes[j][0], shapes[j][1], WEIGHT_IN_OUT);
            linear_case(rows[i], shapes[j][0], shapes[j][1], WEIGHT_OUT_IN);
        }
    linear_case(MAX_N, 384, 384, WEIGHT_IN_OUT);
    linear_case(17, 128, 50304, WEIGHT_OUT_IN);
    finish();
}

/* GELU. */

static void gelu_case(size_t n) {
    begin_case("gelu", "n=%zu", n);
    Tensor *x = normal("x", n, t.type, 0, 2), *out = output("out", n, t.type);
    Tensor *dout = normal("dx on dout", n, t.type, 0, 1), *dx = output("dx", n, t.type);
    FOR_SIDES(s) {
        t.layers[s]->gelu_forward(at(out, s), at(x, s), n, t.devices[s]);
        t.layers[s]->gelu_backward(at(dx, s), at(dout, s), at(x, s), n, t.devices[s]);
        t.layers[s]->gelu_backward(at(dout, s), at(dout, s), at(x, s), n, t.devices[s]);
    }
    check_norm(out, rounded());
    check_norm(dx, rounded());
    check_norm(dout, rounded());
    end_case();
}

/* Where exponentials and cubes overflow, element by element: the largest would hide the rest. */
static void gelu_extremes(void) {
    begin_case("gelu extremes", "|x| up to 1e30");
    float x_values[] = {0, 1e-30f, -1e-30f, .1f, -.1f, -.75f, 3, -3, 5, -5, 9.9f, -9.9f, 10.1f,
                        -10.1f, 30, -30, 1e4f, -1e4f, 1e14f, -1e14f, 1e30f, -1e30f};
    const size_t n = COUNT(x_values);
    Tensor *x = given("x", n, t.type, x_values), *out = output("out", n, t.type);
    Tensor *dout = normal("dout", n, t.type, 3, .1f), *dx = output("dx", n, t.type);
    FOR_SIDES(s) {
        t.layers[s]->gelu_forward(at(out, s), at(x, s), n, t.devices[s]);
        t.layers[s]->gelu_backward(at(dx, s), at(dout, s), at(x, s), n, t.devices[s]);
    }
    check_each(out, rounded(), 1e-20); /* small values keep their relative accuracy */
    check_each(dx, rounded(), 1e-5);   /* gelu' cancels near its zero, x = -0.75 */
    end_case();
}

static void gelu(void **state) {
    start(state);
    static const size_t sizes[] = {1, 7, 48, 8191, 1023 * 65, (size_t)MAX_N * 384};
    for (size_t i = 0; i < COUNT(sizes); i++) gelu_case(sizes[i]);
    gelu_extremes();
    t.shift = 1;
    gelu_case(8191);
    finish();
}

/* Dropout. */

/* Element by element, so the zeros must be the same ones. */
static void dropout_case(size_t n, Dropout dropout) {
    begin_case("dropout", "n=%zu p=%g", n, dropout.probability);
    Tensor *x = normal("out on x", n, t.type, 0, 1), *out = output("out", n, t.type);
    FOR_SIDES(s) {
        t.layers[s]->dropout_forward(at(out, s), at(x, s), n, dropout, t.devices[s]);
        t.layers[s]->dropout_forward(at(x, s), at(x, s), n, dropout, t.devices[s]);
    }
    check_each(out, rounded(), 0);
    check_each(x, rounded(), 0);
    end_case();
}

static void dropout(void **state) {
    start(state);
    static const size_t sizes[] = {1, 7, 15, 48, 8191, (size_t)MAX_N * 384};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        dropout_case(sizes[i], no_dropout);
        dropout_case(sizes[i], dropout_tenth);
        dropout_case(sizes[i], (Dropout){.5f, ~(uint64_t)0});
    }
    t.shift = 1;
    dropout_case(8191, dropout_tenth);
    finish();
}

int main(void) {
    struct CMUnitTest tests[] = {
        IN_BOTH_TYPES(embedding),
        IN_BOTH_TYPES(linear),
        IN_BOTH_TYPES(gelu),
        IN_BOTH_TYPES(dropout),
    };
    choose_tests(tests);
    return cmocka_run_group_tests_name("linear layers on CUDA", tests, open_sides, close_sides);
}
