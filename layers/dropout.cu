/* Dropout on CUDA. A thread takes 16 bytes: a half or a quarter of the elements that one draw of
 * the generator decides, and each part draws again, for the memory is what takes the time. */
#include "layers/dropout.h"

#include "layers/cuda_common.cuh"

namespace {

constexpr int THREADS = 256;

template <int W>
__global__ __launch_bounds__(THREADS) void dropout_kernel(real *out, const real *x, size_t n,
                                                          Dropout dropout) {
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float value[W];
    load_some<W>(value, x + i, n - i);
    dropout_apply<W>(value, i, dropout);
    store_some<W>(out + i, value, n - i);
}

} // namespace

void LAYER(dropout_forward)(void *out, const void *x, size_t n, Dropout dropout, Device *device) {
    if (n == 0) return;
    const bool aligned = vectorisable(0, {out, x});
    const unsigned blocks = blocks_for(n, (size_t)THREADS * (aligned ? VECTOR : 1));
    auto *kernel = aligned ? dropout_kernel<VECTOR> : dropout_kernel<1>;
    kernel<<<blocks, THREADS, 0, stream_of(device)>>>((real *)out, (const real *)x, n, dropout);
    LAUNCH_CHECK();
}
