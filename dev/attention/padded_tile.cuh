/* Tensor-core products from plain tiles in shared memory, by ordinary loads: what the first rungs
 * with mma.sync use, before ldmatrix and swizzling (attention/mma_tile.cuh) take their place.
 *
 * mma.m16n8k16 adds A (16×16) · B (16×8) to a 16×8 accumulator. Lane l of the warp holds (PTX ISA,
 * "Matrix Fragments for mma.m16n8k16")
 *
 *   of A   rows l/4 and l/4 + 8, columns 2(l%4) + {0,1} and 8 more
 *   of B   rows 2(l%4) + {0,1} and 8 more, column l/4
 *   of the accumulator   rows l/4 and l/4 + 8, columns 2(l%4) + {0,1}
 *
 * in 32-bit pairs. A tile's row is 16 bytes longer than its D elements: the 8 rows that a warp
 * reads at once start 4 banks apart and do not collide. */
#ifndef DEV_ATTENTION_PADDED_TILE_CUH
#define DEV_ATTENTION_PADDED_TILE_CUH

#include "attention/mma_tile.cuh"
#include "dev/attention/ladder.cuh"

template <int D>
struct PaddedTile {
    static constexpr int PITCH = D + 8;
    static constexpr size_t bytes(int rows) { return (size_t)rows * PITCH * sizeof(bf16); }

    bf16 *base;

    __device__ __forceinline__ uint32_t pair(int row, int column) const {
        return *(const uint32_t *)(base + row * PITCH + column);
    }
    __device__ __forceinline__ void set_pair(int row, int column, uint32_t x) const {
        *(uint32_t *)(base + row * PITCH + column) = x;
    }
    /* Rows row and row + 1 of one column. */
    __device__ __forceinline__ uint32_t column_pair(int row, int column) const {
        const bf16 *x = base + row * PITCH + column;
        return x[0] | (uint32_t)x[PITCH] << 16;
    }
};

/* Rows row0 … row0+ROWS-1 of a head, zeros past row T: 16 bytes a thread, through a register
 * (ASYNC = false) or by cp.async, whose arrival copy_async_wait awaits. */
template <int ROWS, int THREADS, bool ASYNC, int D>
__device__ __forceinline__ void load_rows(PaddedTile<D> tile, const bf16 *rows, const Problem &p,
                                          int row0) {
#pragma unroll
    for (int n = threadIdx.x; n < ROWS * D / 8; n += THREADS) {
        const int row = n / (D / 8), column = n % (D / 8) * 8;
        const bool exists = row0 + row < p.T;
        const bf16 *source = rows + (exists ? row0 + row : 0) * p.stride() + column;
        bf16 *target = tile.base + row * tile.PITCH + column;
        if constexpr (ASYNC)
            copy_async_16(shared_address(target), source, exists ? 16 : 0);
        else
            *(uint4 *)target = exists ? *(const uint4 *)source : make_uint4(0, 0, 0, 0);
    }
}

/* Rows row0 … row0+15 as an A operand. */
template <int D>
__device__ __forceinline__ Fragments<1, D / 16> row_fragments(PaddedTile<D> tile, int row0) {
    const int lane = threadIdx.x % 32;
    Fragments<1, D / 16> a;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a.x[k][0][i] = tile.pair(row0 + lane / 4 + i % 2 * 8,
                                     16 * k + 2 * (lane % 4) + i / 2 * 8);
    return a;
}

/* Columns column0 … column0+15 as an A operand: the transpose of rows 0 … 16K-1. */
template <int K, int D>
__device__ __forceinline__ Fragments<1, K> column_fragments(PaddedTile<D> tile, int column0) {
    const int lane = threadIdx.x % 32;
    Fragments<1, K> a;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a.x[k][0][i] = tile.column_pair(16 * k + 2 * (lane % 4) + i / 2 * 8,
                                            column0 + lane / 4 + i % 2 * 8);
    return a;
}

/* acc (16 × 8N) += A (16 × D) · Bᵀ, B = rows row0 … row0+8N-1 of the tile. */
template <int N, int D>
__device__ __forceinline__ void multiply_transposed(float (&acc)[1][N][4],
                                                    const Fragments<1, D / 16> &a,
                                                    PaddedTile<D> tile, int row0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int row = row0 + 8 * n + lane / 4, column = 16 * k + 2 * (lane % 4);
            mma_16x8x16(acc[0][n], a.x[k][0], tile.pair(row, column), tile.pair(row, column + 8));
        }
}

/* acc (16 × 8N) += A (16 × 16K) · B, B = rows row0 … and columns column0 … of the tile. */
template <int N, int K, int D>
__device__ __forceinline__ void multiply(float (&acc)[1][N][4], const Fragments<1, K> &a,
                                         PaddedTile<D> tile, int row0, int column0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int row = row0 + 16 * k + 2 * (lane % 4), column = column0 + 8 * n + lane / 4;
            mma_16x8x16(acc[0][n], a.x[k][0], tile.column_pair(row, column),
                        tile.column_pair(row + 8, column));
        }
}

#endif
