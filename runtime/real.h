/* The arithmetic types of a layer source that is compiled more than once.
 *
 *                      real (tensors)    acc (sums, statistics, gradients of parameters)
 *   C,    REAL_F32     float             float
 *   C,    REAL_F64     double            double        gradient checks
 *   CUDA, REAL_F32     float             float         checking
 *   CUDA, REAL_BF16    __nv_bfloat16     float
 *
 * LAYER(gelu_forward) is the name that the copy being compiled gives to its function:
 * gelu_forward_cpu_f32, _cpu_f64, _cuda_f32 or _cuda_bf16. LAYER_TWINS declares all four, so that
 * one prototype, with its comment, speaks for every twin. */
#ifndef RUNTIME_REAL_H
#define RUNTIME_REAL_H

#define LAYER_TWINS(prototype, name) \
    extern prototype name##_cpu_f32, name##_cpu_f64, name##_cuda_f32, name##_cuda_bf16

#if defined(__CUDACC__)
#if defined(REAL_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 real;
#define LAYER(name) name##_cuda_bf16
#elif defined(REAL_F32)
typedef float real;
#define LAYER(name) name##_cuda_f32
#endif
typedef float acc;
#else
#if defined(REAL_F64)
typedef double real, acc;
#define LAYER(name) name##_cpu_f64
#elif defined(REAL_F32)
typedef float real, acc;
#define LAYER(name) name##_cpu_f32
#endif
#endif

#endif
