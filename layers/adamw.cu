/* AdamW over a whole arena in one launch; see adamw.h for the equations. Memory-bound: 28 bytes an
 * element in fp32, 30 in bf16, each touched once. */
#include "layers/adamw.h"

#include <math.h>

#include "layers/cuda_common.cuh"

namespace {

/* A thread takes 8 elements, two 16-byte accesses of each float array, so that enough bytes are in
 * flight; a block takes one chunk, so that it has one decay. */
constexpr int WIDTH = 8;
constexpr int THREADS = ADAMW_CHUNK / WIDTH;
static_assert(WIDTH % VECTOR == 0, "parameters are written 16 bytes at a time");
static_assert(THREADS * WIDTH == ADAMW_CHUNK && THREADS % WARP == 0, "a block is a chunk");

typedef struct {
    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float correction1, correction2; /* 1 / (1-βᵗ) */
    float lr, eps, weight_decay, clip;
} Constants;

__global__ __launch_bounds__(THREADS) void adamw_kernel(real *params, float *master,
                                                        float *__restrict__ m,
                                                        float *__restrict__ v,
                                                        const float *__restrict__ grads,
                                                        const uint8_t *__restrict__ decay,
                                                        const float *__restrict__ norm,
                                                        Constants k) {
    const float total = *norm;
    if (!isfinite(total)) return;
    const float scale = k.clip > 0.0f ? fminf(1.0f, k.clip / (total + 1e-6f)) : 1.0f;
    const float lambda = decay[blockIdx.x] ? k.weight_decay : 0.0f;

    const size_t i = blockIdx.x * (size_t)ADAMW_CHUNK + threadIdx.x * WIDTH;
    float g[WIDTH], m1[WIDTH], m2[WIDTH], w[WIDTH];
    load<WIDTH>(g, grads + i);
    load<WIDTH>(m1, m + i);
    load<WIDTH>(m2, v + i);
    load<WIDTH>(w, master + i);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        g[j] *= scale;
        m1[j] = k.beta1 * m1[j] + k.one_minus_beta1 * g[j];
        m2[j] = k.beta2 * m2[j] + k.one_minus_beta2 * g[j] * g[j];
        const float step = m1[j] * k.correction1 / (sqrtf(m2[j] * k.correction2) + k.eps);
        w[j] -= k.lr * (step + lambda * w[j]);
    }
    store<WIDTH>(m + i, m1);
    store<WIDTH>(v + i, m2);
    store<WIDTH>(master + i, w);
    if ((void *)params != (void *)master) store<WIDTH>(params + i, w);
}

} // namespace

void LAYER(adamw_update)(void *params, void *master, void *m, void *v, const void *grads,
                         const uint8_t *decay, const void *norm, size_t n, AdamW adamw,
                         Device *device) {
    Constants k = {};
    k.beta1 = adamw.beta1;
    k.beta2 = adamw.beta2;
    /* In double: 1-βᵗ loses its digits in float while t is small. */
    k.one_minus_beta1 = (float)(1.0 - (double)adamw.beta1);
    k.one_minus_beta2 = (float)(1.0 - (double)adamw.beta2);
    k.correction1 = (float)(1.0 / (1.0 - pow((double)adamw.beta1, (double)adamw.step)));
    k.correction2 = (float)(1.0 / (1.0 - pow((double)adamw.beta2, (double)adamw.step)));
    k.lr = adamw.lr;
    k.eps = adamw.eps;
    k.weight_decay = adamw.weight_decay;
    k.clip = adamw.clip;
    adamw_kernel<<<blocks_for(n, ADAMW_CHUNK), THREADS, 0, stream_of(device)>>>(
        (real *)params, (float *)master, (float *)m, (float *)v, (const float *)grads, decay,
        (const float *)norm, k);
    LAUNCH_CHECK();
}
