/* Sums over a whole array in two stages: a fixed number of blocks leave one partial sum each, and
 * one block adds those. The order depends on n alone. */
#include "layers/reduce.h"

#include "layers/cuda_common.cuh"

namespace {

constexpr int THREADS = 256, WIDTH = 4;
constexpr int IN_FLIGHT = 4; /* loads that a thread waits for together */
/* One wave on an H200 at eight blocks a multiprocessor. */
constexpr size_t MAX_BLOCKS = 1024;
constexpr int FINISH_THREADS = 1024;

struct Identity {
    static __device__ float of(float x) { return x; }
    static __device__ void finish(float *result, float sum, float scale) { *result += scale * sum; }
};
struct Square {
    static __device__ float of(float x) { return x * x; }
    static __device__ void finish(float *result, float sum, float) { *result = sqrtf(sum); }
};

/* partials[block] = Σ Term::of(x) over every MAX_BLOCKS-th group of THREADS * W elements. */
template <typename Term, int W>
__global__ __launch_bounds__(THREADS) void partial_kernel(float *__restrict__ partials,
                                                          const float *__restrict__ x, size_t n) {
    const size_t thread = blockIdx.x * (size_t)THREADS + threadIdx.x;
    const size_t stride = gridDim.x * (size_t)THREADS, groups = n / W;
    float sums[W] = {};
    for (size_t i = thread; i < groups; i += IN_FLIGHT * stride) {
        float value[IN_FLIGHT][W] = {};
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
            if (i + u * stride < groups) load<W>(value[u], x + (i + u * stride) * W);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++)
#pragma unroll
            for (int j = 0; j < W; j++) sums[j] += Term::of(value[u][j]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < W; j++) sum += sums[j];
    if (thread < n % W) sum += Term::of(x[groups * W + thread]);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <typename Term>
__global__ __launch_bounds__(FINISH_THREADS) void finish_kernel(float *result,
                                                                const float *__restrict__ partials,
                                                                unsigned count, float scale) {
    static_assert(MAX_BLOCKS <= FINISH_THREADS, "a thread takes one partial sum");
    const float partial = threadIdx.x < count ? partials[threadIdx.x] : 0.0f;
    const float sum = block_sum<FINISH_THREADS>(partial);
    if (threadIdx.x == 0) Term::finish(result, sum, scale);
}

template <typename Term>
void reduce(void *result, const void *x, float scale, size_t n, Device *device) {
    const size_t most = div_up(n, (size_t)THREADS * WIDTH);
    const unsigned blocks = (unsigned)(most < 1 ? 1 : most < MAX_BLOCKS ? most : MAX_BLOCKS);
    float *partials = (float *)scratch_of(device, MAX_BLOCKS * sizeof(float));
    const float *values = (const float *)x;
    const cudaStream_t stream = stream_of(device);
    if ((uintptr_t)values % (WIDTH * sizeof(float)) == 0)
        partial_kernel<Term, WIDTH><<<blocks, THREADS, 0, stream>>>(partials, values, n);
    else
        partial_kernel<Term, 1><<<blocks, THREADS, 0, stream>>>(partials, values, n);
    LAUNCH_CHECK();
    finish_kernel<Term><<<1, FINISH_THREADS, 0, stream>>>((float *)result, partials, blocks, scale);
    LAUNCH_CHECK();
}

} // namespace

void LAYER(sum_forward)(void *sum, const void *x, float scale, size_t n, Device *device) {
    reduce<Identity>(sum, x, scale, n, device);
}

void LAYER(grad_norm)(void *norm, const void *grads, size_t n, Device *device) {
    reduce<Square>(norm, grads, 1.0f, n, device);
}
