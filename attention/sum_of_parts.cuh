/* A chunk of a sum in global memory to which several blocks bring a part each, by bulk copies: the
 * first part is stored and the others are added, so that memory need not be zero before.
 *
 * A counter in global memory, `parts`, starts at 0. In turns it counts the parts that are complete,
 * and the n-th waits until it is n. Else whoever claims a chunk first makes it 1, and 2 when its part
 * is complete, for which the others wait. It claims when it has its part, so that it waits for no
 * one any more. */
#ifndef ATTENTION_SUM_OF_PARTS_CUH
#define ATTENTION_SUM_OF_PARTS_CUH

#include "attention/bulk_copy.cuh"

/* A count in global memory. */
__device__ __forceinline__ unsigned load_acquire(const unsigned *count) {
    unsigned now;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(count) : "memory");
    return now;
}
/* Until it is `value`: then what was complete before it was counted is seen by this thread's bulk
 * copies. */
__device__ __forceinline__ void wait_until(const unsigned *count, unsigned value) {
    while (load_acquire(count) != value)
        ;
    fence_async_global();
}

enum { CLAIMED = 1, BEGUN = 2 };

__device__ __forceinline__ bool has_begun(const unsigned *parts) {
    const bool begun = load_acquire(parts) == BEGUN;
    fence_async_global();
    return begun;
}
/* True if this part is the first; else the first is complete. */
__device__ __forceinline__ bool claim(unsigned *parts) {
    if (atomicCAS(parts, 0, CLAIMED) == 0)
        return true;
    wait_until(parts, BEGUN);
    return false;
}
/* Waits until this thread's part is complete, and counts it. */
__device__ __forceinline__ void count_part(unsigned *parts) {
    store_wait();
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;\n" ::"l"(parts) : "memory");
}

#endif
