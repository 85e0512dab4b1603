/* Small things that the kernels without tensor cores share: conversions between `real` and float,
 * addresses, grids. Everything has internal linkage, since each source is compiled once for every
 * `real`. */
#ifndef ATTENTION_SIMT_CUH
#define ATTENTION_SIMT_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "attention/attention.h"
#include "runtime/error.h"
#include "runtime/real.h"

static __device__ __forceinline__ float to_float(float x) { return x; }
template <class T> static __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }

/* value = neighbouring elements from a boundary of their total size on, 16 bytes at most. */
static __device__ __forceinline__ void load_some(float (&value)[2], const float *p) {
    const float2 loaded = *(const float2 *)p;
    value[0] = loaded.x, value[1] = loaded.y;
}

static __device__ __forceinline__ void load_some(float (&value)[4], const float *p) {
    const float4 loaded = *(const float4 *)p;
    value[0] = loaded.x, value[1] = loaded.y, value[2] = loaded.z, value[3] = loaded.w;
}

static __device__ __forceinline__ void load_some(float (&value)[8], const float *p) {
    const float4 low = *(const float4 *)p, high = *(const float4 *)(p + 4);
    value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
    value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
}

#ifdef REAL_BF16
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

static __device__ __forceinline__ void load_some(float (&value)[8], const __nv_bfloat16 *p) {
    const uint4 loaded = *(const uint4 *)p;
    const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 4; i++) { /* a bf16 is the high half of a float; the low one comes first */
        value[2 * i] = __uint_as_float(pairs[i] << 16);
        value[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}
#endif

/* The HS elements of token t of head h of batch b. */
static __host__ __device__ __forceinline__ real *head_row(const AttentionView &view, size_t b,
                                                          size_t t, size_t h) {
    return (real *)view.data + b * view.batch + t * view.token + h * view.head;
}

template <class T> static __host__ __device__ __forceinline__ T divide_up(T a, T b) {
    return a / b + (a % b != 0);
}

/* A grid's x, the one dimension that takes more than 65535 blocks. */
static inline unsigned grid_blocks(size_t blocks) {
    if (blocks > INT32_MAX)
        error_fatal(__FILE__, __LINE__, "attention: %zu blocks exceed a CUDA grid", blocks);
    return (unsigned)blocks;
}

/* After every launch. */
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())

#endif
