/* Cross-entropy on CUDA: one block a row, in base 2 and with an online sum.
 *
 * With z = x log2(e), the first pass keeps for each thread the largest z so far, m, and
 * s = Σ 2^(z - m), scaled down when m grows (Milakov, Gimelshein, "Online normalizer calculation
 * for softmax", 2018); the block's (m, s) give loss = ln2 (m + log2 s - z[target]). The backward
 * then reads the row again, from cache (GPT-2's row is 98 KiB in bf16), and writes the gradient
 * over it: the logits cross the memory once each way, and no row is too long.
 *
 * exponential2 is the approximate instruction: relative error 2^-22, results below 2^-126 flushed
 * to 0, which is nothing beside the 1 that the largest logit adds to s. */
#include "layers/cross_entropy.h"

#include <float.h>

#include "layers/cuda_common.cuh"

namespace {

constexpr int UNROLL = 4; /* accesses a thread has in flight */

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ float exponential2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* s = Σ 2^(z - m). Empty: m is finite so that m - m is 0, and below every finite logit. */
struct Normalizer {
    float m, s;
};

template <int K>
__device__ __forceinline__ void add(Normalizer *sum, const float (&x)[K]) {
    float top = x[0];
#pragma unroll
    for (int k = 1; k < K; k++) top = fmaxf(top, x[k]);
    top *= LOG2E;
    if (top > sum->m) {
        sum->s *= exponential2(sum->m - top);
        sum->m = top;
    }
#pragma unroll
    for (int k = 0; k < K; k++) sum->s += exponential2(fmaf(x[k], LOG2E, -sum->m));
}

/* x[0..K) = K / W accesses of W elements, `stride` elements apart. */
template <int W, int K>
__device__ __forceinline__ void load_batch(float (&x)[K], const real *p, size_t stride) {
#pragma unroll
    for (int u = 0; u < K / W; u++) load<W>((float (&)[W])x[u * W], p + u * stride);
}

/* The row's normalizer, the same in every thread. Columns from V on do not count. */
template <int W, int THREADS>
__device__ __forceinline__ Normalizer normalize(const real *row, size_t V) {
    constexpr size_t STRIDE = THREADS * W, BATCH = STRIDE * UNROLL;
    Normalizer sum = {-FLT_MAX, 0.0f};
    size_t c = threadIdx.x * W;
    for (; c - threadIdx.x * W + BATCH <= V; c += BATCH) {
        float x[UNROLL * W];
        load_batch<W>(x, row + c, STRIDE);
        add(&sum, x);
    }
    for (; c < V; c += STRIDE) {
        float x[W];
        load<W>(x, row + c);
#pragma unroll
        for (int k = 0; k < W; k++) x[k] = c + k < V ? x[k] : -INFINITY;
        add(&sum, x);
    }
    const float m = block_max<THREADS>(sum.m);
    return {m, block_sum<THREADS>(sum.s * exponential2(sum.m - m))};
}

__device__ __forceinline__ float loss_of(Normalizer sum, float target_logit) {
    return LN2 * (fmaf(-target_logit, LOG2E, sum.m) + log2f(sum.s));
}

template <int W, int THREADS>
__global__ __launch_bounds__(THREADS) void forward_kernel(float *losses, const real *logits,
                                                          const int32_t *targets, size_t V,
                                                          size_t Vp) {
    const real *row = logits + blockIdx.x * Vp;
    const int32_t target = targets[blockIdx.x];
    float loss = 0.0f;
    if (target >= 0) loss = loss_of(normalize<W, THREADS>(row, V), to_float(row[target]));
    if (threadIdx.x == 0) losses[blockIdx.x] = loss;
}

template <int W, int THREADS>
__global__ __launch_bounds__(THREADS, 1024 / THREADS) void backward_kernel(
    float *losses, real *logits, const int32_t *targets, float dloss, size_t V, size_t Vp) {
    constexpr size_t STRIDE = THREADS * W, BATCH = STRIDE * UNROLL;
    real *row = logits + blockIdx.x * Vp;
    const int32_t target = targets[blockIdx.x];
    if (target < 0) {
        const float zeros[W] = {};
        for (size_t c = threadIdx.x * W; c < Vp; c += STRIDE) store<W>(row + c, zeros);
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }

    const float target_logit = to_float(row[target]); /* before anything is overwritten */
    const Normalizer sum = normalize<W, THREADS>(row, V);
    const float scale = dloss / sum.s;
    size_t c = threadIdx.x * W;
    for (; c - threadIdx.x * W + BATCH <= V; c += BATCH) {
        float x[UNROLL * W];
        load_batch<W>(x, row + c, STRIDE);
#pragma unroll
        for (int k = 0; k < UNROLL * W; k++) x[k] = exponential2(fmaf(x[k], LOG2E, -sum.m)) * scale;
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            store<W>(row + c + u * STRIDE, (const float (&)[W])x[u * W]);
    }
    for (; c < Vp; c += STRIDE) {
        float x[W] = {};
        if (c < V) load<W>(x, row + c);
#pragma unroll
        for (int k = 0; k < W; k++)
            x[k] = c + k < V ? exponential2(fmaf(x[k], LOG2E, -sum.m)) * scale : 0.0f;
        store<W>(row + c, x);
    }

    __syncthreads(); /* the target's column holds its probability now */
    if (threadIdx.x == 0) {
        const float p = exponential2(fmaf(target_logit, LOG2E, -sum.m)) / sum.s;
        row[target] = from_float<real>(dloss * (p - 1.0f));
        losses[blockIdx.x] = loss_of(sum, target_logit);
    }
}

/* Threads by the length of the row: characters need few, words many. */
constexpr int FEW = 128, MANY = 512;
constexpr size_t SHORT = 4096;

} // namespace

void LAYER(cross_entropy_forward)(void *losses, const void *logits, const int32_t *targets,
                                  size_t N, size_t V, size_t Vp, Device *device) {
    if (N == 0) return;
    const bool few = V <= SHORT;
    auto *kernel = vectorisable(Vp, {logits})
                       ? (few ? forward_kernel<VECTOR, FEW> : forward_kernel<VECTOR, MANY>)
                       : (few ? forward_kernel<1, FEW> : forward_kernel<1, MANY>);
    kernel<<<blocks_for(N, 1), few ? FEW : MANY, 0, stream_of(device)>>>(
        (float *)losses, (const real *)logits, targets, V, Vp);
    LAUNCH_CHECK();
}

void LAYER(cross_entropy_backward)(void *losses, void *logits, const int32_t *targets, float dloss,
                                   size_t N, size_t V, size_t Vp, Device *device) {
    if (N == 0) return;
    const bool few = V <= SHORT;
    auto *kernel = vectorisable(Vp, {logits})
                       ? (few ? backward_kernel<VECTOR, FEW> : backward_kernel<VECTOR, MANY>)
                       : (few ? backward_kernel<1, FEW> : backward_kernel<1, MANY>);
    kernel<<<blocks_for(N, 1), few ? FEW : MANY, 0, stream_of(device)>>>(
        (float *)losses, (real *)logits, targets, dloss, V, Vp);
    LAUNCH_CHECK();
}
