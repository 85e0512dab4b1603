/* CUDA's cross-entropy: losses and gradients, padding, targets to ignore, logits that are not
 * finite. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "runtime/random.h"
#include "test/cuda_layers.h"

/* (N,Vp) logits with `padding` in the columns from V on, and targets that include the last column
 * and rows to ignore. */
static Tensor *logits_and_targets(size_t N, size_t V, size_t Vp, float deviation, float padding,
                                  Tensor **targets) {
    float *values = malloc(N * Vp * sizeof(float));
    int32_t *target_values = malloc(N * sizeof(int32_t));
    random_normal(values, N * Vp, t.key++, deviation);
    for (size_t n = 0; n < N; n++) {
        for (size_t v = V; v < Vp; v++) values[n * Vp + v] = padding;
        target_values[n] = n % 5 == 3 ? -1 : n % 5 == 1 ? (int32_t)V - 1 : (int32_t)random_below(V);
    }
    *targets = integers("targets", N, target_values);
    Tensor *logits = given("dlogits", N * Vp, t.type, values);
    free(values);
    free(target_values);
    return logits;
}

static void cross_entropy_case(size_t N, size_t V, size_t Vp, float deviation, float padding) {
    begin_case("cross_entropy", "N=%zu V=%zu Vp=%zu deviation %g padding %g", N, V, Vp, deviation,
               padding);
    Tensor *targets, *logits = logits_and_targets(N, V, Vp, deviation, padding, &targets);
    Tensor *losses = output("losses", N, TYPE_F32), *same = output("losses again", N, TYPE_F32);
    const float dloss = .37f;
    FOR_SIDES(s) {
        t.layers[s]->cross_entropy_forward(at(losses, s), at(logits, s), at(targets, s), N, V, Vp,
                                           t.devices[s]);
        t.layers[s]->cross_entropy_backward(at(same, s), at(logits, s), at(targets, s), dloss, N, V,
                                            Vp, t.devices[s]);
    }
    check_norm(losses, ARITHMETIC);
    check_norm(same, ARITHMETIC);
    /* Each element, for the targets' near -dloss would hide the rest; p - 1 cancels where p is near
     * 1, and a probability below the smallest float may be 0. */
    check_each(logits, rounded(), 1e-6);
    end_case();
}

/* A row with a logit that is not finite has a loss that is not: the run must notice. */
static void cross_entropy_of(float poison) {
    enum { V = 300, N = 3 };
    begin_case("cross_entropy", "with a logit of %g", poison);
    float values[N * V] = {0};
    values[1 * V + 77] = poison;
    Tensor *logits = given("poisoned logits", N * V, t.type, values);
    Tensor *targets = integers("targets", N, (const int32_t[N]){1, 2, 3});
    Tensor *losses = output("losses", N, TYPE_F32);
    FOR_SIDES(s)
        t.layers[s]->cross_entropy_backward(at(losses, s), at(logits, s), at(targets, s), 1, N, V,
                                            V, t.devices[s]);
    double *cuda = download(losses, FIRST);
    assert_true(isfinite(cuda[0]) && !isfinite(cuda[1]) && isfinite(cuda[2]));
    free(cuda);
    end_case();
}

static void cross_entropy(void **state) {
    start(state);
    cross_entropy_case(1, 1, 1, 3, NAN);
    cross_entropy_case(1, 7, 8, 3, NAN);
    cross_entropy_case(1023, 65, 128, 3, NAN);
    cross_entropy_case(257, 65, 65, 3, NAN); /* rows start anywhere */
    cross_entropy_case(113, 257, 320, 3, 3e38f);
    cross_entropy_case(17, 4097, 4104, 3, NAN); /* more threads than accesses of a batch */
    cross_entropy_case(6, 50257, 50304, 3, NAN);
    cross_entropy_case(6, 50257, 50304, 3, 3e38f);
    cross_entropy_case(6, 50304, 50304, 3, NAN);
    cross_entropy_case(6, 50257, 50257, 3, NAN);
    cross_entropy_case(17, 257, 320, 1000, NAN); /* exp(logit) would overflow */
    t.shift = 1;
    cross_entropy_case(17, 257, 320, 3, NAN);
    t.shift = 0;
    cross_entropy_of(NAN);
    cross_entropy_of(INFINITY);
    finish();
}

int main(void) {
    struct CMUnitTest tests[] = {
        IN_BOTH_TYPES(cross_entropy),
    };
    choose_tests(tests);
    return cmocka_run_group_tests_name("cross-entropy on CUDA", tests, open_sides, close_sides);
}
