/* Rung 2: the algorithm of 2022, exactly as written (Dao et al., arXiv 2205.14135, Algorithm 1).
 *
 * The change: S and P never leave the chip. For each block of keys (the outer loop, line 5) and
 * each block of queries (line 7),
 *
 *   S = scale · Q_i K_jᵀ,  m~ = rowmax S,  P~ = exp(S - m~),  ℓ~ = rowsum P~          (lines 9, 10)
 *   m' = max(m, m~),  ℓ' = e^(m - m') ℓ + e^(m~ - m') ℓ~                                  (line 11)
 *   O  = (ℓ e^(m - m') O + e^(m~ - m') P~ V_j) / ℓ'                                       (line 12)
 *
 * where O, ℓ and m live in memory and are read, corrected and written back at each step, O
 * normalised at every moment. Memory is O(T), and blocks of scores that the mask hides are skipped.
 *
 * What limits it: with keys outside, steps of one head must follow each other, so a head is one
 * thread block and B·NH of them must fill the GPU; O crosses the memory bus twice for each block of
 * keys.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 2.98 (0.44%), HS=64 7.62 (1.1%). */
#include "dev/attention/ladder.cuh"

namespace {

enum { THREADS = 256, ROWS = 64 /* Br */, COLUMNS = 64 /* Bc */ };

template <int HS>
struct Shared {
    bf16 q[ROWS][HS + 2], k[COLUMNS][HS + 2], v[COLUMNS][HS + 2]; /* odd strides in 4-byte banks */
    float p[ROWS][COLUMNS + 1];
    float keep[ROWS], add[ROWS]; /* the factors of O and of P~ V_j in line 12 */
};

/* Rows row0 … row0+63 of a head; zeros past T. */
template <int HS>
__device__ void load(bf16 (*tile)[HS + 2], const bf16 *rows, const Problem &p, int row0) {
    for (int n = threadIdx.x; n < 64 * HS; n += THREADS)
        tile[n / HS][n % HS] =
            row0 + n / HS < p.T ? rows[(row0 + n / HS) * p.stride() + n % HS] : (bf16)0;
}

template <int HS>
__global__ void __launch_bounds__(THREADS) forward_kernel(const Problem p, float *workspace) {
    extern __shared__ unsigned char memory[];
    Shared<HS> &shared = *(Shared<HS> *)memory;
    const int bh = blockIdx.x, thread = threadIdx.x;
    const size_t head = p.head(bh / p.NH, bh % p.NH);
    const size_t padded = (size_t)count_tiles(p.T, ROWS) * ROWS;
    float *o = workspace + bh * padded * (HS + 2), *l = o + padded * HS, *m = l + padded;

    for (size_t n = thread; n < padded * HS; n += THREADS) /* line 2 */
        o[n] = 0.0f;
    for (size_t n = thread; n < padded; n += THREADS)
        l[n] = 0.0f, m[n] = -INFINITY;

    for (int j0 = 0; j0 < p.T; j0 += COLUMNS) { /* line 5 */
        __syncthreads();
        load<HS>(shared.k, p.k + head, p, j0); /* line 6 */
        load<HS>(shared.v, p.v + head, p, j0);
        for (int i0 = p.causal ? j0 : 0; i0 < p.T; i0 += ROWS) { /* line 7 */
            __syncthreads();
            load<HS>(shared.q, p.q + head, p, i0); /* line 8; O, ℓ and m where they are used */
            __syncthreads();

            /* Line 9: a thread owns column c of 16 rows. */
            const int c = thread % COLUMNS, first = thread / COLUMNS, step = THREADS / COLUMNS;
            float s[ROWS / step] = {};
            for (int d = 0; d < HS; d++) {
                const float k = to_float(shared.k[c][d]);
#pragma unroll
                for (int n = 0; n < ROWS / step; n++)
                    s[n] += to_float(shared.q[first + n * step][d]) * k;
            }
#pragma unroll
            for (int n = 0; n < ROWS / step; n++) {
                const int i = i0 + first + n * step, j = j0 + c;
                const bool seen = j < p.T && (!p.causal || j <= i);
                shared.p[first + n * step][c] = seen ? p.scale * s[n] : -INFINITY;
            }
            __syncthreads();

            /* Lines 10, 11, 13: four neighbouring threads share a row. */
            const int row = thread / 4, part = thread % 4;
            float top = -INFINITY, sum = 0.0f;
            for (int n = part; n < COLUMNS; n += 4)
                top = fmaxf(top, shared.p[row][n]);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            for (int n = part; n < COLUMNS; n += 4)
                sum += shared.p[row][n] = expf(shared.p[row][n] - top);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (part == 0) {
                const float m_old = m[i0 + row], m_new = fmaxf(m_old, top);
                const float old = expf(m_old - m_new) * l[i0 + row], add = expf(top - m_new);
                const float l_new = old + add * sum;
                shared.keep[row] = old / l_new, shared.add[row] = add / l_new;
                m[i0 + row] = m_new, l[i0 + row] = l_new;
                const bool last = p.causal ? j0 == i0 : j0 + COLUMNS >= p.T;
                if (last && i0 + row < p.T)
                    p.lse[(size_t)bh * p.T + i0 + row] = m_new + logf(l_new);
            }
            __syncthreads();

            /* Line 12: a thread owns column d of O's rows. */
            const int d = thread % HS, above = thread / HS, stride = THREADS / HS;
            float product[ROWS / stride] = {};
            for (int n = 0; n < COLUMNS; n++) {
                const float v = to_float(shared.v[n][d]);
#pragma unroll
                for (int r = 0; r < ROWS / stride; r++)
                    product[r] += shared.p[above + r * stride][n] * v;
            }
#pragma unroll
            for (int r = 0; r < ROWS / stride; r++) {
                const int in_tile = above + r * stride, i = i0 + in_tile;
                float *x = o + (size_t)i * HS + d;
                *x = shared.keep[in_tile] * *x + shared.add[in_tile] * product[r];
                const bool last = p.causal ? j0 == i0 : j0 + COLUMNS >= p.T;
                if (last && i < p.T)
                    p.o[head + i * p.stride() + d] = to_bf16(*x);
            }
        }
    }
}

template <int HS>
void launch(const Problem &p, cudaStream_t stream) {
    launch_kernel(forward_kernel<HS>, p.B * p.NH, THREADS, sizeof(Shared<HS>), stream, p,
                  (float *)p.workspace);
}

size_t workspace(const Problem &p) { /* O, ℓ and m of whole blocks */
    return (size_t)p.B * p.NH * count_tiles(p.T, ROWS) * ROWS * (p.HS + 2) * sizeof(float);
}

} // namespace

const Rung forward_02 = {"02_flash_2022", NEEDS_NOTHING, workspace, NULL, BY_HEAD_SIZE(launch)};
