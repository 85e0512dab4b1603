/* The ladder: how attention gets from its definition to the speed of the chip, one change a rung.
 *
 *   S = scale · Q Kᵀ + mask,  P = softmax(S) by rows,  O = P V,  LSE = log Σ exp(S)
 *   D = rowsum(dO ∘ O),  dP = dO Vᵀ,  dS = scale · P ∘ (dP - D)
 *   dV = Pᵀ dO,  dK = dSᵀ Q,  dQ = dS K
 *
 * A rung is one file in forward/ or backward/, kernel and launcher. All solve the same Problem, so
 * that a rung differs from the one before in what its header says and in nothing else. To keep them
 * short, the rungs know neither dropout nor shared heads nor unequal lengths: the production files
 * in attention/, which are the last rungs, know them all. */
#ifndef DEV_ATTENTION_LADDER_CUH
#define DEV_ATTENTION_LADDER_CUH

#include <cuda_bf16.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/error.h"

typedef uint16_t bf16; /* moved as bits */

struct Problem {
    int B, T, NH, HS;       /* HS is 64 or 128, T any number from 1 */
    bool causal;            /* query i sees keys j <= i */
    float scale;            /* 1 / sqrt(HS) */
    float scale_log2;       /* times log2 e: exp(scale · x) = exp2(scale_log2 · x) */
    const bf16 *q, *k, *v;  /* (B,T,NH,HS), 256-byte aligned */
    bf16 *o;                /* (B,T,NH,HS): written by a forward, read by a backward */
    float *lse;             /* (B,NH,T): likewise */
    const bf16 *dout;       /* (B,T,NH,HS), backward only */
    bf16 *dq, *dk, *dv;     /* (B,T,NH,HS), backward only: written */
    void *workspace;        /* what the rung asked for, 256-byte aligned */

    /* Row t of head h of batch b starts at tensor + head(b, h) + t * stride(). */
    __host__ __device__ size_t stride() const { return (size_t)NH * HS; }
    __host__ __device__ size_t head(int b, int h) const { return ((size_t)b * T * NH + h) * HS; }
    /* Elements of Q, of LSE, of S. */
    size_t elements() const { return (size_t)B * T * NH * HS; }
    size_t rows() const { return (size_t)B * T * NH; }
    size_t scores() const { return (size_t)B * NH * T * T; }
};

/* What a rung's kernels need of the GPU. */
enum Needs { NEEDS_NOTHING, NEEDS_MMA /* sm_80 */, NEEDS_WGMMA /* sm_90a, and code for it */ };

struct Rung {
    const char *name; /* "04_tensor_cores" */
    Needs needs;
    size_t (*workspace)(const Problem &); /* bytes; NULL: none */
    /* NULL, or what is done before the clock starts. */
    void (*prepare)(const Problem &, cudaStream_t);
    void (*run)(const Problem &, cudaStream_t);
};

extern const Rung forward_01, forward_02, forward_03, forward_04, forward_05, forward_06,
    forward_07, forward_08, forward_09, forward_10, forward_11;
extern const Rung backward_01, backward_02, backward_03, backward_04, backward_05, backward_06,
    backward_07;

/* The launcher template as a Rung's function: launch<HS>(problem, stream). */
#define BY_HEAD_SIZE(launch)                              \
    [](const Problem &p, cudaStream_t stream) {           \
        p.HS == 64 ? launch<64>(p, stream) : launch<128>(p, stream); \
    }

/* Launches with dynamic shared memory above the 48 KiB that need no permission. */
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                   cudaStream_t stream, const Arguments &...arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared_bytes));
    kernel<<<grid, threads, shared_bytes, stream>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

/* A program built for older GPUs too keeps empty kernels there, which the ladder never starts. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool HAS_MMA = false;
#else
constexpr bool HAS_MMA = true;
#endif

/* Tiles of `rows` rows in T. */
__host__ __device__ inline int count_tiles(int T, int rows) { return (T + rows - 1) / rows; }

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((uint32_t)x << 16); }
__device__ __forceinline__ bf16 to_bf16(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

#endif
