/* The backward's arithmetic between its products, on transposed accumulators (mma.cuh):
 *
 *   P = exp(scale · S - LSE) = exp2(scale · log2 e · S - LSE · log2 e),   dS / scale = P ∘ (Z ∘ dP - D)
 *
 * Keys are rows and queries columns, so LSE and D belong to columns, of which a lane holds a pair in
 * each 8. A call is for one such pair, n, because kernels differ in when they can afford to load it. */
#ifndef ATTENTION_MMA_GRADIENT_CUH
#define ATTENTION_MMA_GRADIENT_CUH

#include "attention/mma_mask.cuh"

/* Sᵀ becomes Pᵀ; lse2: LSE · log2 e. */
template <int M, int N>
__device__ __forceinline__ void scores_to_probabilities(float (&scores)[M][N][4], int n,
                                                        float2 lse2, float scale_log2) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            scores[m][n][e] =
                exp2_approx(fmaf(scores[m][n][e], scale_log2, -(e % 2 ? lse2.y : lse2.x)));
}

/* dS / (scale · P) of one score; dp is 0 already where Z is. */
template <bool DROPOUT>
__device__ __forceinline__ float score_gradient(const DropoutRule &dropout, float dp, float delta) {
    return DROPOUT ? fmaf(dp, dropout.scale, -delta) : dp - delta;
}

/* Pᵀ becomes dSᵀ / scale; delta: D. */
template <bool DROPOUT, int M, int N>
__device__ __forceinline__ void probabilities_to_gradients(float (&scores)[M][N][4],
                                                           const float (&dp)[M][N][4], int n,
                                                           float2 delta,
                                                           const DropoutRule &dropout) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            scores[m][n][e] *=
                score_gradient<DROPOUT>(dropout, dp[m][n][e], e % 2 ? delta.y : delta.x);
}

#endif
