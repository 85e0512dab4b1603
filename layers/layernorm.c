/* Layernorm on the CPU: a row at a time, the mean first and the variance from the deviations, so
 * that a large mean costs no digits; sums carried in double. */
#include "layers/layernorm.h"

#include <math.h>

#include "layers/dropout_factors.h"

/* Columns whose parameter gradients one thread sums at a time. */
#define COLUMNS 64

static void normalize(real *out, acc *mean, acc *rstd, const real *x, const real *weight,
                      const real *bias, size_t C, float eps) {
    double sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) sum += x[c];
    double m = sum / (double)C;
#pragma omp simd reduction(+ : squares)
    for (size_t c = 0; c < C; c++) squares += (x[c] - m) * (x[c] - m);
    *mean = (acc)m;
    *rstd = (acc)(1 / sqrt(squares / (double)C + eps));
    acc center = *mean, scale = *rstd;
#pragma omp simd
    for (size_t c = 0; c < C; c++) out[c] = (x[c] - center) * scale * weight[c] + bias[c];
}

void LAYER(layernorm_forward)(void *out_, void *mean_, void *rstd_, const void *x_,
                              const void *weight, const void *bias, size_t N, size_t C, float eps,
                              Device *device) {
    (void)device;
    real *out = out_;
    const real *x = x_;
    acc *mean = mean_, *rstd = rstd_;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++)
        normalize(out + n * C, mean + n, rstd + n, x + n * C, weight, bias, C, eps);
}

void LAYER(residual_layernorm_forward)(void *out_, void *residual_, void *mean_, void *rstd_,
                                       const void *x_, const void *branch_, const void *weight,
                                       const void *bias, size_t N, size_t C, float eps,
                                       Dropout dropout, Device *device) {
    (void)device;
    real *out = out_, *residual = residual_;
    const real *x = x_, *branch = branch_;
    acc *mean = mean_, *rstd = rstd_;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        for (size_t first = 0; first < C; first += DROPOUT_TILE) {
            size_t count = C - first < DROPOUT_TILE ? C - first : DROPOUT_TILE, i = n * C + first;
            float factors[DROPOUT_TILE];
            dropout_factors(factors, i, count, dropout);
#pragma omp simd
            for (size_t c = 0; c < count; c++)
                residual[i + c] = x[i + c] + branch[i + c] * factors[c];
        }
        normalize(out + n * C, mean + n, rstd + n, residual + n * C, weight, bias, C, eps);
    }
}

/* With x̂ = (x - mean) rstd and g = dout weight:
 * dx = dresidual + rstd (g - mean(g) - x̂ mean(g x̂)), dweight += Σ dout x̂, dbias += Σ dout.
 *
 * The sums over rows go down shares of the columns in a pass of their own: their order does not
 * depend on the number of threads, and the second reading comes from the cache unless N is large.
 * */
void LAYER(layernorm_backward)(void *dx_, void *dweight_, void *dbias_, const void *dout_,
                               const void *dresidual_, const void *x_, const void *mean_,
                               const void *rstd_, const void *weight_, size_t N, size_t C,
                               Device *device) {
    (void)device;
    real *dx = dx_;
    acc *dweight = dweight_, *dbias = dbias_;
    const real *dout = dout_, *dresidual = dresidual_, *x = x_, *weight = weight_;
    const acc *mean = mean_, *rstd = rstd_;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < C; first += COLUMNS) {
        size_t count = C - first < COLUMNS ? C - first : COLUMNS;
        double weight_sums[COLUMNS] = {0}, bias_sums[COLUMNS] = {0};
        for (size_t n = 0; n < N; n++) {
            const real *dout_row = dout + n * C + first, *x_row = x + n * C + first;
            acc center = mean[n], scale = rstd[n];
#pragma omp simd
            for (size_t c = 0; c < count; c++) {
                weight_sums[c] += dout_row[c] * ((x_row[c] - center) * scale);
                bias_sums[c] += dout_row[c];
            }
        }
        for (size_t c = 0; c < count; c++) {
            dweight[first + c] += (acc)weight_sums[c];
            dbias[first + c] += (acc)bias_sums[c];
        }
    }

#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        const real *dout_row = dout + n * C, *x_row = x + n * C;
        acc center = mean[n], scale = rstd[n];
        double sum = 0, projection = 0;
#pragma omp simd reduction(+ : sum, projection)
        for (size_t c = 0; c < C; c++) {
            real g = dout_row[c] * weight[c];
            sum += g;
            projection += g * ((x_row[c] - center) * scale);
        }
        real g_mean = (real)(sum / (double)C), g_x_mean = (real)(projection / (double)C);
        real *dx_row = dx + n * C;
        const real *past = dresidual ? dresidual + n * C : NULL;
#pragma omp simd
        for (size_t c = 0; c < C; c++) {
            real x_hat = (x_row[c] - center) * scale;
            real d = scale * (dout_row[c] * weight[c] - g_mean - x_hat * g_x_mean);
            dx_row[c] = past ? past[c] + d : d;
        }
    }
}
