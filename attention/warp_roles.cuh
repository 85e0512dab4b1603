/* Warpgroups with different roles in one block of sm_90a: how they divide its registers, and wait
 * for each other (PTX ISA, "setmaxnreg", "mbarrier", "bar"). */
#ifndef ATTENTION_WARP_ROLES_CUH
#define ATTENTION_WARP_ROLES_CUH

#include <stdint.h>

/* All warps of a warpgroup give up, or wait for, registers; REGISTERS a thread remain. */
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

/* An mbarrier in shared memory. Phases count from 0; wait(phase) returns when that phase, by its
 * parity, has ended: a phase ends when `count` arrivals and all announced bytes have come. */
struct Barrier {
    uint32_t address;

    __device__ __forceinline__ void init(int count) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(address), "r"(count)
                     : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(address) : "memory");
    }
    __device__ __forceinline__ void arrive_expecting(uint32_t bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(address),
                     "r"(bytes)
                     : "memory");
    }
    __device__ __forceinline__ void wait(uint32_t phase) const {
        asm volatile("{\n.reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}\n" ::"r"(address),
                     "r"(phase & 1)
                     : "memory");
    }
};

/* After the inits, before the barrier that shows them to the block. */
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

/* Named barriers: `threads` in all, of which some wait and some only arrive. */
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

#endif
