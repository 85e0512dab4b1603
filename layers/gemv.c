/* Few rows times a matrix on the CPU, at the speed of reading the matrix.
 *
 * W (IC,OC) is cut by rows into one part a processor, so that each thread reads one long stretch of
 * memory; the parts' sums meet in the scratch and are added in order. What is read is multiplied
 * with all rows of x before it leaves the cache, and with four at a time while it is in registers. */
#include "layers/gemv.h"

#include "layers/gelu.h"
#include "layers/layernorm.h"
#include "runtime/error.h"

/* Rows of W that are read together: as many streams as a processor prefetches well, and sums are
 * loaded and stored once for all of them. */
enum { TOGETHER = 4 };

/* Elements of a matrix below which a second thread is not worth waking. */
enum { SMALL = 16384 };

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void check_scratch(const Device *device, size_t elements) {
    if (elements * sizeof(real) > device->scratch_bytes)
        error_fatal(__FILE__, __LINE__,
                    "gemv needs %zu bytes of scratch and the device has %zu; see "
                    "layers_gemv_scratch_bytes",
                    elements * sizeof(real), device->scratch_bytes);
}

/* norm(x), in the scratch, or x itself; *rest receives where the scratch goes on. */
static const real *normalised(const real *x, const GemvNorm *norm, size_t N, size_t C, real **rest,
                              Device *device) {
    real *out = device->scratch, *mean = out + N * C, *rstd = mean + N;
    *rest = rstd + N;
    if (!norm) return x;
    LAYER(layernorm_forward)(out, mean, rstd, x, norm->weight, norm->bias, N, C, norm->eps, device);
    return out;
}

/* --- x W + b, W (IC,OC) --------------------------------------------------------------------- */

/* sums[n] += Σ_r factor[n][r] w[r] for the 4 rows n, or the first only. */
static void add_4(real *sums, const real factor[4][TOGETHER], const real *const w[TOGETHER],
                  size_t OC) {
    real *s0 = sums, *s1 = s0 + OC, *s2 = s1 + OC, *s3 = s2 + OC;
#pragma omp simd
    for (size_t o = 0; o < OC; o++) {
        real a = w[0][o], b = w[1][o], c = w[2][o], d = w[3][o];
        s0[o] += factor[0][0] * a + factor[0][1] * b + (factor[0][2] * c + factor[0][3] * d);
        s1[o] += factor[1][0] * a + factor[1][1] * b + (factor[1][2] * c + factor[1][3] * d);
        s2[o] += factor[2][0] * a + factor[2][1] * b + (factor[2][2] * c + factor[2][3] * d);
        s3[o] += factor[3][0] * a + factor[3][1] * b + (factor[3][2] * c + factor[3][3] * d);
    }
}

static void add_1(real *sums, const real factor[TOGETHER], const real *const w[TOGETHER],
                  size_t OC) {
#pragma omp simd
    for (size_t o = 0; o < OC; o++)
        sums[o] +=
            factor[0] * w[0][o] + factor[1] * w[1][o] + (factor[2] * w[2][o] + factor[3] * w[3][o]);
}

/* sums (N,OC) = x[:, begin … end) W[begin … end, :]. Where fewer than TOGETHER rows are left, the
 * others are the first one again, times 0. */
static void multiply_part(real *sums, const real *x, const real *weight, size_t N, size_t IC,
                          size_t OC, size_t begin, size_t end) {
    for (size_t i = 0; i < N * OC; i++) sums[i] = 0;
    for (size_t i = begin; i < end; i += TOGETHER) {
        size_t rows = smaller(end - i, TOGETHER);
        const real *w[TOGETHER];
        for (size_t r = 0; r < TOGETHER; r++) w[r] = weight + (i + (r < rows ? r : 0)) * OC;
        for (size_t n = 0; n < N;) {
            size_t count = N - n < 4 ? 1 : 4;
            real factor[4][TOGETHER];
            for (size_t k = 0; k < count; k++)
                for (size_t r = 0; r < TOGETHER; r++)
                    factor[k][r] = r < rows ? x[(n + k) * IC + i + r] : 0;
            if (count == 4)
                add_4(sums + n * OC, factor, w, OC);
            else
                add_1(sums + n * OC, factor[0], w, OC);
            n += count;
        }
    }
}

void LAYER(gemv_forward)(void *out_, const void *x_, const GemvNorm *norm, const void *weight,
                         const void *bias_, size_t N, size_t IC, size_t OC, GemvOutput output,
                         Device *device) {
    real *out = out_, *sums;
    const real *bias = bias_;
    size_t parts = IC * OC < SMALL ? 1 : (size_t)device->processors;
    check_scratch(device, N * (IC + 2) + parts * N * OC);
    const real *x = normalised(x_, norm, N, IC, &sums, device);
#pragma omp parallel if (parts > 1)
    {
#pragma omp for schedule(static)
        for (size_t p = 0; p < parts; p++)
            multiply_part(sums + p * N * OC, x, weight, N, IC, OC, IC * p / parts,
                          IC * (p + 1) / parts);
#pragma omp for schedule(static)
        for (size_t o = 0; o < OC; o++) {
            for (size_t n = 0; n < N; n++) {
                real sum = bias[o] + (output == GEMV_ADD ? out[n * OC + o] : 0);
                for (size_t p = 0; p < parts; p++) sum += sums[(p * N + n) * OC + o];
                out[n * OC + o] = sum;
            }
        }
    }
    if (output == GEMV_GELU) LAYER(gelu_forward)(out, out, N * OC, device);
}

/* --- norm(x) Wᵀ, W (V,C) -------------------------------------------------------------------- */

static acc dot(const real *x, const real *row, size_t C) {
    acc sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t c = 0; c < C; c++) sum += x[c] * row[c];
    return sum;
}

/* logits[n V] for the 4 rows n of x. */
static void dot_4(acc *logits, size_t V, const real *x, const real *row, size_t C) {
    acc s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (size_t c = 0; c < C; c++) {
        s0 += x[c] * row[c];
        s1 += x[C + c] * row[c];
        s2 += x[2 * C + c] * row[c];
        s3 += x[3 * C + c] * row[c];
    }
    logits[0] = s0, logits[V] = s1, logits[2 * V] = s2, logits[3 * V] = s3;
}

void LAYER(gemv_head)(void *logits_, const void *x_, const GemvNorm *norm, const void *weight,
                      size_t N, size_t C, size_t V, Device *device) {
    acc *logits = logits_;
    real *rest;
    check_scratch(device, N * (C + 2));
    const real *x = normalised(x_, norm, N, C, &rest, device);
#pragma omp parallel for schedule(static) if (V * C >= SMALL)
    for (size_t v = 0; v < V; v++) {
        const real *row = (const real *)weight + v * C;
        size_t n = 0;
        for (; N - n >= 4; n += 4) dot_4(logits + n * V + v, V, x + n * C, row, C);
        for (; n < N; n++) logits[n * V + v] = dot(x + n * C, row, C);
    }
}
