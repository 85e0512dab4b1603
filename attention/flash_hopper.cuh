/* flash_hopper: what its forward and backward share. Tiles, roles and pipelines for Hopper
 * (sm_90a), after FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).
 *
 * A block has one producer warpgroup, of which one thread in the forward and one of each warp in
 * the backward start the bulk copies, and consumer warpgroups, which own 64 rows each of the
 * block's tile and share the streamed tiles of the other side. Blocks stay for the whole launch,
 * one on each multiprocessor: the producer takes the next item of work from a counter and hands
 * its number to the consumers, so that the loads of an item run under the end of the one before.
 *
 * HS is padded to D = 64 or 128 by the copy engine, which reads zeros outside the tensors and
 * drops what is stored there. */
#ifndef ATTENTION_FLASH_HOPPER_CUH
#define ATTENTION_FLASH_HOPPER_CUH

#include "attention/bulk_copy.cuh"
#include "attention/flash_problem.cuh"
#include "attention/warp_roles.cuh"
#include "attention/wgmma.cuh"

/* A program's code for other GPUs has empty kernels; flash_hopper_supported never lets them run. */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HOPPER_KERNELS_EXIST = false;
#else
constexpr bool HOPPER_KERNELS_EXIST = true;
#endif

/* One lane arrives for its warp. racecheck does not follow that: it reports the warp's reads
 * against the next copy to the same place. In a debug build all arrive, and it finds nothing to
 * report. */
#ifdef ALL_LANES_ARRIVE
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

/* A ring of STAGES tiles between the producer and the consumers. `full` ends a phase when a tile's
 * bytes have come, `empty` when the consumers no longer read it. Both sides count uses from 0. */
template <int STAGES>
struct Ring {
    uint32_t barriers; /* shared address of 2·STAGES mbarriers */

    static constexpr uint32_t BYTES = 16 * STAGES;
    __device__ __forceinline__ Barrier full(unsigned use) const {
        return {barriers + 8 * (use % STAGES)};
    }
    __device__ __forceinline__ Barrier empty(unsigned use) const {
        return {barriers + 8 * (STAGES + use % STAGES)};
    }
    __device__ __forceinline__ void init(int full_count, int empty_count) const {
        for (int i = 0; i < STAGES; i++) {
            full(i).init(full_count);
            empty(i).init(empty_count);
        }
    }
    /* Producer: the place of this use is free. The first STAGES waits pass at once. */
    __device__ __forceinline__ void wait_empty(unsigned use) const {
        empty(use).wait(use / STAGES + 1);
    }
    /* Consumer: it is filled. */
    __device__ __forceinline__ void wait_full(unsigned use) const {
        full(use).wait(use / STAGES);
    }
    /* Consumer, after its last read of it: each warp arrives WARP_ARRIVALS times. */
    __device__ __forceinline__ void release(unsigned use) const {
        __syncwarp();
        if (threadIdx.x % 32 < WARP_ARRIVALS)
            empty(use).arrive();
    }
};

/* Items of work, from a counter in global memory that starts at 0; each block starts with the item
 * of its own index, or where items wait for their turns, from the counter too. One thread publishes
 * them, and each of the `takers` takes all. */
struct Items {
    Ring<2> ring;
    uint32_t numbers; /* shared address of two */

    static constexpr uint32_t BYTES = Ring<2>::BYTES + 8;

    __device__ __forceinline__ void init(int takers) const { ring.init(1, takers); }
    __device__ __forceinline__ void publish(unsigned use, unsigned item) const {
        ring.wait_empty(use);
        store_shared_4(numbers + 4 * (use % 2), item);
        ring.full(use).arrive();
    }
    __device__ __forceinline__ unsigned take(unsigned use) const {
        unsigned item;
        ring.wait_full(use);
        asm volatile("ld.shared.b32 %0, [%1];\n"
                     : "=r"(item)
                     : "r"(numbers + 4 * (use % 2))
                     : "memory");
        ring.empty(use).arrive();
        return item;
    }
};

/* Rows row … row+ROWS-1 of a head into a tile, one box for each block of columns; its bytes are
 * counted whole. The map's box is {64, ROWS, 1, 1}. */
template <class Tile>
__device__ __forceinline__ void copy_tile(Tile tile, const CUtensorMap *map, Barrier barrier,
                                          int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < Tile::COLUMNS / 64; c++)
        copy_box(tile.base + c * Tile::BLOCK_BYTES, map, barrier, 64 * c, row, head, batch);
}

/* The tile to those rows; again a map of its own rows. */
template <class Tile>
__device__ __forceinline__ void store_tile(Tile tile, const CUtensorMap *map, int row, int head,
                                           int batch) {
#pragma unroll
    for (int c = 0; c < Tile::COLUMNS / 64; c++)
        store_box(map, tile.base + c * Tile::BLOCK_BYTES, 64 * c, row, head, batch);
    store_commit();
}

/* The map of a (B,T,heads,HS) view whose rows are aligned to 16 bytes, for boxes of `rows` rows
 * and 64 columns. */
CUtensorMap flash_hopper_map(AttentionView view, size_t B, size_t T, size_t heads, size_t HS,
                             unsigned rows);

/* The same of the problem's queries (also O, dO, dQ), and of its keys (V, dK, dV). */
inline CUtensorMap query_map(const FlashProblem &p, AttentionView view, unsigned rows) {
    return flash_hopper_map(view, p.B, p.TQ, p.NH, p.HS, rows);
}
inline CUtensorMap key_map(const FlashProblem &p, AttentionView view, unsigned rows) {
    return flash_hopper_map(view, p.B, p.mask.TK, p.NKV, p.HS, rows);
}

/* HS padded to the width of a tile. */
inline int tile_width(size_t HS) { return HS <= 64 ? 64 : 128; }

/* Calls `run.template with<D, DROPOUT>()` with D that width. */
template <class Run>
inline void dispatch(size_t HS, bool dropout, const Run &run) {
    if (tile_width(HS) == 64)
        return dropout ? run.template with<64, true>() : run.template with<64, false>();
    return dropout ? run.template with<128, true>() : run.template with<128, false>();
}

/* Under the last kernel: see allow_next_kernel. */
template <class... Parameters, class... Arguments>
inline void launch_under(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                         size_t shared_bytes, cudaStream_t stream, const Arguments &...arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = blocks;
    launch.blockDim = threads;
    launch.dynamicSmemBytes = shared_bytes;
    launch.stream = stream;
    launch.attrs = &attribute, launch.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, arguments...));
}

/* So many blocks of a persistent kernel as there is work for, at most one on each multiprocessor;
 * under the last kernel. */
template <class Tiles, class Call>
inline void launch_persistent(void (*kernel)(const Call), const Call &call, cudaStream_t stream) {
    int device, multiprocessors;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)Tiles::SHARED_BYTES));
    launch_under(kernel, min(call.items, (unsigned)multiprocessors), Tiles::THREADS,
                 Tiles::SHARED_BYTES, stream, call);
}

#endif
