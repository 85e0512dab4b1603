/* Rung 1: the derivative of the definition, from a stored P, step by step through memory.
 *
 *   dV = Pᵀ dO,  dP = dO Vᵀ,  D = Σ_j P dP,  dS = scale · P ∘ (dP - D),  dQ = dS K,  dK = dSᵀ Q
 *
 * P is what a naive forward would have kept: it is prepared before the clock starts. Four products,
 * one thread for each element of what they write; P and dP, (B,NH,T,T) floats each, cross the
 * memory bus again and again.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 0.949 (0.14%), HS=64 0.896 (0.13%). */
#include "dev/attention/ladder.cuh"

namespace {

/* out[i][j] = Σ_d x[i][d] y[j][d] */
template <int HS>
__device__ float dot_rows(const Problem &p, const bf16 *x, const bf16 *y, int i, int j) {
    float sum = 0.0f;
    for (int d = 0; d < HS; d++)
        sum += to_float(x[i * p.stride() + d]) * to_float(y[j * p.stride() + d]);
    return sum;
}

template <int HS>
__global__ void probabilities_kernel(const Problem p, float *probabilities) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
    const int bh = blockIdx.z;
    if (i >= p.T || j >= p.T)
        return;
    const size_t head = p.head(bh / p.NH, bh % p.NH), row = (size_t)bh * p.T + i;
    const float s = p.scale * dot_rows<HS>(p, p.q + head, p.k + head, i, j);
    probabilities[row * p.T + j] = p.causal && j > i ? 0.0f : expf(s - p.lse[row]);
}

template <int HS>
__global__ void dp_kernel(const Problem p, float *dp) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
    const int bh = blockIdx.z;
    if (i >= p.T || j >= p.T)
        return;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    dp[((size_t)bh * p.T + i) * p.T + j] = dot_rows<HS>(p, p.dout + head, p.v + head, i, j);
}

/* dP becomes dS. A warp for each row. */
__global__ void ds_kernel(const Problem p, const float *probabilities, float *dp) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= (size_t)p.B * p.NH * p.T)
        return;
    const float *probability = probabilities + row * p.T;
    float *gradient = dp + row * p.T, delta = 0.0f;
    for (int j = threadIdx.x; j < p.T; j += 32)
        delta += probability[j] * gradient[j];
    for (int lanes = 16; lanes > 0; lanes /= 2)
        delta += __shfl_xor_sync(~0u, delta, lanes);
    for (int j = threadIdx.x; j < p.T; j += 32)
        gradient[j] = p.scale * probability[j] * (gradient[j] - delta);
}

template <int HS>
__global__ void dq_kernel(const Problem p, const float *ds) {
    const int d = threadIdx.x, i = blockIdx.x * blockDim.y + threadIdx.y, bh = blockIdx.y;
    if (i >= p.T)
        return;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const float *row = ds + ((size_t)bh * p.T + i) * p.T;
    float sum = 0.0f;
    for (int j = 0; j < p.T; j++)
        sum += row[j] * to_float(p.k[head + j * p.stride() + d]);
    p.dq[head + i * p.stride() + d] = to_bf16(sum);
}

template <int HS>
__global__ void dk_dv_kernel(const Problem p, const float *probabilities, const float *ds) {
    const int d = threadIdx.x, j = blockIdx.x * blockDim.y + threadIdx.y, bh = blockIdx.y;
    if (j >= p.T)
        return;
    const size_t head = p.head(bh / p.NH, bh % p.NH), column = (size_t)bh * p.T * p.T + j;
    float dk = 0.0f, dv = 0.0f;
    for (int i = 0; i < p.T; i++) {
        const size_t score = column + (size_t)i * p.T, element = head + i * p.stride() + d;
        dk += ds[score] * to_float(p.q[element]);
        dv += probabilities[score] * to_float(p.dout[element]);
    }
    p.dk[head + j * p.stride() + d] = to_bf16(dk);
    p.dv[head + j * p.stride() + d] = to_bf16(dv);
}

dim3 score_grid(const Problem &p) {
    return dim3(count_tiles(p.T, 32), count_tiles(p.T, 8), p.B * p.NH);
}

template <int HS>
void prepare(const Problem &p, cudaStream_t stream) {
    probabilities_kernel<HS><<<score_grid(p), dim3(32, 8), 0, stream>>>(p, (float *)p.workspace);
    CUDA_CHECK(cudaGetLastError());
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    const float *probabilities = (float *)p.workspace;
    float *ds = (float *)p.workspace + p.scores();
    const dim3 rows(count_tiles(p.T, 256 / HS), p.B * p.NH), block(HS, 256 / HS);
    dp_kernel<HS><<<score_grid(p), dim3(32, 8), 0, stream>>>(p, ds);
    ds_kernel<<<(unsigned)((p.rows() + 7) / 8), dim3(32, 8), 0, stream>>>(p, probabilities, ds);
    dq_kernel<HS><<<rows, block, 0, stream>>>(p, ds);
    dk_dv_kernel<HS><<<rows, block, 0, stream>>>(p, probabilities, ds);
    CUDA_CHECK(cudaGetLastError());
}

size_t workspace(const Problem &p) { return 2 * p.scores() * sizeof(float); }

} // namespace

const Rung backward_01 = {"01_naive", NEEDS_NOTHING, workspace, BY_HEAD_SIZE(prepare),
                          BY_HEAD_SIZE(launch)};
