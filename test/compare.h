/* Comparison of a result with a reference: ‖x − ref‖ / ‖ref‖ against a tolerance, one printed line
 * for each quantity. It passes only if error <= tolerance, so a NaN anywhere fails. */
#ifndef TEST_COMPARE_H
#define TEST_COMPARE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

static inline double relative_error_float(const float *x, const float *reference, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)x[i] - reference[i];
        difference += d * d;
        norm += (double)reference[i] * reference[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static inline double relative_error(const double *x, const double *reference, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = x[i] - reference[i];
        difference += d * d;
        norm += reference[i] * reference[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static inline bool compare(const char *name, double error, double tolerance) {
    bool pass = error <= tolerance;
    printf("%-48s %.3e  (tolerance %.0e)%s\n", name, error, tolerance, pass ? "" : "  FAILED");
    return pass;
}

#endif
