/* What backward rungs share: the row statistics, computed once (Dao 2023, arXiv 2307.08691,
 * Algorithm 2, line 4), and dQ as a float sum that is rounded at the end. */
#ifndef DEV_ATTENTION_BACKWARD_CUH
#define DEV_ATTENTION_BACKWARD_CUH

#include "dev/attention/ladder.cuh"

/* Rows are padded to whole tiles of every rung; padded rows do nothing: P = exp2(s - inf) = 0. */
struct BackwardSpace {
    int rows;     /* T rounded up to 128 */
    float *lse2;  /* (B,NH,rows) LSE · log2 e, +inf past T */
    float *delta; /* (B,NH,rows) D = rowsum(dO ∘ O), 0 past T */
    float *dq;    /* (B,NH,rows,HS) sums of dS K / scale */

    __host__ __device__ explicit BackwardSpace(const Problem &p)
        : rows((p.T + 127) / 128 * 128), lse2((float *)p.workspace) {
        delta = lse2 + count(p);
        dq = delta + count(p);
    }
    __host__ __device__ size_t count(const Problem &p) const { return (size_t)p.B * p.NH * rows; }
};

inline size_t statistics_workspace(const Problem &p) {
    return 2 * BackwardSpace(p).count(p) * sizeof(float);
}
inline size_t sums_workspace(const Problem &p) { /* statistics and dQ */
    return (2 + p.HS) * BackwardSpace(p).count(p) * sizeof(float);
}

/* A warp for each row. */
template <int HS>
__global__ void statistics_kernel(const Problem p) {
    const BackwardSpace space(p);
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= space.count(p))
        return;
    const int i = (int)(row % space.rows), bh = (int)(row / space.rows);
    float sum = 0.0f;
    if (i < p.T) {
        const size_t start = p.head(bh / p.NH, bh % p.NH) + i * p.stride();
#pragma unroll
        for (int d = threadIdx.x; d < HS; d += 32)
            sum += to_float(p.o[start + d]) * to_float(p.dout[start + d]);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x == 0) {
        space.delta[row] = sum;
        space.lse2[row] = i < p.T ? p.lse[(size_t)bh * p.T + i] * 1.44269504f : INFINITY;
    }
}

template <int HS>
void launch_statistics(const Problem &p, cudaStream_t stream) {
    const size_t rows = BackwardSpace(p).count(p);
    statistics_kernel<HS><<<(unsigned)(rows / 8), dim3(32, 8), 0, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

/* Element (row, column) of a head in dq. */
template <int HS>
struct RowMajor {
    static __device__ size_t place(int row, int column) { return (size_t)row * HS + column; }
};

/* The order of wgmma's accumulators: 64×64 pieces, in each of which the registers 4n … 4n+3 of a
 * thread are float4 number 128·n + thread. Row 16·warp + lane/4 + 8i and column 8n + 2(lane%4) + c
 * are register 4n + 2i + c. */
template <int HS>
struct RegisterOrder {
    static __device__ size_t place(int row, int column) {
        const size_t piece = row / 64 * (HS / 64) + column / 64;
        const int thread = row % 64 / 16 * 32 + row % 8 * 4 + column % 8 / 2;
        const int e = row % 16 / 8 * 2 + column % 2;
        return piece * 4096 + (column % 64 / 8 * 128 + thread) * 4 + e;
    }
};

template <class Layout, int HS>
__global__ void round_dq_kernel(const Problem p) {
    const BackwardSpace space(p);
    const int d = threadIdx.x, i = blockIdx.x * blockDim.y + threadIdx.y, bh = blockIdx.y;
    if (i < p.T)
        p.dq[p.head(bh / p.NH, bh % p.NH) + i * p.stride() + d] = to_bf16(
            p.scale * space.dq[(size_t)bh * space.rows * HS + Layout::place(i, d)]);
}

template <int HS>
void clear_dq(const Problem &p, cudaStream_t stream) {
    const BackwardSpace space(p);
    CUDA_CHECK(cudaMemsetAsync(space.dq, 0, space.count(p) * HS * sizeof(float), stream));
}

/* p.dq = scale · dq */
template <class Layout, int HS>
void launch_round_dq(const Problem &p, cudaStream_t stream) {
    constexpr int ROWS = 256 / HS;
    round_dq_kernel<Layout, HS><<<dim3(count_tiles(p.T, ROWS), p.B * p.NH), dim3(HS, ROWS), 0,
                                  stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

#endif
