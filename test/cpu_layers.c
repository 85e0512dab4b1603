#include "test/cpu_layers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "test/compare.h"

const Layers *f64, *f32;

int open_cpu(void **state) {
    (void)state;
    f64 = layers_get(DEVICE_CPU, TYPE_F64);
    f32 = layers_get(DEVICE_CPU, TYPE_F32);
    cpu = device_open(DEVICE_CPU, 0);
    return f64 && f32 && cpu && device_reserve_scratch(cpu, layers_scratch_bytes(DEVICE_CPU, 113))
               ? 0
               : -1;
}

int close_cpu(void **state) {
    (void)state;
    device_close(cpu);
    return 0;
}

static void *taken[1024];
static size_t taken_count;

void *take(size_t bytes) {
    assert_true(taken_count < sizeof taken / sizeof taken[0]);
    void *memory = malloc(bytes + 1);
    assert_non_null(memory);
    return taken[taken_count++] = memory;
}

int release(void **state) {
    (void)state;
    while (taken_count) free(taken[--taken_count]);
    return 0;
}

double *random_array(size_t n, uint64_t key) {
    double *x = take(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = 2 * (double)random_uniform(philox(key, (uint32_t)i, 0, 0, 0).word[0]) - 1;
    return x;
}

double *filled_array(size_t n, double value) {
    double *x = take(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = value;
    return x;
}

double *copy_of(const double *x, size_t n) { return memcpy(take(n * sizeof *x), x, n * sizeof *x); }

float *float_copy(const double *x, size_t n) {
    float *y = take(n * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = (float)x[i];
    return y;
}

double *double_copy(const float *x, size_t n) {
    double *y = take(n * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = x[i];
    return y;
}

void subtract(double *x, double value, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] -= value;
}

double dot(const double *x, const double *y, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

void check(const char *name, const double *x, const double *reference, size_t n, double tolerance) {
    assert_true(compare(name, relative_error(x, reference, n), tolerance));
}

void check_float(const char *name, const float *x, const double *reference, size_t n) {
    check(name, double_copy(x, n), reference, n, 2e-6);
}

void check_gradient(const char *name, Loss *loss, void *problem, double *x, const double *gradient,
                    size_t n) {
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

const Dropout dropouts[2] = {{0, 0}, {0.3f, 1234567890123}};
