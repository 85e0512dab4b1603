/* Rung 2: recomputation, exactly as written in 2022 (Dao et al., arXiv 2205.14135, Algorithm 4).
 *
 * The change: P is not stored but recomputed from Q, K and LSE: five products instead of the four
 * of a backward with stored P, 25% more, for O(T) memory. For each block of keys (the outer loop,
 * line 6), dK and dV stay on chip; for each block of queries (line 9)
 *
 *   P = exp(scale · Q_i K_jᵀ - LSE_i)                  (lines 11, 13; LSE is m + log ℓ there)
 *   dV_j += Pᵀ dO_i,  dP = dO_i V_jᵀ,  D_i = rowsum(dO_i ∘ O_i)              (lines 16 to 19)
 *   dS = P ∘ (dP - D_i),  dQ_i += scale · dS K_j,  dK_j += scale · dSᵀ Q_i   (lines 20 to 22)
 *
 * where dQ is in memory, read, added to and written back at each step. Blocks that the mask hides
 * are skipped. Arithmetic is float.
 *
 * What limits it: a head is one thread block, as in the forward's rung 2; and every value that a
 * multiplication needs is read from shared memory for it.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 4.14 (0.61%), HS=64 5.76 (0.84%). */
#include "dev/attention/ladder.cuh"

namespace {

enum { THREADS = 256, ROWS = 32 /* Br */, COLUMNS = 64 /* Bc */ };

template <int HS>
struct Shared {
    bf16 k[COLUMNS][HS + 2], v[COLUMNS][HS + 2]; /* odd strides in 4-byte banks */
    bf16 q[ROWS][HS + 2], dout[ROWS][HS + 2];
    float p[ROWS][COLUMNS + 1], ds[ROWS][COLUMNS + 1], delta[ROWS];
};

/* Rows row0 … row0+count-1 of a head; zeros past T. */
template <int HS>
__device__ void load(bf16 (*tile)[HS + 2], const bf16 *rows, const Problem &p, int row0,
                     int count) {
    for (int n = threadIdx.x; n < count * HS; n += THREADS)
        tile[n / HS][n % HS] =
            row0 + n / HS < p.T ? rows[(row0 + n / HS) * p.stride() + n % HS] : (bf16)0;
}

template <int HS>
__global__ void __launch_bounds__(THREADS) backward_kernel(const Problem p, float *workspace) {
    extern __shared__ unsigned char memory[];
    Shared<HS> &shared = *(Shared<HS> *)memory;
    const int bh = blockIdx.x, thread = threadIdx.x;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const float *lse = p.lse + (size_t)bh * p.T;
    float *dq = workspace + (size_t)bh * p.T * HS;
    /* A thread owns score column c of some rows, and column d of rows of dQ, dK and dV. */
    constexpr int SCORES = ROWS * COLUMNS / THREADS, ABOVE = THREADS / HS;
    const int c = thread % COLUMNS, first = thread / COLUMNS * SCORES;
    const int d = thread % HS, above = thread / HS;

    for (size_t n = thread; n < (size_t)p.T * HS; n += THREADS) /* line 5 */
        dq[n] = 0.0f;
    for (int j0 = 0; j0 < p.T; j0 += COLUMNS) { /* line 6 */
        __syncthreads();
        load<HS>(shared.k, p.k + head, p, j0, COLUMNS); /* line 7 */
        load<HS>(shared.v, p.v + head, p, j0, COLUMNS);
        float dk[COLUMNS / ABOVE] = {}, dv[COLUMNS / ABOVE] = {}; /* line 8 */
        for (int i0 = p.causal ? j0 : 0; i0 < p.T; i0 += ROWS) { /* line 9 */
            __syncthreads();
            load<HS>(shared.q, p.q + head, p, i0, ROWS); /* line 10 */
            load<HS>(shared.dout, p.dout + head, p, i0, ROWS);
            const int row = thread / 8, i = i0 + row; /* line 19: eight threads a row */
            float delta = 0.0f;
            for (int n = thread % 8; i < p.T && n < HS; n += 8)
                delta += to_float(p.dout[head + i * p.stride() + n]) *
                         to_float(p.o[head + i * p.stride() + n]);
            for (int lanes = 1; lanes < 8; lanes *= 2)
                delta += __shfl_xor_sync(~0u, delta, lanes);
            shared.delta[row] = delta;
            __syncthreads();

            float s[SCORES] = {}, dp[SCORES] = {}; /* lines 11, 17 */
            for (int n = 0; n < HS; n++) {
                const float k = to_float(shared.k[c][n]), v = to_float(shared.v[c][n]);
#pragma unroll
                for (int r = 0; r < SCORES; r++) {
                    s[r] += to_float(shared.q[first + r][n]) * k;
                    dp[r] += to_float(shared.dout[first + r][n]) * v;
                }
            }
#pragma unroll
            for (int r = 0; r < SCORES; r++) { /* lines 13, 20 */
                const int i = i0 + first + r, j = j0 + c;
                const bool seen = i < p.T && j < p.T && (!p.causal || j <= i);
                const float probability = seen ? expf(p.scale * s[r] - lse[i]) : 0.0f;
                shared.p[first + r][c] = probability;
                shared.ds[first + r][c] = probability * (dp[r] - shared.delta[first + r]);
            }
            __syncthreads();

            for (int r = 0; r < ROWS; r++) { /* lines 16, 22 */
                const float dout = to_float(shared.dout[r][d]), q = to_float(shared.q[r][d]);
#pragma unroll
                for (int n = 0; n < COLUMNS / ABOVE; n++) {
                    dv[n] += shared.p[r][above + n * ABOVE] * dout;
                    dk[n] += shared.ds[r][above + n * ABOVE] * q;
                }
            }
            float sum[ROWS / ABOVE] = {}; /* line 21 */
            for (int n = 0; n < COLUMNS; n++) {
                const float k = to_float(shared.k[n][d]);
#pragma unroll
                for (int r = 0; r < ROWS / ABOVE; r++)
                    sum[r] += shared.ds[above + r * ABOVE][n] * k;
            }
            const bool last = j0 + COLUMNS >= (p.causal ? min(p.T, i0 + ROWS) : p.T);
#pragma unroll
            for (int r = 0; r < ROWS / ABOVE; r++) {
                const int i = i0 + above + r * ABOVE;
                if (i >= p.T)
                    continue;
                const float x = dq[(size_t)i * HS + d] += p.scale * sum[r];
                if (last)
                    p.dq[head + i * p.stride() + d] = to_bf16(x);
            }
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / ABOVE; n++) { /* line 24 */
            const int j = j0 + above + n * ABOVE;
            if (j >= p.T)
                continue;
            p.dk[head + j * p.stride() + d] = to_bf16(p.scale * dk[n]);
            p.dv[head + j * p.stride() + d] = to_bf16(dv[n]);
        }
    }
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(backward_kernel<HS>, p.B * p.NH, THREADS, sizeof(Shared<HS>), stream, p,
                  (float *)p.workspace);
}

size_t workspace(const Problem &p) { return p.elements() * sizeof(float); } /* dQ */

} // namespace

const Rung backward_02 = {"02_recomputation_2022", NEEDS_NOTHING, workspace, NULL,
                          BY_HEAD_SIZE(launch)};
