/* Accumulators of the tensor cores, float acc[M][N][4]: this lane's part of 16·M rows and 8·N
 * columns (mma.cuh), and what becomes of them between products. */
#ifndef ATTENTION_MMA_ACCUMULATOR_CUH
#define ATTENTION_MMA_ACCUMULATOR_CUH

#include "attention/mma.cuh"

/* A operand in registers: K steps of 16 columns. */
template <int M, int K>
struct Fragments {
    static constexpr int STEPS = K;
    uint32_t x[K][M][4];

    __device__ __forceinline__ void get(uint32_t (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = x[k][m][i];
    }
};

/* An accumulator as the A operand of the next product: the layouts agree, so nothing moves. */
template <int M, int N>
__device__ __forceinline__ Fragments<M, N / 2> pack_fragments(const float (&acc)[M][N][4]) {
    Fragments<M, N / 2> packed;
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *pair = &acc[m][2 * k + i / 2][2 * (i % 2)];
                packed.x[k][m][i] = pack_bf16(pair[0], pair[1]);
            }
    return packed;
}

/* The first steps of an A operand, as one; the first columns of an accumulator, as one. */
template <int STEPS, int M, int K>
__device__ __forceinline__ Fragments<M, STEPS> &first_steps(Fragments<M, K> &a) {
    static_assert(STEPS <= K, "has so many");
    return reinterpret_cast<Fragments<M, STEPS> &>(a);
}
template <int COLUMNS, int N>
__device__ __forceinline__ float (&first_columns(float (&acc)[1][N][4]))[1][COLUMNS / 8][4] {
    static_assert(COLUMNS <= 8 * N, "has so many");
    return reinterpret_cast<float(&)[1][COLUMNS / 8][4]>(acc);
}

template <int M, int N>
__device__ __forceinline__ void clear(float (&acc)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[m][n][e] = 0.0f;
}

template <int M, int N>
__device__ __forceinline__ void copy(float (&to)[M][N][4], const float (&from)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                to[m][n][e] = from[m][n][e];
}

template <int M>
__device__ __forceinline__ void fill(float (&factor)[M][2], float value) {
#pragma unroll
    for (int m = 0; m < M; m++)
        factor[m][0] = factor[m][1] = value;
}

#endif
