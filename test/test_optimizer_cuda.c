/* AdamW on CUDA, and sums: of losses, and of the gradients' squares. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>

#include "runtime/random.h"
#include "test/cuda_layers.h"

static void adamw_case(size_t chunks, AdamW adamw, float norm_value) {
    begin_case("adamw", "%zu chunks, step %d, norm %g, clip %g", chunks, (int)adamw.step,
               norm_value, adamw.clip);
    const size_t n = chunks * ADAMW_CHUNK;
    float *values = malloc(n * sizeof(float));
    Tensor *master = normal("master", n, TYPE_F32, 0, .1f), *params = output("params", n, t.type);
    Tensor *m = normal("m", n, TYPE_F32, 0, .01f), *grads = normal("grads", n, TYPE_F32, 0, .1f);
    random_normal(values, n, t.key++, .01f);
    for (size_t i = 0; i < n; i++) values[i] *= values[i];
    Tensor *v = given("v", n, TYPE_F32, values), *norm = given("norm", 1, TYPE_F32, &norm_value);
    free(values);
    int32_t *decay_values = calloc(chunks, sizeof(int32_t)); /* more bytes than used */
    for (size_t i = 0; i < chunks; i++) ((uint8_t *)decay_values)[i] = random_below(2) == 1;
    Tensor *decay = integers("decay", chunks, decay_values);
    free(decay_values);
    FOR_SIDES(s) {
        bool separate = s != REFERENCE && t.type == TYPE_BF16;
        t.layers[s]->adamw_update(separate ? at(params, s) : at(master, s), at(master, s), at(m, s),
                                  at(v, s), at(grads, s), at(decay, s), at(norm, s), n, adamw,
                                  t.devices[s]);
    }
    check_norm(master, ARITHMETIC);
    check_norm(m, ARITHMETIC);
    check_norm(v, ARITHMETIC);
    if (t.type == TYPE_BF16) {
        adopt(master);
        device_copy(t.devices[REFERENCE], at(params, REFERENCE), at(master, REFERENCE),
                    n * sizeof(double));
        check_each(params, 0x1p-8, 0); /* the master, rounded once */
    }
    end_case();
}

/* With a norm that is not finite nothing changes: the reference is what was there. */
static void adamw_keeps(float norm_value) {
    begin_case("adamw, bad step", "norm %g", norm_value);
    const size_t n = 2 * ADAMW_CHUNK;
    Tensor *master = normal("master", n, TYPE_F32, 0, 1), *m = normal("m", n, TYPE_F32, 0, 1);
    Tensor *params = normal("params", n, t.type, 0, 1), *v = normal("v", n, TYPE_F32, 2, .1f);
    Tensor *grads = normal("grads", n, TYPE_F32, NAN, 1);
    Tensor *norm = given("norm", 1, TYPE_F32, &norm_value);
    Tensor *decay = integers("decay", 1, (const int32_t[]){0x0101});
    const AdamW adamw = {
        .lr = .1f, .beta1 = .9f, .beta2 = .99f, .eps = 1e-8f, .clip = 1, .step = 3};
    for (Side s = FIRST; s <= AGAIN; s++)
        t.layers[s]->adamw_update(t.type == TYPE_BF16 ? at(params, s) : at(master, s),
                                  at(master, s), at(m, s), at(v, s), at(grads, s), at(decay, s),
                                  at(norm, s), n, adamw, t.devices[s]);
    check_each(params, 0, 0);
    check_each(master, 0, 0);
    check_each(m, 0, 0);
    check_each(v, 0, 0);
    end_case();
}

static void adamw(void **state) {
    start(state);
    /* lr is large so that the update, not the old weight, decides the comparison. */
    AdamW adamw = {.lr = .1f, .beta1 = .9f, .beta2 = .95f, .eps = 1e-8f, .weight_decay = .1f};
    static const uint64_t steps[] = {1, 2, 1000};
    for (size_t i = 0; i < COUNT(steps); i++) {
        adamw.step = steps[i];
        adamw.clip = 0;
        adamw_case(1, adamw, 12);
        adamw.clip = 1;
        adamw_case(37, adamw, 12); /* clips */
        adamw_case(5, adamw, .5f); /* does not */
    }
    adamw_keeps(NAN);
    adamw_keeps(INFINITY);
    finish();
}

static void sums_case(size_t n) {
    begin_case("sums", "n=%zu", n);
    Tensor *x = normal("x", n, TYPE_F32, 4, 1), *grads = normal("grads", n, TYPE_F32, 0, .01f);
    Tensor *sum = normal("sum", 1, TYPE_F32, 3, .1f), *norm = output("norm", 1, TYPE_F32);
    FOR_SIDES(s) {
        t.layers[s]->sum_forward(at(sum, s), at(x, s), 1 / (float)n, n, t.devices[s]);
        t.layers[s]->grad_norm(at(norm, s), at(grads, s), n, t.devices[s]);
    }
    check_norm(sum, ARITHMETIC);
    check_norm(norm, ARITHMETIC);
    end_case();
}

static void sums(void **state) {
    start(state);
    static const size_t sizes[] = {1, 7, 31, 1023, 4096, 65537, 3000001};
    for (size_t i = 0; i < COUNT(sizes); i++) sums_case(sizes[i]);

    begin_case("sums", "with a gradient that is not finite");
    Tensor *grads = given("grads", 3, TYPE_F32, (float[]){1, INFINITY, 2});
    Tensor *norm = output("norm", 1, TYPE_F32);
    FOR_SIDES(s) t.layers[s]->grad_norm(at(norm, s), at(grads, s), 3, t.devices[s]);
    double *cuda = download(norm, FIRST);
    assert_false(isfinite(cuda[0]));
    free(cuda);
    end_case();
    finish();
}

int main(void) {
    struct CMUnitTest tests[] = {
        IN_BOTH_TYPES(adamw),
        IN_BOTH_TYPES(sums),
    };
    choose_tests(tests);
    return cmocka_run_group_tests_name("optimizer on CUDA", tests, open_sides, close_sides);
}
