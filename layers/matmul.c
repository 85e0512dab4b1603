/* Matrix products on the CPU, by OpenBLAS or by the loops below.
 *
 * Without a BLAS: threads share out tiles of c. For each slice of K the tile's parts of a and b are
 * packed into buffers that stay in the second-level cache, which also makes the four orders one,
 * and the tile is computed in patches that stay in registers (Goto, van de Geijn, "Anatomy of
 * high-performance matrix multiplication", 2008). About half of OpenBLAS's speed. */
#include "layers/matmul.h"

#ifdef TILEGPT_BLAS
#include <cblas.h>
#include <limits.h>

#include "runtime/error.h"

#ifdef REAL_F64
#define gemm cblas_dgemm
#else
#define gemm cblas_sgemm
#endif

void LAYER(matmul)(void *c, MatmulMode mode, const void *a, MatmulOrder a_order, const void *b,
                   MatmulOrder b_order, size_t M, size_t N, size_t K) {
    if (M > INT_MAX || N > INT_MAX || K > INT_MAX)
        error_fatal(__FILE__, __LINE__, "a product of (%zu,%zu) by (%zu,%zu) is too large for BLAS",
                    M, K, K, N);
    gemm(CblasRowMajor, a_order == MATMUL_PLAIN ? CblasNoTrans : CblasTrans,
         b_order == MATMUL_PLAIN ? CblasNoTrans : CblasTrans, (int)M, (int)N, (int)K, 1, a,
         (int)(a_order == MATMUL_PLAIN ? K : M), b, (int)(b_order == MATMUL_PLAIN ? N : K),
         mode == MATMUL_ADD ? 1 : 0, c, (int)N);
}
#else
#include <stdbool.h>

#include "runtime/vector_math.h"

/* A tile of c, the slice of K, and the patch: 8 sums hide the latency of a multiply-add, and 64
 * bytes are one AVX-512 vector or two of AVX2. */
#define TILE_M 64
#define TILE_N 128
#define TILE_K 128
#define PATCH_M 8
#define PATCH_N (64 / sizeof(real))

static size_t smaller(size_t x, size_t y) { return x < y ? x : y; }

/* packed[k][i] = element (i,k) of a matrix, at i*row_stride + k*column_stride, for rows x depth
 * elements; zeros up to `width` rows. */
static void pack(real *packed, const real *x, size_t row_stride, size_t column_stride, size_t rows,
                 size_t depth, size_t width) {
    for (size_t k = 0; k < depth; k++) {
        real *line = packed + k * width;
        for (size_t i = 0; i < rows; i++) line[i] = x[i * row_stride + k * column_stride];
        for (size_t i = rows; i < width; i++) line[i] = 0;
    }
}

/* patch[i][j] = Σ_k a[k][i] b[k][j], a vector of columns at a time: its PATCH_M sums are the
 * registers. Not inlined because gcc 12 then fails to vectorise the outer loop. */
static void __attribute__((noinline))
multiply_patch(real patch[PATCH_M][PATCH_N], const real *a, const real *b, size_t depth) {
#pragma omp simd
    for (size_t j = 0; j < PATCH_N; j++) {
        real sum[PATCH_M] = {0};
        for (size_t k = 0; k < depth; k++)
            for (size_t i = 0; i < PATCH_M; i++)
                sum[i] = real_multiply_add(a[k * TILE_M + i], b[k * TILE_N + j], sum[i]);
        for (size_t i = 0; i < PATCH_M; i++) patch[i][j] = sum[i];
    }
}

/* The tile at c, of rows as long as c's, = or += the product of the packed parts. */
static void multiply_tile(real *c, size_t N, bool write, const real *packed_a, const real *packed_b,
                          size_t rows, size_t columns, size_t depth) {
    for (size_t i = 0; i < rows; i += PATCH_M) {
        for (size_t j = 0; j < columns; j += PATCH_N) {
            real patch[PATCH_M][PATCH_N];
            multiply_patch(patch, packed_a + i, packed_b + j, depth);
            for (size_t p = 0; p < smaller(rows - i, PATCH_M); p++) {
                real *row = c + (i + p) * N + j;
                for (size_t q = 0; q < smaller(columns - j, PATCH_N); q++)
                    row[q] = patch[p][q] + (write ? 0 : row[q]);
            }
        }
    }
}

void LAYER(matmul)(void *c_, MatmulMode mode, const void *a_, MatmulOrder a_order, const void *b_,
                   MatmulOrder b_order, size_t M, size_t N, size_t K) {
    real *c = c_;
    const real *a = a_, *b = b_;
    size_t a_row = a_order == MATMUL_PLAIN ? K : 1, a_column = a_order == MATMUL_PLAIN ? 1 : M;
    size_t b_row = b_order == MATMUL_PLAIN ? N : 1, b_column = b_order == MATMUL_PLAIN ? 1 : K;
#pragma omp parallel for collapse(2) schedule(static)
    for (size_t m = 0; m < M; m += TILE_M) {
        for (size_t n = 0; n < N; n += TILE_N) {
            real packed_a[TILE_K * TILE_M], packed_b[TILE_K * TILE_N];
            size_t rows = smaller(M - m, TILE_M), columns = smaller(N - n, TILE_N);
            for (size_t k = 0; k < K; k += TILE_K) {
                size_t depth = smaller(K - k, TILE_K);
                const real *a_part = a + m * a_row + k * a_column;
                const real *b_part = b + n * b_column + k * b_row;
                pack(packed_a, a_part, a_row, a_column, rows, depth, TILE_M);
                pack(packed_b, b_part, b_column, b_row, columns, depth, TILE_N);
                multiply_tile(c + m * N + n, N, mode == MATMUL_WRITE && k == 0, packed_a, packed_b,
                              rows, columns, depth);
            }
        }
    }
}
#endif
