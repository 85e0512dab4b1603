/* Online softmax (Milakov and Gimelshein 2018) on tensor-core accumulators, as in Algorithm 1 of
 * Dao 2023 (arXiv 2307.08691).
 *
 * For one row, over the tiles so far, with scores s = q k before scaling:
 * m = max s,  ℓ = Σ exp(scale · (s - m)),  O = Σ exp(scale · (s - m)) v. A tile changes them to
 *
 *   m' = max(m, max_j s_j),   r = exp(scale · (m - m')),   p_j = exp(scale · (s_j - m'))
 *   ℓ' = r ℓ + Σ_j p_j,       O' = r O + Σ_j p_j v_j
 *
 * O is divided by ℓ once, after the last tile; online_softmax.h keeps it normalised. With
 * c = scale · log2 e > 0 (not the c of that file), exp(scale · (s - m')) = exp2(c·s - c·m'): one
 * fused multiply-add and one ex2 per score. ℓ is summed per lane and over the row's four lanes only
 * at the end.
 *
 * Any m near the maximum gives the same O and LSE: it only keeps the exponentials in range. One
 * that is LAZY follows the maximum when that has outgrown it by 2^SLACK, so that after the first
 * tiles r is 1 and O is left alone (as in FlashAttention-4's forward). */
#ifndef ATTENTION_MMA_SOFTMAX_CUH
#define ATTENTION_MMA_SOFTMAX_CUH

#include "attention/mma.cuh"

template <int M, bool LAZY = false>
struct OnlineSoftmax {
    static constexpr float SLACK = 8.0f; /* p ≤ 256: no float sum and no bf16 is strained */
    float top[M][2]; /* m, before scaling */
    float sum[M][2]; /* this lane's part of ℓ */

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                top[m][i] = -INFINITY;
                sum[m][i] = 0.0f;
            }
    }

    /* A row that has seen no key has m = -inf, and -inf - -inf is NaN: subtracting 0 makes all its
     * terms exp2(-inf) = 0. */
    static __device__ __forceinline__ float base(float top) {
        return top == -INFINITY ? 0.0f : top;
    }

    /* m becomes m'; correction = r, by which ℓ has been and O is still to be multiplied. */
    template <int N>
    __device__ __forceinline__ void raise(const float (&scores)[M][N][4],
                                          float (&correction)[M][2], float c) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float highest = top[m][i];
#pragma unroll
                for (int n = 0; n < N; n++)
                    highest = fmaxf(highest, fmaxf(scores[m][n][2 * i], scores[m][n][2 * i + 1]));
                highest = quad_max(highest);
                if (LAZY && (highest - top[m][i]) * c <= SLACK)
                    highest = top[m][i];
                correction[m][i] = exp2_approx((top[m][i] - base(highest)) * c);
                top[m][i] = highest;
                sum[m][i] *= correction[m][i];
            }
    }

    /* Whether O changes by it in any row of the warp. */
    static __device__ __forceinline__ bool corrects(const float (&correction)[M][2]) {
        if (!LAZY)
            return true;
        bool any = false;
#pragma unroll
        for (int m = 0; m < M; m++)
            any = any || correction[m][0] != 1.0f || correction[m][1] != 1.0f;
        return __any_sync(~0u, any);
    }

    /* Then scores become p, and ℓ becomes ℓ'. */
    template <int N>
    __device__ __forceinline__ void exponentials(float (&scores)[M][N][4], float c) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float shift = -base(top[m][i]) * c;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        scores[m][n][e] = exp2_approx(fmaf(scores[m][n][e], c, shift));
                        sum[m][i] += scores[m][n][e];
                    }
            }
    }

    /* O = r O. */
    template <int NO>
    static __device__ __forceinline__ void correct(float (&out)[M][NO][4],
                                                   const float (&correction)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < NO; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    out[m][n][e] *= correction[m][e / 2];
    }

    /* After the last tile: the factor that normalises O, and LSE in natural logarithms. A row
     * without keys gets 0 and -inf. */
    __device__ __forceinline__ void finish(float (&factor)[M][2], float (&lse)[M][2], float c) {
        const float LN2 = 0.693147181f;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float total = quad_sum(sum[m][i]);
                factor[m][i] = total == 0.0f ? 0.0f : 1.0f / total;
                lse[m][i] = total == 0.0f ? -INFINITY : top[m][i] * c * LN2 + logf(total);
            }
    }
};

#endif
