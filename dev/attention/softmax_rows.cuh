/* What the tensor-core rungs do with accumulators: the softmax of a tile, and how rows leave. The
 * lanes' layout is that of attention/mma.cuh, for mma.sync and, warp by warp, for wgmma. */
#ifndef DEV_ATTENTION_SOFTMAX_ROWS_CUH
#define DEV_ATTENTION_SOFTMAX_ROWS_CUH

#include "attention/mma_softmax.cuh"
#include "dev/attention/ladder.cuh"

/* S becomes P = e^(S - m'), m and ℓ become m' and ℓ' = r ℓ + rowsum P; correction = r = e^(m - m'),
 * by which O is still to be multiplied. */
template <int M, int N>
__device__ __forceinline__ void softmax_step(OnlineSoftmax<M> &softmax, float (&scores)[M][N][4],
                                             float (&correction)[M][2], float scale_log2) {
    softmax.raise(scores, correction, scale_log2);
    softmax.exponentials(scores, scale_log2);
}

/* Rows row0 … row0+16M-1 of a head = acc, each row times its factor; nothing past row T. */
template <int M, int N>
__device__ __forceinline__ void store_pairs(const float (&acc)[M][N][4],
                                            const float (&factor)[M][2], bf16 *rows,
                                            const Problem &p, int row0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = row0 + 16 * m + 8 * i + lane / 4;
            if (row < p.T)
#pragma unroll
                for (int n = 0; n < N; n++)
                    *(uint32_t *)(rows + row * p.stride() + 8 * n + 2 * (lane % 4)) = pack_bf16(
                        acc[m][n][2 * i] * factor[m][i], acc[m][n][2 * i + 1] * factor[m][i]);
        }
}

template <int M>
__device__ __forceinline__ void store_lse(const float (&lse)[M][2], const Problem &p, int bh,
                                          int row0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = row0 + 16 * m + 8 * i + lane / 4;
            if (lane % 4 == 0 && row < p.T)
                p.lse[(size_t)bh * p.T + row] = lse[m][i];
        }
}

/* O /= ℓ and LSE of a warp's rows row0 … row0+16M-1 of head bh % NH of batch bh / NH. */
template <int M, int N>
__device__ __forceinline__ void store_output(const float (&out)[M][N][4], OnlineSoftmax<M> &softmax,
                                             const Problem &p, int bh, int row0) {
    float factor[M][2], lse[M][2];
    softmax.finish(factor, lse, p.scale_log2);
    store_lse(lse, p, bh, row0);
    store_pairs(out, factor, p.o + p.head(bh / p.NH, bh % p.NH), p, row0);
}

#endif
