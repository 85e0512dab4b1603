/* Attention by its definition in float64, forward and backward, and the comparison with it.
 *
 * One head at a time, so that S and dP are two T×T matrices. A plain tiled product serves all seven
 * products; a T of 4096 and 64 heads take about a second. */
#include <string.h>

#include "dev/attention/harness.cuh"
#include "runtime/random.h"

namespace {

/* Element (r, c) of a matrix is data[r * row + c * column]. */
template <class Type>
struct Matrix {
    Type *data;
    size_t row, column;

    Matrix<Type> transposed() const { return {data, column, row}; }
};

__device__ double value(double x) { return x; }
__device__ double value(float x) { return x; }
__device__ double value(bf16 x) { return to_float(x); }

enum { TILE = 16 };

/* C (M,N) = factor · A (M,K) B (K,N) */
template <class TypeA, class TypeB>
__global__ void product_kernel(Matrix<double> c, Matrix<TypeA> a, Matrix<TypeB> b, int M, int N,
                               int K, double factor) {
    __shared__ double a_tile[TILE][TILE + 1], b_tile[TILE][TILE + 1];
    const int x = threadIdx.x, y = threadIdx.y;
    const int m = blockIdx.y * TILE + y, n = blockIdx.x * TILE + x;
    double sum = 0;
    for (int k = 0; k < K; k += TILE) {
        a_tile[y][x] = m < M && k + x < K ? value(a.data[m * a.row + (k + x) * a.column]) : 0;
        b_tile[y][x] = k + y < K && n < N ? value(b.data[(k + y) * b.row + n * b.column]) : 0;
        __syncthreads();
        for (int i = 0; i < TILE; i++)
            sum += a_tile[y][i] * b_tile[i][x];
        __syncthreads();
    }
    if (m < M && n < N)
        c.data[m * c.row + n * c.column] = factor * sum;
}

template <class TypeA, class TypeB>
void product(Matrix<double> c, Matrix<TypeA> a, Matrix<TypeB> b, int M, int N, int K,
             double factor) {
    const dim3 grid(count_tiles(N, TILE), count_tiles(M, TILE));
    product_kernel<<<grid, dim3(TILE, TILE)>>>(c, a, b, M, N, K, factor);
    CUDA_CHECK(cudaGetLastError());
}

enum { THREADS = 256 };

template <class Combine>
__device__ double block_reduce(double x, Combine combine) {
    __shared__ double parts[THREADS];
    parts[threadIdx.x] = x;
    for (int n = THREADS / 2; n > 0; n /= 2) {
        __syncthreads();
        if (threadIdx.x < n)
            parts[threadIdx.x] = combine(parts[threadIdx.x], parts[threadIdx.x + n]);
    }
    __syncthreads();
    const double result = parts[0];
    __syncthreads();
    return result;
}

struct Larger {
    __device__ double operator()(double x, double y) const { return x > y ? x : y; }
};
struct Sum {
    __device__ double operator()(double x, double y) const { return x + y; }
};

/* Row blockIdx.x of S becomes P. */
__global__ void softmax_kernel(double *s, int T, bool causal, double *lse) {
    double *row = s + (size_t)blockIdx.x * T, top = -INFINITY, sum = 0;
    const int keys = causal ? blockIdx.x + 1 : T;
    for (int j = threadIdx.x; j < keys; j += THREADS)
        top = fmax(top, row[j]);
    top = block_reduce(top, Larger());
    for (int j = threadIdx.x; j < T; j += THREADS)
        sum += row[j] = j < keys ? exp(row[j] - top) : 0;
    sum = block_reduce(sum, Sum());
    for (int j = threadIdx.x; j < T; j += THREADS)
        row[j] /= sum;
    lse[blockIdx.x] = top + log(sum);
}

/* Row blockIdx.x of dP becomes dS. */
__global__ void score_gradient_kernel(double *dp, const double *probability, int T, double scale) {
    double *row = dp + (size_t)blockIdx.x * T, delta = 0;
    const double *p = probability + (size_t)blockIdx.x * T;
    for (int j = threadIdx.x; j < T; j += THREADS)
        delta += p[j] * row[j];
    delta = block_reduce(delta, Sum());
    for (int j = threadIdx.x; j < T; j += THREADS)
        row[j] = scale * p[j] * (row[j] - delta);
}

__global__ void round_kernel(bf16 *o, const double *exact_o, size_t n, float *lse,
                             const double *exact_lse, size_t rows) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        o[i] = to_bf16((float)exact_o[i]);
    if (i < rows)
        lse[i] = (float)exact_lse[i];
}

/* What is zero exactly, as dQ at T = 1, has no relative error: this is far above its rounding. */
__host__ __device__ constexpr double floor_of_norm() { return 1e-2; }

struct Sums {
    double difference, norm; /* Σ (x - y)², Σ y² */
    unsigned long long row;  /* the bits of the largest error of a row */
};

/* A warp for each row. */
template <class Type>
__global__ void error_kernel(const Type *x, const double *y, size_t rows, int columns,
                             double typical, Sums *sums) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows)
        return;
    double difference = 0, norm = 0;
    for (int c = threadIdx.x; c < columns; c += 32) {
        const double exact = y[row * columns + c], d = value(x[row * columns + c]) - exact;
        difference += d * d, norm += exact * exact;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        difference += __shfl_xor_sync(~0u, difference, lanes);
        norm += __shfl_xor_sync(~0u, norm, lanes);
    }
    if (threadIdx.x > 0)
        return;
    const double error = fabs(sqrt(difference) / (sqrt(norm) + typical + floor_of_norm()));
    atomicAdd(&sums->difference, difference);
    atomicAdd(&sums->norm, norm);
    atomicMax(&sums->row, (unsigned long long)__double_as_longlong(error)); /* NaN is the largest */
}

template <class Type>
Error error_of(const Type *x, const double *y, size_t rows, int columns) {
    Sums *device, host = {};
    double typical = 0;
    CUDA_CHECK(cudaMalloc(&device, sizeof host));
    for (int pass = 0; pass < 2; pass++) { /* the second knows the mean of the first */
        CUDA_CHECK(cudaMemset(device, 0, sizeof host));
        error_kernel<<<(unsigned)((rows + 7) / 8), dim3(32, 8)>>>(x, y, rows, columns, typical,
                                                                  device);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost));
        typical = sqrt(host.norm / (double)rows);
    }
    CUDA_CHECK(cudaFree(device));
    Error error;
    error.all = sqrt(host.difference / (double)rows) / (typical + floor_of_norm());
    memcpy(&error.row, &host.row, sizeof error.row);
    return error;
}

/* Two normal numbers for each counter, by Box and Muller. */
__global__ void fill_kernel(bf16 *x, size_t n, uint64_t key) {
    const size_t i = 2 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    const Philox draw = philox(key, (uint32_t)i, (uint32_t)(i >> 32), 0, 0);
    const float radius = sqrtf(-2 * logf((draw.word[0] + 1.0f) * 0x1p-32f));
    const float angle = draw.word[1] * 0x1p-31f * 3.14159265f;
    if (i < n)
        x[i] = to_bf16(radius * cosf(angle));
    if (i + 1 < n)
        x[i + 1] = to_bf16(radius * sinf(angle));
}

} // namespace

void fill_normal(bf16 *x, size_t n, uint64_t key) {
    fill_kernel<<<(unsigned)((n + 511) / 512), 256>>>(x, n, key);
    CUDA_CHECK(cudaGetLastError());
}

Error reference_error(const bf16 *x, const double *y, size_t rows, int columns) {
    return error_of(x, y, rows, columns);
}
Error reference_error(const float *x, const double *y, size_t rows, int columns) {
    return error_of(x, y, rows, columns);
}

void reference_compute(const Problem &p, const Reference &reference) {
    const int T = p.T, HS = p.HS;
    const bool backward = reference.dq != NULL;
    const size_t square = (size_t)T * T;
    double *memory;
    CUDA_CHECK(cudaMalloc(&memory, (backward ? 2 : 1) * square * sizeof(double)));
    const Matrix<double> s = {memory, (size_t)T, 1}, ds = {memory + square, (size_t)T, 1};
    for (int bh = 0; bh < p.B * p.NH; bh++) {
        const size_t head = p.head(bh / p.NH, bh % p.NH);
        auto rows = [&](auto *tensor) {
            return Matrix<std::remove_pointer_t<decltype(tensor)>>{tensor + head, p.stride(), 1};
        };
        product(s, rows(p.q), rows(p.k).transposed(), T, T, HS, p.scale);
        softmax_kernel<<<T, THREADS>>>(s.data, T, p.causal, reference.lse + (size_t)bh * T);
        product(rows(reference.o), s, rows(p.v), T, HS, T, 1);
        if (!backward)
            continue;
        product(ds, rows(p.dout), rows(p.v).transposed(), T, T, HS, 1);
        product(rows(reference.dv), s.transposed(), rows(p.dout), T, HS, T, 1);
        score_gradient_kernel<<<T, THREADS>>>(ds.data, s.data, T, p.scale);
        product(rows(reference.dq), ds, rows(p.k), T, HS, T, 1);
        product(rows(reference.dk), ds.transposed(), rows(p.q), T, HS, T, 1);
    }
    round_kernel<<<(unsigned)((p.elements() + 255) / 256), 256>>>(
        p.o, reference.o, p.elements(), p.lse, reference.lse, p.rows());
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaFree(memory));
}
