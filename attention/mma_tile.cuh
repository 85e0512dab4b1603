/* Tiles of bf16 rows in shared memory, and the two matrix products that attention makes of them.
 *
 *   multiply_transposed   acc += A · Bᵀ    B's rows are rows of a tile:      S = Q Kᵀ,  dP = dO Vᵀ
 *   multiply              acc += A · B     B's rows are the summed index:    O = P V,   dQ = dS K
 *
 * A warp multiplies 16·M rows. A is held in registers (Fragments), or read at each use from a tile
 * as it is (TileRows) or transposed (TileColumns); B always comes from a tile, so M = 2 halves the
 * shared memory traffic per product.
 *
 * A tile row is D bf16 = D/8 chunks of 16 bytes. Chunk c of row r is stored at place c ^
 * swizzle(r), so that the 8 rows of a matrix that ldmatrix reads at one column fall into 8
 * different groups of 4 banks. Rows of 128·n bytes start at the same bank: 8 chunks are permuted by
 * r % 8. Rows of 64 bytes (odd multiples: D = 32, 96) start at two places: 4 chunks are permuted by
 * (r / 2) % 4. */
#ifndef ATTENTION_MMA_TILE_CUH
#define ATTENTION_MMA_TILE_CUH

#include <stddef.h>

#include "attention/flash_problem.cuh"
#include "attention/mma_accumulator.cuh"

template <int D>
struct Tile {
    static_assert(D % 32 == 0, "rows are whole groups of 4 chunks");
    static constexpr int GROUP = D % 64 == 0 ? 8 : 4; /* chunks that the swizzle permutes */
    static constexpr uint32_t GROUP_BYTES = 16 * GROUP;
    static constexpr uint32_t ROW_BYTES = 2 * D;

    uint32_t base; /* shared address, a multiple of 128 */

    static constexpr size_t bytes(int rows) { return (size_t)rows * ROW_BYTES; }

    __device__ __forceinline__ uint32_t chunk(int row, int c) const {
        const int swizzle = GROUP == 8 ? row % 8 : row / 2 % 4;
        return base + ROW_BYTES * row + 16 * (c ^ swizzle);
    }

    /* This lane's ldmatrix address for the 16×16 block at (0,0). The four matrices come in the
     * order (row, column) = (0,0) (8,0) (0,8) (8,8): A of S = Q Kᵀ, and with .trans B of O = P
     * V. */
    __device__ __forceinline__ uint32_t lane_rows_first() const {
        const int lane = opaque(threadIdx.x) % 32;
        return chunk(lane % 16, lane / 16);
    }
    /* The same in the order (0,0) (0,8) (8,0) (8,8): B of S = Q Kᵀ. */
    __device__ __forceinline__ uint32_t lane_columns_first() const {
        const int lane = opaque(threadIdx.x) % 32;
        return chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
    /* Moves such an address to the block at (row, column), multiples of 16: they change neither the
     * swizzle nor the lowest bit of the chunk, so the column's bits within a group are an XOR. */
    static __device__ __forceinline__ uint32_t block(uint32_t lane_address, int row, int column) {
        const uint32_t offset = 2 * column;
        return (lane_address ^ (offset % GROUP_BYTES)) + offset / GROUP_BYTES * GROUP_BYTES +
               ROW_BYTES * row;
    }
};

/* Eight elements, of which the first n (less than 1: none) exist. */
__device__ __forceinline__ uint4 load_chunk(const bf16 *source, int n, bool aligned) {
    if (aligned && n >= 8)
        return *(const uint4 *)source;
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t low = 2 * i < n ? source[2 * i] : 0;
        const uint32_t high = 2 * i + 1 < n ? source[2 * i + 1] : 0;
        x[i] = low | high << 16;
    }
    return make_uint4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void store_chunk(bf16 *target, uint4 value, int n, bool aligned) {
    if (aligned && n >= 8) {
        *(uint4 *)target = value;
        return;
    }
    const uint32_t x[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (2 * i < n)
            target[2 * i] = (bf16)x[i];
        if (2 * i + 1 < n)
            target[2 * i + 1] = (bf16)(x[i] >> 16);
    }
}

/* tile = rows row0 … row0+ROWS-1 of a (T,HS) matrix with this row stride; zeros past row T and past
 * column HS. All THREADS of the block take part. Ready after copy_async_wait and a barrier. */
template <int ROWS, int THREADS, int D>
__device__ __forceinline__ void load_tile(Tile<D> tile, const bf16 *matrix, size_t stride, int row0,
                                          int T, int HS, bool aligned) {
    constexpr int GROUP = Tile<D>::GROUP, STEP = THREADS / GROUP;
    static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "each thread keeps one swizzle");
    const int thread = opaque(threadIdx.x), row = thread / GROUP, c = thread % GROUP;
    const bf16 *source = matrix + (size_t)(row0 + row) * stride + 8 * c;
    const uint32_t target = tile.chunk(row, c);
    const int rows = T - row0 - row, columns = HS - 8 * c;
    if (aligned) {
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP)
#pragma unroll
            for (int d = 0; d < D; d += 8 * GROUP)
                copy_async_16(target + (r * D + d) * 2, source + r * stride + d,
                              r < rows ? 2 * max(0, min(8, columns - d)) : 0);
    } else {
#pragma unroll 1
        for (int r = 0; r < ROWS; r += STEP)
#pragma unroll 1
            for (int d = 0; d < D; d += 8 * GROUP)
                store_shared_16(
                    target + (r * D + d) * 2,
                    load_chunk(source + r * stride + d, r < rows ? columns - d : 0, false));
    }
}

/* A operand in shared memory: rows row0 … row0+16M-1 of a tile. */
template <int M, int D>
struct TileRows {
    static constexpr int STEPS = D / 16;
    uint32_t lane_address;

    __device__ __forceinline__ TileRows(Tile<D> tile, int row0)
        : lane_address(Tile<D>::block(tile.lane_rows_first(), row0, 0)) {}

    __device__ __forceinline__ void get(uint32_t (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrices(a[m], Tile<D>::block(lane_address, 16 * m, 16 * k));
    }
};

/* A operand in shared memory: columns column0 … column0+16M-1 of a tile of ROWS rows are its rows.
 * column0 is a multiple of 16M. */
template <int M, int ROWS, int D>
struct TileColumns {
    static constexpr int STEPS = ROWS / 16;
    uint32_t lane_address;

    __device__ __forceinline__ TileColumns(Tile<D> tile, int column0)
        : lane_address(Tile<D>::block(tile.lane_columns_first(), 0, column0)) {}

    __device__ __forceinline__ void get(uint32_t (&a)[M][4], int k) const {
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrices_transposed(a[m], Tile<D>::block(lane_address, 16 * k, 16 * m));
    }
};

/* The A operand made of these rows of a tile, read now (HOLD) or at each use. */
template <int M, bool HOLD, int D>
__device__ __forceinline__ auto tile_rows(Tile<D> tile, int row0) {
    const TileRows<M, D> rows(tile, row0);
    if constexpr (HOLD) {
        Fragments<M, D / 16> held;
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            rows.get(held.x[k], k);
        return held;
    } else {
        return rows;
    }
}

/* acc (16M × 8N) += A (16M × D) · Bᵀ, B = rows row0 … row0+8N-1 of the tile. */
template <int M, int N, int D, class Rows>
__device__ __forceinline__ void multiply_transposed(float (&acc)[M][N][4], const Rows &rows,
                                                    Tile<D> tile, int row0) {
    static_assert(N % 2 == 0, "one ldmatrix serves two column tiles");
    const uint32_t lane_address = Tile<D>::block(tile.lane_columns_first(), row0, 0);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[M][4];
        rows.get(a, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            load_matrices(b, Tile<D>::block(lane_address, 8 * n, 16 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(acc[m][n], a[m], b[0], b[1]);
                mma_16x8x16(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* acc (16M × 8N) += A (16M × 16K) · B, B = rows row0 … row0+16K-1 and columns column0 …
 * column0+8N-1 of the tile; column0 is a multiple of 8N, and N a power of two unless it is 0. */
template <int M, int N, int D, class Rows>
__device__ __forceinline__ void multiply(float (&acc)[M][N][4], const Rows &rows, Tile<D> tile,
                                         int row0, int column0) {
    static_assert(N % 2 == 0, "one ldmatrix serves two column tiles");
    const uint32_t lane_address = Tile<D>::block(tile.lane_rows_first(), row0, column0);
#pragma unroll
    for (int k = 0; k < Rows::STEPS; k++) {
        uint32_t a[M][4];
        rows.get(a, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, Tile<D>::block(lane_address, 16 * k, 8 * n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_16x8x16(acc[m][n], a[m], b[0], b[1]);
                mma_16x8x16(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* A packed accumulator into rows row0 … and columns column0 … of a tile. */
template <int M, int K, int D>
__device__ __forceinline__ void store_fragments(Tile<D> tile, int row0, int column0,
                                                const Fragments<M, K> &x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                store_shared_4(tile.chunk(row0 + 16 * m + 8 * (i % 2) + lane / 4,
                                          column0 / 8 + 2 * k + i / 2) +
                                   4 * (lane % 4),
                               x.x[k][m][i]);
}

/* Rows row0 … row0+16M-1 of a (T,HS) matrix, columns column0 … column0+8N-1, = acc, each row times
 * its factor. `scratch` is a tile whose rows scratch_row0 … +16M-1 no other warp uses any more: it
 * turns the lanes' 4-byte pairs into 16-byte stores. */
template <int M, int N, int D>
__device__ __forceinline__ void store_rows(const float (&acc)[M][N][4], const float (&factor)[M][2],
                                           Tile<D> scratch, int scratch_row0, bf16 *matrix,
                                           size_t stride, int row0, int column0, int T, int HS,
                                           bool aligned) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                store_shared_4(scratch.chunk(scratch_row0 + 16 * m + 8 * i + lane / 4, n) +
                                   4 * (lane % 4),
                               pack_bf16(acc[m][n][2 * i] * factor[m][i],
                                         acc[m][n][2 * i + 1] * factor[m][i]));
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * M * N; i += 32) {
        const int row = i / N, c = i % N;
        if (row0 + row < T)
            store_chunk(matrix + (size_t)(row0 + row) * stride + column0 + 8 * c,
                        load_shared_16(scratch.chunk(scratch_row0 + row, c)),
                        HS - column0 - 8 * c, aligned);
    }
}

#endif
