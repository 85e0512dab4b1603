/* What the tests of the CPU layers share. They hold gradients against central differences in double,
 * forward passes against plain loops or formulas, float against double, and the layers to the
 * promises of their headers: what is added to, what is written, what may be NULL or the same array,
 * what padding and bad steps must not do. */
#ifndef TEST_CPU_LAYERS_H
#define TEST_CPU_LAYERS_H

#include "layers/layers.h"
#include "test/devices.h"

extern const Layers *f64, *f32;

/* cmocka's set-up and tear-down of a group: f64, f32 and cpu. */
int open_cpu(void **state);
int close_cpu(void **state);

/* ---- arrays, freed after each test, by release ---- */

void *take(size_t bytes);
int release(void **state);

/* Uniform in [-1, 1) with 24 bits, so that the same numbers exist in float. */
double *random_array(size_t n, uint64_t key);
double *filled_array(size_t n, double value);
double *copy_of(const double *x, size_t n);
float *float_copy(const double *x, size_t n);
double *double_copy(const float *x, size_t n);

void subtract(double *x, double value, size_t n);
double dot(const double *x, const double *y, size_t n);

/* ---- comparisons ---- */

/* Accumulators start from this value, so that = in place of += is seen; arrays that are written
 * start from NaN, so that += in place of =, or an element left out, is seen. */
#define BEFORE 0.75

void check(const char *name, const double *x, const double *reference, size_t n, double tolerance);

/* The inputs are the same numbers in both types, so only roundings differ, 6e-8 each at most; they
 * add up like a random walk over the few hundred terms of the sums here. */
void check_float(const char *name, const float *x, const double *reference, size_t n);

typedef double Loss(void *problem);

/* Compares gradient with (loss(x + h) - loss(x - h)) / 2h at every place, or at 32 random ones.
 * With h = 1e-5 the truncation is h² ~ 1e-10 and the rounding 1e-16 / h ~ 1e-11, relative to values
 * near 1. */
void check_gradient(const char *name, Loss *loss, void *problem, double *x, const double *gradient,
                    size_t n);

extern const Dropout dropouts[2]; /* none, and some */

#endif
