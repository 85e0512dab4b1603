/* Which scores of a tile exist, and which are dropped.
 *
 * Key j exists for query i if j < TK and j <= i + diagonal. Causal, aligned at the bottom right, is
 * diagonal = TK - TQ; a full mask is a diagonal beyond every key, so one kernel serves both and
 * only the tiles that the diagonal or the last key cuts pay for masking. Scores that do not exist
 * become -inf.
 *
 * "Transposed" accumulators hold Sᵀ: keys are rows and queries columns. */
#ifndef ATTENTION_MMA_MASK_CUH
#define ATTENTION_MMA_MASK_CUH

#include <limits.h>

#include "attention/mma.cuh"
#include "runtime/random.h"

struct Mask {
    int TK;
    int diagonal;

    /* Of queries i0 … i0+queries-1 and keys j0 … j0+keys-1: no score exists; not every one does. */
    __device__ __forceinline__ bool hides(int i0, int queries, int j0) const {
        return j0 > i0 + queries - 1 + diagonal;
    }
    __device__ __forceinline__ bool cuts(int i0, int j0, int keys) const {
        return j0 + keys - 1 > min(TK - 1, i0 + diagonal);
    }

    template <int M, int N>
    __device__ __forceinline__ void apply(float (&scores)[M][N][4], int i0, int j0) const {
        const int lane = opaque(threadIdx.x) % 32;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = i0 + 16 * m + 8 * (e / 2) + lane / 4;
                const int keys = min(TK - 1, i + diagonal) - (j0 + 2 * (lane % 4) + e % 2);
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (8 * n > keys)
                        scores[m][n][e] = -INFINITY;
            }
    }

    template <int M, int N>
    __device__ __forceinline__ void apply_transposed(float (&scores)[M][N][4], int j0,
                                                     int i0) const {
        const int lane = opaque(threadIdx.x) % 32;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = j0 + 16 * m + 8 * (e / 2) + lane / 4;
                const int first = j < TK ? j - diagonal - (i0 + 2 * (lane % 4) + e % 2) : INT_MAX;
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (8 * n < first)
                        scores[m][n][e] = -INFINITY;
            }
    }
};

/* Dropout by the rule of runtime/random.h, with its parameters ready for the device. There is one
 * draw for a query, a 64-wide tile of keys and each lane of the quad. The N column tiles (or 2M row tiles, transposed) of
 * an accumulator lie within such a tile, or are whole ones; with first = (j0 / 8) % 8, even, the two
 * bytes of 8-key group first + g are in word (first + g) / 2. */
struct DropoutRule {
    uint64_t key;
    unsigned threshold;
    float scale;

    /* Selects, where indexing would put the draw into local memory. */
    static __device__ __forceinline__ uint32_t word(const Philox &draw, int i) {
        const uint32_t low = i % 2 ? draw.word[1] : draw.word[0];
        const uint32_t high = i % 2 ? draw.word[3] : draw.word[2];
        return i / 2 ? high : low;
    }

    /* Calls drop(m, n, e) for each dropped element. */
    template <int M, int N, class Drop>
    __device__ __forceinline__ void visit(uint32_t bh, int i0, int j0, Drop drop) const {
        static_assert(N % 2 == 0 && (8 % N == 0 || N % 8 == 0), "within one draw, or whole ones");
        constexpr int WIDTH = N < 8 ? N : 8;
        const int lane = opaque(threadIdx.x) % 32;
        const int first = N < 8 ? j0 / 8 % 8 : 0;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int n0 = 0; n0 < N; n0 += WIDTH) {
                    const Philox draw =
                        dropout_attention_draw(key, bh, i0 + 16 * m + 8 * i + lane / 4,
                                               j0 + 8 * n0 + 2 * (lane % 4));
#pragma unroll
                    for (int n = 0; n < WIDTH; n++) {
                        const uint32_t bytes = word(draw, first / 2 + n / 2) >> (16 * (n % 2));
#pragma unroll
                        for (int c = 0; c < 2; c++)
                            if ((bytes >> (8 * c) & 255) < threshold)
                                drop(m, n0 + n, 2 * i + c);
                    }
                }
    }

    template <int M, int N, class Drop>
    __device__ __forceinline__ void visit_transposed(uint32_t bh, int j0, int i0, Drop drop) const {
        static_assert(M <= 4 && 4 % M == 0, "a tile within one draw");
        const int lane = opaque(threadIdx.x) % 32;
        const int first = j0 / 8 % 8, parity = lane / 4 % 2;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const Philox draw =
                    dropout_attention_draw(key, bh, i0 + 8 * n + 2 * (lane % 4) + c, j0 + lane / 4);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const uint32_t bytes = word(draw, first / 2 + m) >> (8 * parity);
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if ((bytes >> (16 * i) & 255) < threshold)
                            drop(m, n, 2 * i + c);
                }
            }
    }
};

#endif
