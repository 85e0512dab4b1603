/* What the backward needs of each row: D = rowsum(dO ∘ O) (Dao et al. 2022, arXiv 2205.14135,
 * section 3.1 and appendix B) and LSE in base 2, padded to whole tiles with the values of a row
 * that does nothing: P = exp2(S - ∞) = 0. */
#include "attention/flash_problem.cuh"
#include "attention/mma_tile.cuh"

namespace {

/* Σ over the eight products of two chunks. */
__device__ __forceinline__ float dot_chunk(uint4 x, uint4 y) {
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(bf16_low(a[i]), bf16_low(b[i]), sum);
        sum = fmaf(bf16_high(a[i]), bf16_high(b[i]), sum);
    }
    return sum;
}

enum {
    THREADS = 128,
    LANES = 8, /* share a row, 16 bytes each at a time */
    ROWS = THREADS / LANES
};

__global__ void __launch_bounds__(THREADS)
    statistics_kernel(const FlashProblem p, float *zeros, int columns, unsigned *counters,
                      size_t count) {
    allow_next_kernel();
    /* The first heads last: the next kernel begins with them, and finds them in the L2. */
    const size_t index = (size_t)(gridDim.x - 1 - blockIdx.x) * ROWS + threadIdx.x / LANES;
    for (size_t c = (size_t)blockIdx.x * THREADS + threadIdx.x; c < count;
         c += (size_t)gridDim.x * THREADS)
        counters[c] = 0;
    const int i = (int)(index % p.rows);
    const size_t bh = index / p.rows;
    const int b = (int)(bh / p.NH), h = (int)(bh % p.NH);
    float sum = 0.0f;
    if (i < p.TQ) {
        const bf16 *o = head_rows(p.o, b, h) + i * p.o.token;
        const bf16 *dout = head_rows(p.dout, b, h) + i * p.dout.token;
        for (int c = threadIdx.x % LANES * 8; c < p.HS; c += 8 * LANES) {
            const uint4 x = load_chunk(o + c, p.HS - c, p.aligned);
            const uint4 y = load_chunk(dout + c, p.HS - c, p.aligned);
            sum += dot_chunk(x, y);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes);
    if (zeros)
        for (int c = threadIdx.x % LANES * 4; c < columns; c += 4 * LANES)
            *(float4 *)(zeros + index * columns + c) = make_float4(0, 0, 0, 0);
    if (threadIdx.x % LANES == 0) {
        const float lse = i < p.TQ ? p.lse[bh * p.TQ + i] : -INFINITY;
        p.delta[index] = sum;
        p.lse2[index] = lse == -INFINITY ? INFINITY : lse * LOG2E;
    }
}
} // namespace

void flash_statistics(const FlashProblem &p, float *zeros, int columns, unsigned *counters,
                      size_t count, cudaStream_t stream) {
    const size_t rows = (size_t)p.B * p.NH * p.rows;
    statistics_kernel<<<(unsigned)(rows / ROWS), THREADS, 0, stream>>>(p, zeros, columns, counters,
                                                                       count);
    CUDA_CHECK(cudaGetLastError());
}
