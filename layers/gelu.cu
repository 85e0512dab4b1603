/* GELU on CUDA, at the speed of its memory traffic.
 *
 * gelu(x) = x s with the gate s, and, with u' = du/dx, gelu'(x) = s + x s (1 - s) 2u'. */
#include "layers/gelu.h"

#include "layers/cuda_common.cuh"
#include "layers/gelu_gate.cuh"

namespace {

constexpr int THREADS = 256;

/* With u' = sqrt(2/π) (1 + 3 · 0.044715 x²). */
__device__ __forceinline__ float gelu_derivative(float x) {
    /* Beyond 10 it is 0 or 1 in float, and 0 times an overflowing u' must not become NaN. */
    if (fabsf(x) > 10.0f) x = copysignf(10.0f, x);
    const float s = gelu_gate(x);
    const float twice_du = 1.5957691216057308f * (1.0f + 0.134145f * x * x);
    return s + x * s * (1.0f - s) * twice_du;
}

template <int W>
__global__ __launch_bounds__(THREADS) void forward_kernel(real *out, const real *x, size_t n) {
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float value[W];
    load_some<W>(value, x + i, n - i);
#pragma unroll
    for (int k = 0; k < W; k++) value[k] *= gelu_gate(value[k]);
    store_some<W>(out + i, value, n - i);
}

template <int W>
__global__ __launch_bounds__(THREADS) void backward_kernel(real *dx, const real *dout,
                                                           const real *x, size_t n) {
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float value[W], gradient[W];
    load_some<W>(value, x + i, n - i);
    load_some<W>(gradient, dout + i, n - i);
#pragma unroll
    for (int k = 0; k < W; k++) gradient[k] *= gelu_derivative(value[k]);
    store_some<W>(dx + i, gradient, n - i);
}

} // namespace

void LAYER(gelu_forward)(void *out, const void *x, size_t n, Device *device) {
    if (n == 0) return;
    const bool aligned = vectorisable(0, {out, x});
    const unsigned blocks = blocks_for(n, (size_t)THREADS * (aligned ? VECTOR : 1));
    auto *kernel = aligned ? forward_kernel<VECTOR> : forward_kernel<1>;
    kernel<<<blocks, THREADS, 0, stream_of(device)>>>((real *)out, (const real *)x, n);
    LAUNCH_CHECK();
}

void LAYER(gelu_backward)(void *dx, const void *dout, const void *x, size_t n, Device *device) {
    if (n == 0) return;
    const bool aligned = vectorisable(0, {dx, dout, x});
    const unsigned blocks = blocks_for(n, (size_t)THREADS * (aligned ? VECTOR : 1));
    auto *kernel = aligned ? backward_kernel<VECTOR> : backward_kernel<1>;
    kernel<<<blocks, THREADS, 0, stream_of(device)>>>((real *)dx, (const real *)dout,
                                                      (const real *)x, n);
    LAUNCH_CHECK();
}
