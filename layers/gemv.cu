/* Few rows times a matrix on CUDA, at the speed of reading the matrix.
 *
 * A matrix has a few MB, which the memory gives in 1 to 2 us: the time of such a kernel is the wait
 * for its first bytes. So all of them are asked for at once: a block of threads takes COLUMNS
 * columns, whose threads share out the rows, and each has its first DEPTH loads under way before it
 * looks at x. Then the columns' sums are added over the threads, in a fixed order. Blocks could not
 * add to each other's sums in a fixed order, so none shares a column.
 *
 * The head's matrix has its rows along the sum: a warp takes a few of them at a time. */
#include "layers/gemv.h"

#include "layers/cuda_common.cuh"
#include "layers/gelu_gate.cuh"

namespace {

constexpr int MAX_ROWS = 8; /* of x, that one reading of the matrix serves */

/* --- x W + b, W (IC,OC) --------------------------------------------------------------------- */

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int COLUMNS = 16; /* of W, of one block */
constexpr int DEPTH = 4;    /* loads that a thread has under way, twice */

static_assert(COLUMNS % VECTOR == 0 && COLUMNS / VECTOR <= WARP, "a warp covers whole rows");
static_assert(MAX_ROWS <= WARPS && MAX_ROWS * COLUMNS <= THREADS, "a warp, a thread for each");

typedef struct {
    const real *weight, *bias; /* NULL: no layernorm */
    float eps;
} Norm;

typedef struct {
    real *out;
    const real *x, *weight, *bias;
    Norm norm;
    size_t N, IC, OC;
    GemvOutput output;
} Product;

/* mean and rstd of `rows` rows of x, a warp each. Ends with a barrier. */
template <int W>
__device__ __forceinline__ void statistics(float *mean, float *rstd, const real *x, size_t rows,
                                           size_t C, float eps) {
    const size_t row = threadIdx.x / WARP;
    if (row < rows) {
        float sum = 0.0f, squares = 0.0f, value[W];
        for (size_t c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
            load<W>(value, x + row * C + c);
#pragma unroll
            for (int j = 0; j < W; j++) sum += value[j];
        }
        const float center = warp_sum(sum) / (float)C;
        for (size_t c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
            load<W>(value, x + row * C + c);
#pragma unroll
            for (int j = 0; j < W; j++) squares += (value[j] - center) * (value[j] - center);
        }
        squares = warp_sum(squares);
        if (threadIdx.x % WARP == 0) {
            mean[row] = center;
            rstd[row] = rsqrtf(squares / (float)C + eps);
        }
    }
    __syncthreads();
}

/* W elements as stored: what waits in registers. */
template <int W> struct Packed {
    typename Word<W * sizeof(real)>::type word;
};

/* packed[d] = W[i + d·stride, column …], 0 past the last row. */
template <int W>
__device__ __forceinline__ void load_rows(Packed<W> (&packed)[DEPTH], const Product &p, size_t i,
                                          size_t stride, size_t column) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const size_t row = i + d * stride;
        packed[d] = {};
        if (row < p.IC && column < p.OC)
            packed[d] = *(const Packed<W> *)(p.weight + row * p.OC + column);
    }
}

/* W: elements of a load. R: rows of x. */
template <int W, int R>
__global__ __launch_bounds__(THREADS) void product_kernel(Product p) {
    constexpr int LANES = COLUMNS / W, TEAMS = THREADS / LANES;
    __shared__ float mean[R], rstd[R], sums[WARPS][R][COLUMNS];
    const size_t lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
    const size_t column = blockIdx.x * (size_t)COLUMNS + lane * W;
    const size_t first = blockIdx.y * (size_t)R, rows = min((size_t)R, p.N - first);
    const real *x = p.x + first * p.IC;

    Packed<W> packed[DEPTH];
    load_rows<W>(packed, p, team, TEAMS, column);
    if (p.norm.weight) statistics<W>(mean, rstd, x, rows, p.IC, p.norm.eps);

    float sum[R][W] = {};
    for (size_t i = team; i < p.IC; i += TEAMS * DEPTH) {
        Packed<W> next[DEPTH];
        load_rows<W>(next, p, i + TEAMS * DEPTH, TEAMS, column);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const size_t row = i + d * (size_t)TEAMS;
            if (row >= p.IC) break;
            float weight[W];
            load<W>(weight, (const real *)&packed[d]);
            const float scale = p.norm.weight ? to_float(p.norm.weight[row]) : 1.0f;
            const float shift = p.norm.weight ? to_float(p.norm.bias[row]) : 0.0f;
#pragma unroll
            for (int r = 0; r < R; r++) {
                float in = r < rows ? to_float(x[r * p.IC + row]) : 0.0f;
                if (p.norm.weight) in = (in - mean[r]) * rstd[r] * scale + shift;
#pragma unroll
                for (int j = 0; j < W; j++) sum[r][j] += in * weight[j];
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) packed[d] = next[d];
    }

    const int warp = threadIdx.x / WARP;
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int j = 0; j < W; j++) {
#pragma unroll
            for (int distance = LANES; distance < WARP; distance *= 2)
                sum[r][j] += __shfl_xor_sync(0xffffffffu, sum[r][j], distance);
            if (threadIdx.x % WARP < LANES) sums[warp][r][lane * W + j] = sum[r][j];
        }
    }
    __syncthreads();

    const size_t r = threadIdx.x / COLUMNS, c = threadIdx.x % COLUMNS;
    const size_t o = blockIdx.x * (size_t)COLUMNS + c;
    if (r >= rows || o >= p.OC) return;
    float value = to_float(p.bias[o]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) value += sums[w][r][c];
    real *out = p.out + (first + r) * p.OC + o;
    if (p.output == GEMV_GELU) value *= gelu_gate(value);
    if (p.output == GEMV_ADD) value += to_float(*out);
    *out = from_float<real>(value);
}

template <int W, int R> void product(const Product &p, Device *device) {
    const dim3 grid(blocks_for(p.OC, COLUMNS), blocks_for(p.N, R));
    product_kernel<W, R><<<grid, THREADS, 0, stream_of(device)>>>(p);
    LAUNCH_CHECK();
}

template <int W> void product_rows(const Product &p, Device *device) {
    auto run = p.N == 1 ? product<W, 1> : p.N == 2 ? product<W, 2> : p.N <= 4 ? product<W, 4>
                                                                              : product<W, 8>;
    run(p, device);
}

/* --- norm(x) Wᵀ, W (V,C) -------------------------------------------------------------------- */

constexpr int HEAD_THREADS = 256, HEAD_WARPS = HEAD_THREADS / WARP;
constexpr int OUTPUTS = 4; /* rows of W that a warp reads together */
/* Nearly the 48 KiB that a block has without asking for more: 12,032 channels. */
constexpr size_t SHARED_BYTES = (size_t)47 << 10;

static_assert(MAX_ROWS <= HEAD_WARPS, "a warp a row for the statistics");

/* In dynamic shared memory: norm(x) of R rows, (R,C). */
template <int W, int R>
__global__ __launch_bounds__(HEAD_THREADS) void head_kernel(float *__restrict__ logits,
                                                            const real *__restrict__ x_,
                                                            const real *__restrict__ weight,
                                                            Norm norm, size_t N, size_t C,
                                                            size_t V) {
    extern __shared__ __align__(16) float in[];
    __shared__ float mean[R], rstd[R];
    const size_t first = blockIdx.y * (size_t)R, rows = min((size_t)R, N - first);
    const real *x = x_ + first * C;
    statistics<W>(mean, rstd, x, rows, C, norm.eps);
    for (size_t i = threadIdx.x; i < R * C; i += HEAD_THREADS) {
        const size_t r = i / C, c = i % C;
        in[i] = r < rows ? (to_float(x[i]) - mean[r]) * rstd[r] * to_float(norm.weight[c]) +
                               to_float(norm.bias[c])
                         : 0.0f;
    }
    __syncthreads();

    const size_t lane = threadIdx.x % WARP;
    const size_t warp = blockIdx.x * (size_t)HEAD_WARPS + threadIdx.x / WARP;
    for (size_t v = warp * OUTPUTS; v < V; v += (size_t)gridDim.x * HEAD_WARPS * OUTPUTS) {
        float sum[OUTPUTS][R] = {};
        for (size_t c = lane * W; c < C; c += WARP * W) {
            float w[OUTPUTS][W];
#pragma unroll
            for (int k = 0; k < OUTPUTS; k++)
                load<W>(w[k], weight + min(v + k, V - 1) * C + c);
#pragma unroll
            for (int r = 0; r < R; r++) {
                float value[W];
                load<W>(value, in + r * C + c);
#pragma unroll
                for (int k = 0; k < OUTPUTS; k++)
#pragma unroll
                    for (int j = 0; j < W; j++) sum[k][r] += value[j] * w[k][j];
            }
        }
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float logit = warp_sum(sum[k][r]);
                if (lane == 0 && r < rows && v + k < V) logits[(first + r) * V + v + k] = logit;
            }
    }
}

template <int W, int R>
void head(float *logits, const real *x, const real *weight, const Norm &norm, size_t N, size_t C,
          size_t V, Device *device) {
    const unsigned blocks = blocks_for(V, HEAD_WARPS * OUTPUTS);
    const unsigned most = 8u * (unsigned)device->processors; /* that run at a time */
    const dim3 grid(blocks < most ? blocks : most, blocks_for(N, R));
    head_kernel<W, R><<<grid, HEAD_THREADS, R * C * sizeof(float), stream_of(device)>>>(
        logits, x, weight, norm, N, C, V);
    LAUNCH_CHECK();
}

template <int W>
void head_rows(float *logits, const real *x, const real *weight, const Norm &norm, size_t N,
               size_t C, size_t V, Device *device) {
    const size_t fit = SHARED_BYTES / (C * sizeof(float));
    const size_t rows = N < fit ? N : fit;
    if (fit == 0)
        error_fatal(__FILE__, __LINE__, "gemv_head: %zu channels exceed %zu", C,
                    SHARED_BYTES / sizeof(float));
    auto run = rows == 1 ? head<W, 1> : rows < 4 ? head<W, 2> : rows < 8 ? head<W, 4> : head<W, 8>;
    run(logits, x, weight, norm, N, C, V, device);
}

} // namespace

void LAYER(gemv_forward)(void *out, const void *x, const GemvNorm *norm, const void *weight,
                         const void *bias, size_t N, size_t IC, size_t OC, GemvOutput output,
                         Device *device) {
    const Product p = {(real *)out,
                       (const real *)x,
                       (const real *)weight,
                       (const real *)bias,
                       {norm ? (const real *)norm->weight : NULL,
                        norm ? (const real *)norm->bias : NULL, norm ? norm->eps : 0.0f},
                       N,
                       IC,
                       OC,
                       output};
    /* Rows of W are read by vectors, and rows of x for their statistics. */
    const bool aligned = vectorisable(OC, {weight}) && vectorisable(IC, {x});
    auto run = aligned ? product_rows<VECTOR> : product_rows<1>;
    run(p, device);
}

void LAYER(gemv_head)(void *logits, const void *x, const GemvNorm *norm, const void *weight,
                      size_t N, size_t C, size_t V, Device *device) {
    const Norm head_norm = {(const real *)norm->weight, (const real *)norm->bias, norm->eps};
    auto run = vectorisable(C, {weight, x}) ? head_rows<VECTOR> : head_rows<1>;
    run((float *)logits, (const real *)x, (const real *)weight, head_norm, N, C, V, device);
}
