/* Rung 1: the definition, step by step, through memory.
 *
 * Three kernels, one thread for each element of what they write: S = scale · Q Kᵀ, (B,NH,T,T)
 * floats; P = softmax(S) in place; O = P V. Masked scores are computed and thrown away.
 *
 * An element of S is written or read seven times, 28·T² bytes a head, and each multiplication waits
 * for two loads. At T = 4096 and 64 heads S alone is 4 GiB.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 0.45 (0.066%), HS=64 0.422 (0.062%). */
#include "dev/attention/ladder.cuh"

namespace {

template <int HS>
__global__ void scores_kernel(const Problem p, float *scores) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
    const int bh = blockIdx.z;
    if (i >= p.T || j >= p.T)
        return;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const bf16 *q = p.q + head + i * p.stride(), *k = p.k + head + j * p.stride();
    float sum = 0.0f;
    for (int d = 0; d < HS; d++)
        sum += to_float(q[d]) * to_float(k[d]);
    const bool seen = !p.causal || j <= i;
    scores[((size_t)bh * p.T + i) * p.T + j] = seen ? p.scale * sum : -INFINITY;
}

__device__ float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

__device__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

/* A warp for each row: largest score, sum, division. */
__global__ void softmax_kernel(const Problem p, float *scores) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= (size_t)p.B * p.NH * p.T)
        return;
    float *s = scores + row * p.T;
    float top = -INFINITY, sum = 0.0f;
    for (int j = threadIdx.x; j < p.T; j += 32)
        top = fmaxf(top, s[j]);
    top = warp_max(top);
    for (int j = threadIdx.x; j < p.T; j += 32)
        sum += s[j] = expf(s[j] - top);
    sum = warp_sum(sum);
    for (int j = threadIdx.x; j < p.T; j += 32)
        s[j] /= sum;
    if (threadIdx.x == 0)
        p.lse[row] = top + logf(sum);
}

template <int HS>
__global__ void output_kernel(const Problem p, const float *probabilities) {
    const int d = threadIdx.x, i = blockIdx.x * blockDim.y + threadIdx.y, bh = blockIdx.y;
    if (i >= p.T)
        return;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const float *row = probabilities + ((size_t)bh * p.T + i) * p.T;
    float sum = 0.0f;
    for (int j = 0; j < p.T; j++)
        sum += row[j] * to_float(p.v[head + j * p.stride() + d]);
    p.o[head + i * p.stride() + d] = to_bf16(sum);
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    float *scores = (float *)p.workspace;
    const int heads = p.B * p.NH;
    scores_kernel<HS><<<dim3(count_tiles(p.T, 32), count_tiles(p.T, 8), heads), dim3(32, 8), 0,
                        stream>>>(p, scores);
    softmax_kernel<<<(unsigned)((p.rows() + 7) / 8), dim3(32, 8), 0, stream>>>(p, scores);
    output_kernel<HS><<<dim3(count_tiles(p.T, 256 / HS), heads), dim3(HS, 256 / HS), 0, stream>>>(
        p, scores);
    CUDA_CHECK(cudaGetLastError());
}

size_t workspace(const Problem &p) { return p.scores() * sizeof(float); }

} // namespace

const Rung forward_01 = {"01_naive", NEEDS_NOTHING, workspace, NULL, BY_HEAD_SIZE(launch)};
