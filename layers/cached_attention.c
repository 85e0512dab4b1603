/* Attention over a cache on the CPU: a head at a time, its scores in the workspace. */
#include "layers/cached_attention.h"

#include <math.h>
#include <string.h>

#include "runtime/vector_math.h"

void LAYER(cache_store)(void *cache_, const void *qkv_, size_t first, size_t count, size_t n,
                        size_t T, size_t C, Device *device) {
    (void)device;
    real *cache = cache_;
    const real *qkv = qkv_;
#pragma omp parallel for collapse(2) schedule(static)
    for (size_t b = first; b < first + count; b++)
        for (size_t t = 0; t < n; t++)
            memcpy(cache + (b * T + t) * 2 * C, qkv + (3 * t + 1) * C, 2 * C * sizeof(real));
}

size_t LAYER(cached_attention_workspace)(size_t B, size_t T, size_t NH, size_t HS) {
    (void)HS;
    return B * NH * T * sizeof(real);
}

/* scores[t] = scale q·K[t], t <= last; returns the largest. Rows are `stride` apart. */
static real score(real *scores, const real *q, const real *keys, size_t last, size_t stride,
                  size_t HS) {
    real scale = (real)(1 / sqrt((double)HS)), most = -INFINITY;
    for (size_t t = 0; t <= last; t++) {
        real dot = 0;
#pragma omp simd reduction(+ : dot)
        for (size_t i = 0; i < HS; i++) dot += q[i] * keys[t * stride + i];
        scores[t] = dot * scale;
        most = scores[t] > most ? scores[t] : most;
    }
    return most;
}

void LAYER(cached_attention_forward)(void *out_, void *cache_, const void *qkv_,
                                     const int32_t *positions, void *workspace, size_t B, size_t T,
                                     size_t NH, size_t HS, Device *device) {
    (void)device;
    real *out = out_, *cache = cache_;
    const real *qkv = qkv_;
    size_t C = NH * HS, stride = 2 * C;
#pragma omp parallel for collapse(2) schedule(static)
    for (size_t b = 0; b < B; b++) {
        for (size_t h = 0; h < NH; h++) {
            size_t last = (size_t)positions[b];
            real *keys = cache + b * T * stride + h * HS, *values = keys + C;
            real *scores = (real *)workspace + (b * NH + h) * T, *o = out + b * C + h * HS;
            const real *q = qkv + b * 3 * C + h * HS;
            memcpy(keys + last * stride, q + C, HS * sizeof *keys);
            memcpy(values + last * stride, q + 2 * C, HS * sizeof *values);
            real most = score(scores, q, keys, last, stride, HS), sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t t = 0; t <= last; t++) {
                scores[t] = real_exp(scores[t] - most);
                sum += scores[t];
            }
            for (size_t i = 0; i < HS; i++) o[i] = 0;
            for (size_t t = 0; t <= last; t++) {
                real p = scores[t] / sum;
#pragma omp simd
                for (size_t i = 0; i < HS; i++) o[i] += p * values[t * stride + i];
            }
        }
    }
}
