/* Rung 3: the loops exchanged and the division deferred (Dao 2023, arXiv 2307.08691, Algorithm 1).
 *
 * The change: a thread block owns 64 queries and streams the keys past them. O, m and ℓ stay in
 * registers from the first key to the last, blocks depend on nothing, so T/64 times as many of them
 * fill the GPU; O is corrected by e^(m - m') only, and divided by ℓ once, at the end:
 *
 *   m' = max(m, rowmax S),  r = e^(m - m'),  P = e^(S - m'),  ℓ' = r ℓ + rowsum P,  O' = r O + P V
 *
 * A thread computes a 4×4 piece of S and a 4×(HS/16) piece of O, so that a value read from shared
 * memory serves four multiplications or more. Arithmetic is float, on the ordinary units.
 *
 * What limits it: those units do about a fifteenth of what the tensor cores do.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 23.2 (3.4%), HS=64 25.8 (3.8%). */
#include "dev/attention/ladder.cuh"

namespace {

enum { THREADS = 256, TILE = 64, PITCH = TILE + 4 /* rows of float4, shifted by 4 banks each */ };

template <int HS>
struct Shared {
    float q[HS][PITCH]; /* Qᵀ */
    union {
        float k[HS][PITCH]; /* Kᵀ */
        float v[TILE][HS];
    };
    float p[TILE][PITCH]; /* Pᵀ */
};

/* tile[d][t] = row row0 + t, column d; zeros past T. */
template <int HS>
__device__ void load_transposed(float (*tile)[PITCH], const bf16 *rows, const Problem &p,
                                int row0) {
    for (int n = threadIdx.x; n < TILE * HS; n += THREADS) {
        const int t = n / HS, d = n % HS;
        tile[d][t] = row0 + t < p.T ? to_float(rows[(row0 + t) * p.stride() + d]) : 0.0f;
    }
}

__device__ __forceinline__ void load_4(float *x, const float *source) {
    const float4 y = *(const float4 *)source;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

template <int HS>
__global__ void __launch_bounds__(THREADS) forward_kernel(const Problem p) {
    constexpr int WIDTH = HS / 16; /* columns of O a thread owns */
    extern __shared__ __align__(16) unsigned char memory[];
    Shared<HS> &shared = *(Shared<HS> *)memory;
    const int i0 = (gridDim.x - 1 - blockIdx.x) * TILE, bh = blockIdx.y; /* longest first */
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    /* Rows 4y … 4y+3; columns 4x … 4x+3 of S, WIDTH·x … of O. A row has half a warp. */
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;

    load_transposed<HS>(shared.q, p.q + head, p, i0);
    float o[4][WIDTH] = {}, l[4] = {}, m[4];
    for (int r = 0; r < 4; r++)
        m[r] = -INFINITY;

    const int keys = p.causal ? min(p.T, i0 + TILE) : p.T;
    for (int j0 = 0; j0 < keys; j0 += TILE) {
        __syncthreads();
        load_transposed<HS>(shared.k, p.k + head, p, j0);
        __syncthreads();
        float s[4][4] = {};
#pragma unroll 4
        for (int d = 0; d < HS; d++) {
            float a[4], b[4];
            load_4(a, &shared.q[d][4 * y]);
            load_4(b, &shared.k[d][4 * x]);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    s[r][c] += a[r] * b[c];
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float top = m[r];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int i = i0 + 4 * y + r, j = j0 + 4 * x + c;
                s[r][c] = j < p.T && (!p.causal || j <= i) ? p.scale * s[r][c] : -INFINITY;
                top = fmaxf(top, s[r][c]);
            }
            for (int lanes = 1; lanes < 16; lanes *= 2)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
            const float correction = __expf(m[r] - top);
            m[r] = top, l[r] *= correction;
#pragma unroll
            for (int c = 0; c < WIDTH; c++)
                o[r][c] *= correction;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                s[r][c] = __expf(s[r][c] - top);
                l[r] += s[r][c]; /* this thread's part of ℓ */
                shared.p[4 * x + c][4 * y + r] = s[r][c];
            }
        }
        __syncthreads();
        for (int n = threadIdx.x; n < TILE * HS; n += THREADS) {
            const int j = j0 + n / HS, d = n % HS;
            shared.v[n / HS][d] = j < p.T ? to_float(p.v[head + j * p.stride() + d]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < TILE; j++) {
            float a[4], b[WIDTH];
            load_4(a, &shared.p[j][4 * y]);
#pragma unroll
            for (int c = 0; c < WIDTH; c += 4)
                load_4(b + c, &shared.v[j][WIDTH * x + c]);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < WIDTH; c++)
                    o[r][c] += a[r] * b[c];
        }
    }

    for (int r = 0; r < 4; r++) {
        for (int lanes = 1; lanes < 16; lanes *= 2)
            l[r] += __shfl_xor_sync(~0u, l[r], lanes);
        const int i = i0 + 4 * y + r;
        if (i >= p.T)
            continue;
        if (x == 0)
            p.lse[(size_t)bh * p.T + i] = m[r] + logf(l[r]);
        for (int c = 0; c < WIDTH; c++)
            p.o[head + i * p.stride() + WIDTH * x + c] = to_bf16(o[r][c] / l[r]);
    }
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(forward_kernel<HS>, dim3(count_tiles(p.T, TILE), p.B * p.NH), THREADS,
                  sizeof(Shared<HS>), stream, p);
}

} // namespace

const Rung forward_03 = {"03_queries_outside", NEEDS_NOTHING, NULL, NULL, BY_HEAD_SIZE(launch)};
