/* The matrix product under the CPU's linear layers: OpenBLAS if the program was built with it. */
#ifndef LAYERS_MATMUL_H
#define LAYERS_MATMUL_H

#include <stddef.h>

#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { MATMUL_PLAIN, MATMUL_TRANSPOSED } MatmulOrder;
typedef enum { MATMUL_WRITE, MATMUL_ADD } MatmulMode;

/* c (M,N) = or += a b, row-major and dense. a is (M,K), or (K,M) if transposed; b is (K,N), or
 * (N,K). The result does not depend on the number of threads without OpenBLAS, and may with it. */
typedef void Matmul(void *c, MatmulMode mode, const void *a, MatmulOrder a_order, const void *b,
                    MatmulOrder b_order, size_t M, size_t N, size_t K);

extern Matmul matmul_cpu_f32, matmul_cpu_f64;

#ifdef __cplusplus
}
#endif

#endif
