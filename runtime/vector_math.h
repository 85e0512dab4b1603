/* exp in plain arithmetic without branches, which compilers turn into vector code inside loops
 * marked `#pragma omp simd`; the C library's exp is a call for each element.
 *
 *   exp(x) = 2ⁿ exp(r),  n = round(x / ln 2),  r = x - n ln 2,  |r| <= ln 2 / 2
 *
 * exp(r) is its Taylor polynomial. ln 2 is subtracted in two parts, the first short enough for n
 * times it to be exact (Cody, Waite 1980), and 2ⁿ is multiplied in as two factors so that results
 * beyond the normal range go gradually to 0 and to inf. Within 2 ulp of exp for every argument;
 * -inf gives 0, inf gives inf, NaN gives NaN.
 *
 * Holds without fast-math only: the rounding below relies on additions being done as written. */
#ifndef RUNTIME_VECTOR_MATH_H
#define RUNTIME_VECTOR_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "runtime/real.h"

/* Single precision also runs in CUDA kernels. */
#ifdef __CUDACC__
#define VECTOR_MATH_F32 static __host__ __device__ __forceinline__
#else
#define VECTOR_MATH_F32 static inline
#endif

/* a b + c, fused where the processor has an instruction for it. ISO C forbids the compiler to fuse
 * the expression by itself, and fma() without the instruction is a slow call. */
VECTOR_MATH_F32 float multiply_add_f32(float a, float b, float c) {
#if defined(FP_FAST_FMAF) || defined(__CUDA_ARCH__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline double multiply_add_f64(double a, double b, double c) {
#ifdef FP_FAST_FMA
    return fma(a, b, c);
#else
    return a * b + c;
#endif
}

VECTOR_MATH_F32 float exp_f32(float x) {
    x = x < -104.0f ? -104.0f : x; /* exp(-104) is under half the smallest subnormal: 0 */
    x = x > 89.0f ? 89.0f : x;     /* exp(89) is over the largest float: inf */

    /* Adding 1.5·2²³ leaves the integer nearest to x / ln 2 in the low bits of the sum. */
    const float shift = 0x1.8p23f;
    float shifted = multiply_add_f32(x, 0x1.715476p+0f, shift);
    float n = shifted - shift;
    float r = multiply_add_f32(n, -0x1.62e4p-1f, x);
    r = multiply_add_f32(n, -0x1.7f7d1cp-20f, r);

    /* r⁸/8! < 6e-9, a tenth of an ulp. */
    float p = 1.0f / 5040.0f;
    p = multiply_add_f32(p, r, 1.0f / 720.0f);
    p = multiply_add_f32(p, r, 1.0f / 120.0f);
    p = multiply_add_f32(p, r, 1.0f / 24.0f);
    p = multiply_add_f32(p, r, 1.0f / 6.0f);
    p = multiply_add_f32(p, r, 0.5f);
    p = multiply_add_f32(p, r, 1.0f);
    p = multiply_add_f32(p, r, 1.0f);

    /* The biased exponents of the two factors of 2ⁿ sum to n + 2·127. */
    uint32_t bits, first_bits, second_bits;
    memcpy(&bits, &shifted, sizeof bits);
    uint32_t both = bits - (0x4b400000u - 254u);
    uint32_t half = both >> 1;
    first_bits = half << 23;
    second_bits = (both - half) << 23;
    float first, second;
    memcpy(&first, &first_bits, sizeof first);
    memcpy(&second, &second_bits, sizeof second);
    return p * first * second;
}

static inline double exp_f64(double x) {
    x = x < -746.0 ? -746.0 : x; /* the same bounds for double */
    x = x > 710.0 ? 710.0 : x;

    const double shift = 0x1.8p52;
    double shifted = multiply_add_f64(x, 0x1.71547652b82fep+0, shift);
    double n = shifted - shift;
    double r = multiply_add_f64(n, -0x1.62e42feep-1, x);
    r = multiply_add_f64(n, -0x1.a39ef35793c76p-33, r);

    /* r¹⁴/14! < 5e-18. */
    double p = 1.0 / 6227020800.0;
    p = multiply_add_f64(p, r, 1.0 / 479001600.0);
    p = multiply_add_f64(p, r, 1.0 / 39916800.0);
    p = multiply_add_f64(p, r, 1.0 / 3628800.0);
    p = multiply_add_f64(p, r, 1.0 / 362880.0);
    p = multiply_add_f64(p, r, 1.0 / 40320.0);
    p = multiply_add_f64(p, r, 1.0 / 5040.0);
    p = multiply_add_f64(p, r, 1.0 / 720.0);
    p = multiply_add_f64(p, r, 1.0 / 120.0);
    p = multiply_add_f64(p, r, 1.0 / 24.0);
    p = multiply_add_f64(p, r, 1.0 / 6.0);
    p = multiply_add_f64(p, r, 0.5);
    p = multiply_add_f64(p, r, 1.0);
    p = multiply_add_f64(p, r, 1.0);

    uint64_t bits, first_bits, second_bits;
    memcpy(&bits, &shifted, sizeof bits);
    uint64_t both = bits - (0x4338000000000000u - 2046u);
    uint64_t half = both >> 1;
    first_bits = half << 52;
    second_bits = (both - half) << 52;
    double first, second;
    memcpy(&first, &first_bits, sizeof first);
    memcpy(&second, &second_bits, sizeof second);
    return p * first * second;
}

/* The same on real, in a source that is compiled for each type. */
#if defined(REAL_F64)
#define real_exp exp_f64
#define real_multiply_add multiply_add_f64
#elif defined(REAL_F32)
#define real_exp exp_f32
#define real_multiply_add multiply_add_f32
#endif

#endif
