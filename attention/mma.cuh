/* The instructions of the sm_80 tensor-core path (PTX ISA, "Warp-level matrix instructions" and
 * "Asynchronous copy"), one function each.
 *
 * Lane l of a warp holds of a 16×8 accumulator (m16n8k16) the elements e = 2i + c, i, c in {0,1}:
 * row l/4 + 8i, column 2(l%4) + c. A packed pair has the lower column in the low half. exp2_approx
 * is ex2.approx.ftz: 2 ulp, exp2(-inf) = 0. */
#ifndef ATTENTION_MMA_CUH
#define ATTENTION_MMA_CUH

#include <stdint.h>

/* x, in a way that the compiler does not see through: what a loop computes from it is computed
 * there each time, where it would else be kept in registers that the matrix products need. */
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ uint32_t shared_address(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* Copies the first `bytes` (0 … 16) of 16 aligned bytes and fills the rest with zeros; with 0,
 * global memory is not touched. */
__device__ __forceinline__ void copy_async_16(uint32_t target, const void *source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
                 "r"(bytes)
                 : "memory");
}

/* Waits for this thread's own copies; a barrier must follow before others read them. */
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t target, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(target), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t target, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(target), "r"(x) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t source) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(source)
                 : "memory");
    return x;
}

__device__ __forceinline__ float2 load_shared_float2(uint32_t source) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(source)
                 : "memory");
    return x;
}

/* Four 8×8 matrices; lane l gives the address of row l%8 of matrix l/8. */
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t source) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(source)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t source) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(source)
                 : "memory");
}

/* acc (16×8) += A (16×16) · B (16×8), bf16 factors, float sums. */
__device__ __forceinline__ void mma_16x8x16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/* A row of an accumulator lies in four neighbouring lanes. */
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

#endif
