/* Copies between global and shared memory by the copy engine of sm_90a (PTX ISA, "cp.async.bulk"),
 * started by one thread; and the fences between them and ordinary accesses. */
#ifndef ATTENTION_BULK_COPY_CUH
#define ATTENTION_BULK_COPY_CUH

#include <cuda.h>

#include "attention/warp_roles.cuh"

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

/* The map's box at (column, row, head, batch) into shared memory; its bytes, of which those outside
 * the tensor are zeros, count at the barrier. */
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap *map, Barrier barrier,
                                         int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(target),
                 "l"(map), "r"(barrier.address), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

/* `bytes` (a multiple of 16) from global to shared memory, both aligned to 16. */
__device__ __forceinline__ void copy_bytes(uint32_t target, const void *source, uint32_t bytes,
                                           Barrier barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];\n" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier.address)
                 : "memory");
}

/* Shared memory to the map's box; what lies outside the tensor is dropped. */
__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t source, int column,
                                          int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], "
                 "[%1];\n" ::"l"(map),
                 "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void store_commit() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

/* This thread's committed stores have read their shared memory. */
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

/* They are complete: what they wrote is seen by this thread. */
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

/* `bytes` (a multiple of 16) from shared to global memory, both aligned to 16. */
__device__ __forceinline__ void store_bytes(void *target, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(target),
                 "r"(source), "r"(bytes)
                 : "memory");
}

/* `bytes` of floats (a multiple of 16) in shared memory are added to those at target, which is
 * aligned to 16; committed and waited for like a store. */
__device__ __forceinline__ void add_bytes(float *target, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                 "[%0], [%1], %2;\n" ::"l"(target),
                 "r"(source), "r"(bytes)
                 : "memory");
}

/* Shared memory written by ordinary stores before this is seen by wgmma and the copy engine. */
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

/* Global memory read or written by ordinary accesses before this, and by bulk copies after it. */
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

#endif
