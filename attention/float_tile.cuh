/* Matrix products of one block on float tiles: 64 × 64 results on 256 threads, with fused
 * multiply-adds alone, on any GPU.
 *
 * Operands come from global memory through shared memory, converted to float, in slices of 64 rows
 * and 32 or 64 columns: 35 KiB in all serve any HS, less than the 48 KiB that every GPU grants a
 * block without asking.
 *
 * Thread (y, x) of 16 × 16 owns rows y + 16 r and columns x + 16 c of a result, r, c = 0 … 3. Rows
 * in shared memory are padded by 4 floats, so that 16-byte reads of 8 neighbouring rows fall into
 * different banks. */
#ifndef ATTENTION_FLOAT_TILE_CUH
#define ATTENTION_FLOAT_TILE_CUH

#include "attention/simt.cuh"

namespace float_tile {

enum {
    TILE = 64,
    THREADS = 256,
    SIDE = 16,          /* threads along a side of the tile */
    EACH = TILE / SIDE, /* rows and columns of a thread */
    DEPTH = 32,         /* columns of a slice when two are in shared memory */
    PADDING = 4,
    CHUNK = 8           /* elements that a thread loads at a time */
};
static_assert(SIDE * SIDE == THREADS, "one thread for each 4 x 4 results");

template <int COLUMNS> struct alignas(16) Slice {
    float at[TILE][COLUMNS + PADDING];
};

struct Shared {
    Slice<DEPTH> slices[2]; /* or one slice of 64 columns */
    Slice<TILE> tile;       /* a result that is the next product's operand */
};
static_assert(sizeof(Slice<TILE>) <= sizeof(Shared::slices), "a wide slice takes the place of two");
static_assert(sizeof(Shared) <= 48 << 10, "static shared memory");

/* Up to 64 rows of one head; rows and columns beyond those that exist count as zeros. */
struct Rows {
    const real *data;
    int token; /* elements from row to row */
    int count; /* rows from data on */
    int columns;
    bool aligned; /* every row starts at a multiple of 16 bytes */
};

static __device__ __forceinline__ int thread_x() { return threadIdx.x % SIDE; }
static __device__ __forceinline__ int thread_y() { return threadIdx.x / SIDE; }

/* slice = columns first, first + 1, … of the rows. */
template <int COLUMNS>
static __device__ __forceinline__ void load_slice(Slice<COLUMNS> &slice, const Rows &rows,
                                                  int first) {
#pragma unroll 1 /* chunks in flight would take registers from the sums */
    for (int chunk = threadIdx.x; chunk < TILE * COLUMNS / CHUNK; chunk += THREADS) {
        const int row = chunk / (COLUMNS / CHUNK), column = chunk % (COLUMNS / CHUNK) * CHUNK;
        const int left = row < rows.count ? rows.columns - first - column : 0;
        const real *from = rows.data + (size_t)row * rows.token + first + column;
        float value[CHUNK];
        if (rows.aligned && left >= CHUNK) {
            load_some(value, from);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; i++) value[i] = i < left ? to_float(from[i]) : 0.0f;
        }
        float *to = &slice.at[row][column];
        *(float4 *)to = make_float4(value[0], value[1], value[2], value[3]);
        *(float4 *)(to + 4) = make_float4(value[4], value[5], value[6], value[7]);
    }
}

/* sum += a bᵀ over one slice's depth. */
static __device__ __forceinline__ void multiply_slices(float (&sum)[EACH][EACH],
                                                       const Slice<DEPTH> &a,
                                                       const Slice<DEPTH> &b) {
#pragma unroll 1
    for (int k = 0; k < DEPTH; k += 4) {
        float u[EACH][4], v[EACH][4];
#pragma unroll
        for (int r = 0; r < EACH; r++) load_some(u[r], &a.at[thread_y() + SIDE * r][k]);
#pragma unroll
        for (int c = 0; c < EACH; c++) load_some(v[c], &b.at[thread_x() + SIDE * c][k]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < EACH; r++)
#pragma unroll
                for (int c = 0; c < EACH; c++) sum[r][c] = fmaf(u[r][i], v[c][i], sum[r][c]);
    }
}

/* sum += a bᵀ. Each sum runs over the columns in order, so that exchanging a and b transposes the
 * result bit for bit. Starts with a barrier. */
static __device__ __forceinline__ void multiply_transposed(float (&sum)[EACH][EACH], const Rows &a,
                                                           const Rows &b, Shared &shared) {
    for (int first = 0; first < a.columns; first += DEPTH) {
        __syncthreads();
        load_slice(shared.slices[0], a, first);
        load_slice(shared.slices[1], b, first);
        __syncthreads();
        multiply_slices(sum, shared.slices[0], shared.slices[1]);
    }
}

/* A (64,D) result in registers: element k of a thread's row is column(k) of the result's. */
template <int D> struct Wide {
    enum {
        WIDTH = D < TILE ? D : TILE, /* columns of a slice */
        STEP = WIDTH / SIDE,         /* neighbouring columns of a thread in a slice */
        COLUMNS = D / SIDE           /* columns of a thread */
    };
    static_assert(D % WIDTH == 0 && (WIDTH == TILE || WIDTH == DEPTH), "whole slices");
    float at[EACH][COLUMNS];

    static __device__ __forceinline__ int column(int k) {
        return k / STEP * WIDTH + thread_x() * STEP + k % STEP;
    }
};

/* sum += shared.tile b, b (64,D). Starts with a barrier, after which the tile is read; it may be
 * written again after another. */
template <int D>
static __device__ __forceinline__ void multiply_tile(Wide<D> &sum, const Rows &b, Shared &shared) {
    enum { WIDTH = Wide<D>::WIDTH, STEP = Wide<D>::STEP };
    Slice<WIDTH> &slice = *(Slice<WIDTH> *)shared.slices;
#pragma unroll
    for (int part = 0; part < D / WIDTH; part++) {
        if (part * WIDTH >= b.columns) break;
        __syncthreads();
        load_slice(slice, b, part * WIDTH);
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < TILE; k += 4) {
            float u[EACH][4];
#pragma unroll
            for (int r = 0; r < EACH; r++)
                load_some(u[r], &shared.tile.at[thread_y() + SIDE * r][k]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float v[STEP];
                load_some(v, &slice.at[k + i][thread_x() * STEP]);
#pragma unroll
                for (int r = 0; r < EACH; r++)
#pragma unroll
                    for (int c = 0; c < STEP; c++)
                        sum.at[r][part * STEP + c] =
                            fmaf(u[r][i], v[c], sum.at[r][part * STEP + c]);
            }
        }
    }
}

} // namespace float_tile

#endif
