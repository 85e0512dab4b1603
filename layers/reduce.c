/* Sums over whole arrays on the CPU: the array is cut into SEGMENTS parts whatever the number of
 * threads, each is summed in double, and the partial sums are added in order. */
#include "layers/reduce.h"

#include <math.h>

#define SEGMENTS 256

typedef enum { SUM_VALUES, SUM_SQUARES } Summand;

static double sum(const acc *x, size_t n, Summand summand) {
    double partial[SEGMENTS];
    size_t length = n / SEGMENTS + 1;
#pragma omp parallel for schedule(static)
    for (size_t segment = 0; segment < SEGMENTS; segment++) {
        size_t begin = segment * length < n ? segment * length : n;
        size_t end = n - begin < length ? n : begin + length;
        double s = 0;
        if (summand == SUM_SQUARES) {
#pragma omp simd reduction(+ : s)
            for (size_t i = begin; i < end; i++) s += (double)x[i] * x[i];
        } else {
#pragma omp simd reduction(+ : s)
            for (size_t i = begin; i < end; i++) s += x[i];
        }
        partial[segment] = s;
    }
    double total = 0;
    for (size_t segment = 0; segment < SEGMENTS; segment++) total += partial[segment];
    return total;
}

void LAYER(sum_forward)(void *sum_, const void *x, float scale, size_t n, Device *device) {
    (void)device;
    *(acc *)sum_ += (acc)(scale * sum(x, n, SUM_VALUES));
}

void LAYER(grad_norm)(void *norm, const void *grads, size_t n, Device *device) {
    (void)device;
    *(acc *)norm = (acc)sqrt(sum(grads, n, SUM_SQUARES));
}
