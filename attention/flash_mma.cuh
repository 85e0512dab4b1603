/* flash_mma: what its forward and backward share. FlashAttention-2 (Dao 2023, arXiv 2307.08691) in
 * bf16 with float sums, on mma.sync: any GPU from sm_80.
 *
 * Every block keeps one tile of rows (queries in the forward and in dQ, keys in dK/dV), whose warps
 * own 16·M of them each, or two together, and streams the other side through shared memory, which
 * cp.async fills under the products before. HS is padded to D in shared memory by zero columns. Of
 * every tile there is a form within the 99 KiB that the smallest of these GPUs grants a block. */
#ifndef ATTENTION_FLASH_MMA_CUH
#define ATTENTION_FLASH_MMA_CUH

#include "attention/flash_problem.cuh"
#include "attention/mma_tile.cuh"

enum {
    WARPS = 4, /* of a block, if its tiles say nothing else */
    THREADS = 32 * WARPS,
    MAX_SHARED_BYTES = 99 << 10 /* of a block */
};

/* A program built for older GPUs too keeps empty kernels there, which flash_mma_supported never
 * lets run: they have no bf16 tensor cores and no cp.async. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool KERNELS_EXIST = false;
#else
constexpr bool KERNELS_EXIST = true;
#endif

/* Rows row0 … row0+ROWS-1 of head h of batch b, of T rows, into a tile: see load_tile. */
template <int ROWS, int THREADS_ = THREADS, int D>
__device__ __forceinline__ void load_rows(Tile<D> tile, const FlashProblem &p,
                                          const AttentionView &view, int b, int h, int row0,
                                          int T) {
    load_tile<ROWS, THREADS_>(tile, head_rows(view, b, h), view.token, row0, T, p.HS, p.aligned);
}

/* With so many bytes of dynamic shared memory for each block. */
template <int THREADS_ = THREADS, class... Arguments>
inline void launch(void (*kernel)(const FlashProblem, Arguments...), dim3 grid, size_t shared_bytes,
                   cudaStream_t stream, const FlashProblem &p, Arguments... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared_bytes));
    kernel<<<grid, THREADS_, shared_bytes, stream>>>(p, arguments...);
    CUDA_CHECK(cudaGetLastError());
}

/* Calls `run.template with<D, DROPOUT>()` with D the narrowest tile for HS. */
template <class Run>
inline void dispatch(size_t HS, bool dropout, Run run) {
#define FLASH_MMA_WIDTH(D)                                                       \
    if (HS <= D)                                                                 \
        return dropout ? run.template with<D, true>() : run.template with<D, false>()
    FLASH_MMA_WIDTH(32);
    FLASH_MMA_WIDTH(64);
    FLASH_MMA_WIDTH(96);
    FLASH_MMA_WIDTH(128);
    FLASH_MMA_WIDTH(256);
#undef FLASH_MMA_WIDTH
}

#endif
