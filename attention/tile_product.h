/* C = A B, or C += A B, on tiles that lie in cache: the matrix products of the CPU's flash
 * attention.
 *
 * A block of PRODUCT_ROWS × PRODUCT_COLUMNS sums stays in vector registers while k runs; each step
 * loads two vectors of B and broadcasts one element of A for each row. Six rows of two vectors are
 * 12 independent chains of multiply-adds, enough to hide their latency, and fill 15 of AVX's 16
 * registers. Reading A element by element makes a transpose free: it is a choice of strides. Tiles
 * this small leave a BLAS call no time to repay its packing. */
#ifndef ATTENTION_TILE_PRODUCT_H
#define ATTENTION_TILE_PRODUCT_H

#include <stddef.h>

#include "runtime/real.h"
#include "runtime/vector_math.h"

#define PRODUCT_ROWS 6
#define PRODUCT_COLUMNS (64 / (int)sizeof(real)) /* two 32-byte vectors */

typedef enum { PRODUCT_SET, PRODUCT_ADD } ProductMode;

/* `rows` is a constant at every call, so that the sums get registers. */
__attribute__((always_inline)) static inline void tile_product_block(int rows, real *c,
                                                                     size_t c_row, const real *a,
                                                                     size_t a_row, size_t a_column,
                                                                     const real *b, size_t b_row,
                                                                     size_t K, ProductMode mode) {
    real sum[PRODUCT_ROWS][PRODUCT_COLUMNS];
    for (int r = 0; r < rows; r++) {
#pragma omp simd
        for (int j = 0; j < PRODUCT_COLUMNS; j++)
            sum[r][j] = mode == PRODUCT_ADD ? c[(size_t)r * c_row + (size_t)j] : 0;
    }
    for (size_t k = 0; k < K; k++)
        for (int r = 0; r < rows; r++) {
            real x = a[(size_t)r * a_row + k * a_column];
#pragma omp simd
            for (int j = 0; j < PRODUCT_COLUMNS; j++)
                sum[r][j] = real_multiply_add(x, b[k * b_row + (size_t)j], sum[r][j]);
        }
    for (int r = 0; r < rows; r++) {
#pragma omp simd
        for (int j = 0; j < PRODUCT_COLUMNS; j++) c[(size_t)r * c_row + (size_t)j] = sum[r][j];
    }
}

/* C (M,N) with rows c_row apart; A (M,K) with element (m,k) at a[m*a_row + k*a_column]; B (K,N)
 * with rows b_row apart. N is a multiple of PRODUCT_COLUMNS. C overlaps neither A nor B. */
static inline void tile_product(real *c, size_t c_row, const real *a, size_t a_row, size_t a_column,
                                const real *b, size_t b_row, size_t M, size_t N, size_t K,
                                ProductMode mode) {
    for (size_t m = 0; m < M; m += PRODUCT_ROWS)
        for (size_t n = 0; n < N; n += PRODUCT_COLUMNS) {
#define PRODUCT_CASE(rows)                                                                    \
    tile_product_block(rows, c + m * c_row + n, c_row, a + m * a_row, a_row, a_column, b + n, \
                       b_row, K, mode)
            switch (M - m) {
            case 1: PRODUCT_CASE(1); break;
            case 2: PRODUCT_CASE(2); break;
            case 3: PRODUCT_CASE(3); break;
            case 4: PRODUCT_CASE(4); break;
            case 5: PRODUCT_CASE(5); break;
            default: PRODUCT_CASE(PRODUCT_ROWS);
            }
#undef PRODUCT_CASE
        }
}

#endif
