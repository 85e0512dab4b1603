/* Layernorm on CUDA, at the speed of its memory traffic: a row is read once, held in registers by
 * the threads that share it, its team, and written once.
 *
 *   mean = Σx / C, variance = Σ(x - mean)² / C, two passes over registers
 *   x̂ = (x - mean) rstd, out = x̂ weight + bias
 *   g = dout weight, dx = dresidual + rstd (g - Σg / C - x̂ Σ(g x̂) / C)
 *   dweight += Σ over rows dout x̂, dbias += Σ over rows dout
 *
 * The team is a warp, up to 1024 columns, or a block of four, up to 4096. Longer rows, and rows
 * that do not start on 16-byte boundaries, take kernels with one element an access that read a row
 * again from cache for each pass.
 *
 * In the backward a thread meets the same columns in every row of its team and sums their dweight
 * and dbias in registers; a block adds its teams' sums in turn, and add_partials the blocks' in a
 * fixed order, so equal inputs give equal bits. */
#include "layers/layernorm.h"

#include <algorithm>
#include <type_traits>

#include "layers/cuda_common.cuh"

namespace {

constexpr int BLOCK = 128;
constexpr int THREAD_COLUMNS = 1024 / WARP;          /* of a row, at most */
constexpr int MAX_VECTORS = THREAD_COLUMNS / VECTOR; /* the same as 16-byte accesses */
constexpr int VECTORS_STEP = MAX_VECTORS / 4;        /* four sizes are compiled */
constexpr int MAX_COLUMNS = BLOCK * THREAD_COLUMNS;  /* of a row held in registers */

/* Vector j of thread t of a team covers these columns and the VECTOR - 1 after. */
template <int TEAM> __device__ __forceinline__ int column(int j) {
    return (j * TEAM + (int)(threadIdx.x % TEAM)) * VECTOR;
}

template <int TEAM> __device__ __forceinline__ float team_sum(float x) {
    if constexpr (TEAM == WARP)
        return warp_sum(x);
    else
        return block_sum<TEAM>(x);
}

/* packed[j] = the thread's vectors of a row of C at p; 0 where the row has ended. Kept as stored,
 * because bf16 takes half the registers of float; unpack is one instruction an element. */
template <int TEAM, int VECTORS>
__device__ __forceinline__ void load_row(uint4 (&packed)[VECTORS], const real *p, int C) {
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        packed[j] = uint4{0, 0, 0, 0};
        if (column<TEAM>(j) < C) packed[j] = *(const uint4 *)(p + column<TEAM>(j));
    }
}

__device__ __forceinline__ void unpack(float (&value)[VECTOR], const uint4 &packed) {
    load<VECTOR>(value, (const real *)&packed);
}

/* Makes the compiler unpack again rather than keep, or spill, what it has unpacked before. */
__device__ __forceinline__ void forget_unpacked(uint4 &packed) {
    asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
}

/* branch and residual are NULL for a layernorm alone. */
template <int TEAM, int VECTORS>
__global__ __launch_bounds__(BLOCK) void forward_kernel(
    real *out, real *residual, float *mean, float *rstd, const real *x, const real *branch,
    const real *__restrict__ weight, const real *__restrict__ bias, size_t N, int C, float eps,
    Dropout dropout) {
    const size_t row = (size_t)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    if (row >= N) return; /* whole teams leave */

    float value[VECTORS][VECTOR];
    uint4 packed[VECTORS], packed_branch[VECTORS];
    load_row<TEAM>(packed, x + row * C, C);
    if (branch) load_row<TEAM>(packed_branch, branch + row * C, C);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        unpack(value[j], packed[j]);
        if (branch && column<TEAM>(j) < C) {
            const size_t i = row * C + column<TEAM>(j);
            float added[VECTOR];
            unpack(added, packed_branch[j]);
            dropout_apply<VECTOR>(added, i, dropout);
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                value[j][k] = to_float(from_float<real>(value[j][k] + added[k]));
            store<VECTOR>(residual + i, value[j]);
        }
#pragma unroll
        for (int k = 0; k < VECTOR; k++) sum += value[j][k];
    }
    const float m = team_sum<TEAM>(sum) / C;

    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        if (column<TEAM>(j) < C) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) squares += (value[j][k] - m) * (value[j][k] - m);
        }
    }
    const float r = rsqrtf(team_sum<TEAM>(squares) / C + eps);

#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        if (column<TEAM>(j) < C) {
            float w[VECTOR], b[VECTOR];
            load<VECTOR>(w, weight + column<TEAM>(j));
            load<VECTOR>(b, bias + column<TEAM>(j));
#pragma unroll
            for (int k = 0; k < VECTOR; k++) value[j][k] = (value[j][k] - m) * r * w[k] + b[k];
            store<VECTOR>(out + row * C + column<TEAM>(j), value[j]);
        }
    }
    if (threadIdx.x % TEAM == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

/* A block a row, any C, any address. A thread reads back only what it wrote itself. */
__global__ __launch_bounds__(BLOCK) void forward_any_kernel(
    real *out, real *residual, float *mean, float *rstd, const real *x, const real *branch,
    const real *weight, const real *bias, size_t C, float eps, Dropout dropout) {
    const size_t first = blockIdx.x * C;
    float sum = 0.0f;
    for (size_t c = threadIdx.x; c < C; c += BLOCK) {
        float value = to_float(x[first + c]);
        if (branch) {
            float added[1] = {to_float(branch[first + c])};
            dropout_apply<1>(added, first + c, dropout);
            residual[first + c] = from_float<real>(value + added[0]);
            value = to_float(residual[first + c]);
        }
        sum += value;
    }
    const float m = block_sum<BLOCK>(sum) / C;

    const real *source = branch ? residual : x;
    float squares = 0.0f;
    for (size_t c = threadIdx.x; c < C; c += BLOCK) {
        const float centred = to_float(source[first + c]) - m;
        squares += centred * centred;
    }
    const float r = rsqrtf(block_sum<BLOCK>(squares) / C + eps);

    for (size_t c = threadIdx.x; c < C; c += BLOCK)
        out[first + c] = from_float<real>((to_float(source[first + c]) - m) * r *
                                              to_float(weight[c]) + to_float(bias[c]));
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = m;
        rstd[blockIdx.x] = r;
    }
}

/* Blocks that fit in the 65,536 registers of a multiprocessor. A thread holds its two sums for each
 * column, four packed rows, and what the loop needs; nothing spills. */
constexpr int backward_blocks(int vectors) {
    const int fitting = 65536 / BLOCK / (2 * vectors * VECTOR + 4 * vectors * 4 + 32);
    return fitting < 6 ? fitting : 6;
}

template <int TEAM, int VECTORS>
__global__ __launch_bounds__(BLOCK, backward_blocks(VECTORS)) void backward_kernel(
    real *dx, float *dweight_sums /* (gridDim.x,C) */, float *dbias_sums /* (gridDim.x,C) */,
    const real *dout, const real *dresidual, const real *x, const float *mean, const float *rstd,
    const real *weight, size_t N, int C) {
    constexpr int TEAMS = BLOCK / TEAM;
    const int team = threadIdx.x / TEAM;
    float dweight[VECTORS][VECTOR] = {}, dbias[VECTORS][VECTOR] = {};
    uint4 packed_weight[VECTORS];
    load_row<TEAM>(packed_weight, weight, C);

    const size_t stride = (size_t)gridDim.x * TEAMS;
    for (size_t row = (size_t)blockIdx.x * TEAMS + team; row < N; row += stride) {
        uint4 packed_dout[VECTORS], packed_x[VECTORS], packed_dresidual[VECTORS] = {};
        load_row<TEAM>(packed_dout, dout + row * C, C);
        load_row<TEAM>(packed_x, x + row * C, C);
        if (dresidual) load_row<TEAM>(packed_dresidual, dresidual + row * C, C);
        const float m = mean[row], r = rstd[row];

        float sum = 0.0f, sum_normalized = 0.0f;
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            float d[VECTOR], value[VECTOR], w[VECTOR];
            unpack(d, packed_dout[j]);
            unpack(value, packed_x[j]);
            unpack(w, packed_weight[j]);
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                const float normalized = (value[k] - m) * r, g = d[k] * w[k];
                dweight[j][k] += d[k] * normalized;
                dbias[j][k] += d[k];
                sum += g;
                sum_normalized += g * normalized;
            }
        }
        sum = team_sum<TEAM>(sum) / C;
        sum_normalized = team_sum<TEAM>(sum_normalized) / C;

#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            forget_unpacked(packed_dout[j]);
            forget_unpacked(packed_x[j]);
            forget_unpacked(packed_weight[j]);
            float d[VECTOR], value[VECTOR], w[VECTOR], passed[VECTOR];
            unpack(d, packed_dout[j]);
            unpack(value, packed_x[j]);
            unpack(w, packed_weight[j]);
            unpack(passed, packed_dresidual[j]);
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                passed[k] += r * (d[k] * w[k] - sum - (value[k] - m) * r * sum_normalized);
            if (column<TEAM>(j) < C) store<VECTOR>(dx + row * C + column<TEAM>(j), passed);
        }
    }

    __shared__ float totals[2][TEAM * VECTORS * VECTOR];
    for (int turn = 0; turn < TEAMS; turn++) {
        if (team == turn) {
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
#pragma unroll
                for (int k = 0; k < VECTOR; k++) {
                    const int c = column<TEAM>(j) + k;
                    totals[0][c] = (turn > 0 ? totals[0][c] : 0.0f) + dweight[j][k];
                    totals[1][c] = (turn > 0 ? totals[1][c] : 0.0f) + dbias[j][k];
                }
            }
        }
        __syncthreads();
    }
    for (int c = threadIdx.x; c < C; c += BLOCK) {
        dweight_sums[(size_t)blockIdx.x * C + c] = totals[0][c];
        dbias_sums[(size_t)blockIdx.x * C + c] = totals[1][c];
    }
}

/* Any C, any address: a block a row, and a thread's sums of its columns in memory. */
__global__ __launch_bounds__(BLOCK) void backward_any_kernel(
    real *dx, float *dweight_sums /* (gridDim.x,C) */, float *dbias_sums /* (gridDim.x,C) */,
    const real *dout, const real *dresidual, const real *x, const float *mean, const float *rstd,
    const real *weight, size_t N, size_t C) {
    float *dweight = dweight_sums + blockIdx.x * C, *dbias = dbias_sums + blockIdx.x * C;
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const size_t first = row * C;
        const bool fresh = row == blockIdx.x;
        const float m = mean[row], r = rstd[row];
        float sum = 0.0f, sum_normalized = 0.0f;
        for (size_t c = threadIdx.x; c < C; c += BLOCK) {
            const float d = to_float(dout[first + c]), g = d * to_float(weight[c]);
            const float normalized = (to_float(x[first + c]) - m) * r;
            sum += g;
            sum_normalized += g * normalized;
            dweight[c] = (fresh ? 0.0f : dweight[c]) + d * normalized;
            dbias[c] = (fresh ? 0.0f : dbias[c]) + d;
        }
        sum = block_sum<BLOCK>(sum) / C;
        sum_normalized = block_sum<BLOCK>(sum_normalized) / C;
        for (size_t c = threadIdx.x; c < C; c += BLOCK) {
            const float g = to_float(dout[first + c]) * to_float(weight[c]);
            const float normalized = (to_float(x[first + c]) - m) * r;
            const float passed = dresidual ? to_float(dresidual[first + c]) : 0.0f;
            dx[first + c] = from_float<real>(passed + r * (g - sum - normalized * sum_normalized));
        }
    }
}

/* launch(team, vectors), both integral constants, for the smallest team and then the fewest vectors
 * that hold a row of C <= MAX_COLUMNS. */
template <int TEAM = WARP, int VECTORS = VECTORS_STEP, typename Launch>
void dispatch(size_t C, Launch launch) {
    if (C <= (size_t)TEAM * VECTORS * VECTOR)
        launch(std::integral_constant<int, TEAM>(), std::integral_constant<int, VECTORS>());
    else if constexpr (VECTORS < MAX_VECTORS)
        dispatch<TEAM, VECTORS + VECTORS_STEP>(C, launch);
    else if constexpr (TEAM < BLOCK)
        dispatch<BLOCK, VECTORS_STEP>(C, launch);
}

void forward(void *out, void *residual, void *mean, void *rstd, const void *x, const void *branch,
             const void *weight, const void *bias, size_t N, size_t C, float eps, Dropout dropout,
             Device *device) {
    if (N == 0) return;
    if (C <= MAX_COLUMNS && vectorisable(C, {out, residual, x, branch, weight, bias})) {
        dispatch(C, [&](auto team, auto vectors) {
            forward_kernel<team(), vectors()>
                <<<blocks_for(N, BLOCK / team()), BLOCK, 0, stream_of(device)>>>(
                    (real *)out, (real *)residual, (float *)mean, (float *)rstd, (const real *)x,
                    (const real *)branch, (const real *)weight, (const real *)bias, N, (int)C, eps,
                    dropout);
        });
    } else {
        forward_any_kernel<<<blocks_for(N, 1), BLOCK, 0, stream_of(device)>>>(
            (real *)out, (real *)residual, (float *)mean, (float *)rstd, (const real *)x,
            (const real *)branch, (const real *)weight, (const real *)bias, C, eps, dropout);
    }
    LAUNCH_CHECK();
}

} // namespace

void LAYER(layernorm_forward)(void *out, void *mean, void *rstd, const void *x, const void *weight,
                              const void *bias, size_t N, size_t C, float eps, Device *device) {
    const Dropout none = {0.0f, 0};
    forward(out, NULL, mean, rstd, x, NULL, weight, bias, N, C, eps, none, device);
}

void LAYER(residual_layernorm_forward)(void *out, void *residual, void *mean, void *rstd,
                                       const void *x, const void *branch, const void *weight,
                                       const void *bias, size_t N, size_t C, float eps,
                                       Dropout dropout, Device *device) {
    forward(out, residual, mean, rstd, x, branch, weight, bias, N, C, eps, dropout, device);
}

void LAYER(layernorm_backward)(void *dx, void *dweight, void *dbias, const void *dout,
                               const void *dresidual, const void *x, const void *mean,
                               const void *rstd, const void *weight, size_t N, size_t C,
                               Device *device) {
    if (N == 0) return;
    const size_t fitting = std::max<size_t>(1, SCRATCH_FIXED_BYTES / (2 * C * sizeof(float)));
    float *dweight_sums, *dbias_sums; /* (blocks,C) */
    size_t blocks;
    const auto plan = [&](int resident, size_t rows_at_once) {
        const size_t on_device = (size_t)device->processors * resident;
        blocks = std::min({fitting, on_device, div_up(N, rows_at_once)});
        dweight_sums = (float *)scratch_of(device, 2 * blocks * C * sizeof(float));
        dbias_sums = dweight_sums + blocks * C;
    };
    if (C <= MAX_COLUMNS && vectorisable(C, {dx, dout, dresidual, x, weight})) {
        dispatch(C, [&](auto team, auto vectors) {
            plan(backward_blocks(vectors()), BLOCK / team());
            backward_kernel<team(), vectors()><<<(unsigned)blocks, BLOCK, 0, stream_of(device)>>>(
                (real *)dx, dweight_sums, dbias_sums, (const real *)dout, (const real *)dresidual,
                (const real *)x, (const float *)mean, (const float *)rstd, (const real *)weight, N,
                (int)C);
        });
    } else {
        plan(/*resident=*/8, /*rows_at_once=*/1);
        backward_any_kernel<<<(unsigned)blocks, BLOCK, 0, stream_of(device)>>>(
            (real *)dx, dweight_sums, dbias_sums, (const real *)dout, (const real *)dresidual,
            (const real *)x, (const float *)mean, (const float *)rstd, (const real *)weight, N, C);
    }
    LAUNCH_CHECK();
    add_partials((float *)dweight, dweight_sums, blocks, C, device);
    add_partials((float *)dbias, dbias_sums, blocks, C, device);
}
