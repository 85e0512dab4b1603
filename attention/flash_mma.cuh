/* flash_mma: what its forward and backward share. FlashAttention-2 (Dao 2023, arXiv 2307.08691) in
 * bf16 with float sums, on mma.sync: any GPU from sm_80.
 *
 * Every kernel has blocks of 4 warps. A block keeps one tile of rows (queries in the forward and in
 * dQ, keys in dK/dV), of which each warp owns 16·M, and streams the other side through two stages
 * of shared memory: while a stage is multiplied, cp.async fills the next, with one barrier a tile.
 * HS is padded to D in shared memory by zero columns. No tile needs more than the 99 KiB that the
 * smallest of these GPUs grants a block. */
#ifndef ATTENTION_FLASH_MMA_CUH
#define ATTENTION_FLASH_MMA_CUH

#include <limits.h>

#include "attention/family.h"
#include "attention/mma_mask.cuh"
#include "attention/mma_tile.cuh"
#include "runtime/error.h"

constexpr float LOG2E = 1.44269504f;

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    MAX_SHARED_BYTES = 99 << 10, /* of a block */
    ROW_PADDING = 128,           /* the backward's statistics fill whole tiles of queries */
    MAX_LENGTH = 1 << 30,        /* of a sequence: a position plus a diagonal is an int */
    SECTION_BYTES = 16 << 20     /* a share of the L2 (50 MiB on an H200, 40 on an A100) */
};

/* The problem as the kernels see it; passed by value. */
struct FlashMma {
    AttentionView q, k, v, o;       /* as in AttentionTensors */
    float *lse;                     /* (B,NH,TQ) */
    AttentionView dout, dq, dk, dv; /* as in AttentionGradients; to delta: backward only */
    float *lse2;                    /* (B,NH,rows) LSE · log2 e; +inf if there is no key or row */
    float *delta;                   /* (B,NH,rows) D = Σ dO∘O; 0 if there is no row */
    int B, NH, NKV, TQ, HS;
    int rows;  /* TQ rounded up to ROW_PADDING */
    Mask mask; /* holds TK */
    DropoutRule dropout;
    float scale, scale_log2; /* the second times log2 e */
    bool aligned;            /* every row of every tensor starts at a multiple of 16 bytes */
};

/* A program built for older GPUs too keeps empty kernels there, which flash_mma_supported never
 * lets run: they have no bf16 tensor cores and no cp.async. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool KERNELS_EXIST = false;
#else
constexpr bool KERNELS_EXIST = true;
#endif

/* Rows of head h of batch b. */
__device__ __forceinline__ bf16 *head_rows(const AttentionView &view, int b, int h) {
    return (bf16 *)view.data + b * view.batch + h * view.head;
}

/* Rows row0 … row0+ROWS-1 of head h of batch b, of T rows, into a tile: see load_tile. */
template <int ROWS, int D>
__device__ __forceinline__ void load_rows(Tile<D> tile, const FlashMma &p,
                                          const AttentionView &view, int b, int h, int row0,
                                          int T) {
    load_tile<ROWS, THREADS>(tile, head_rows(view, b, h), view.token, row0, T, p.HS, p.aligned);
}

/* Keys that any query before `end` sees: the first so many. */
__device__ __forceinline__ int keys_seen(const FlashMma &p, int end) {
    return min(p.mask.TK, max(0, min(p.TQ, end) + p.mask.diagonal));
}

/* Which tile of which head a block works on. Heads are taken in sections whose streamed tensors
 * (K and V, or Q and dO) stay in the L2 together; within a section all first tiles come first, so
 * that where the mask makes tiles unequal the longest start first and the short ones fill the
 * end. */
struct Place {
    int tile; /* 0: the heaviest under a causal mask, by the kernel's count */
    int b, h;
};

__device__ __forceinline__ Place find_place(unsigned tiles, unsigned B, unsigned heads,
                                            unsigned section) {
    const unsigned start = blockIdx.x / (tiles * section) * section;
    const unsigned within = blockIdx.x - start * tiles;
    const unsigned width = min(section, B * heads - start);
    const unsigned bh = start + within % width;
    return {(int)(within / width), (int)(bh / heads), (int)(bh % heads)};
}

inline size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/* Heads in a section, when each streams two tensors of T rows. */
inline unsigned heads_per_section(const FlashMma *p, size_t T, int heads) {
    const size_t fit = SECTION_BYTES / (4 * T * p->HS), all = (size_t)p->B * heads;
    return (unsigned)(fit < 1 ? 1 : fit < all ? fit : all);
}

inline bool view_aligned(const AttentionView *view) {
    return ((size_t)view->data | 2 * view->batch | 2 * view->token | 2 * view->head) % 16 == 0;
}

inline FlashMma describe(const Attention *problem, const AttentionTensors *tensors) {
    FlashMma p = {};
    p.q = tensors->q, p.k = tensors->k, p.v = tensors->v, p.o = tensors->o;
    p.lse = (float *)tensors->lse;
    p.B = (int)problem->B, p.NH = (int)problem->NH, p.NKV = (int)problem->NKV;
    p.rows = (int)(divide_up(problem->TQ, ROW_PADDING) * ROW_PADDING);
    p.TQ = (int)problem->TQ, p.HS = (int)problem->HS;
    p.mask.TK = (int)problem->TK;
    p.mask.diagonal = problem->mask == ATTENTION_CAUSAL ? p.mask.TK - p.TQ : MAX_LENGTH;
    p.dropout.key = problem->dropout.key;
    p.dropout.threshold = dropout_threshold(problem->dropout.probability);
    p.dropout.scale = dropout_scale(problem->dropout.probability);
    p.scale = problem->scale, p.scale_log2 = problem->scale * LOG2E;
    p.aligned =
        view_aligned(&p.q) && view_aligned(&p.k) && view_aligned(&p.v) && view_aligned(&p.o);
    return p;
}

template <class... Arguments>
inline void launch(void (*kernel)(const FlashMma, Arguments...), dim3 grid, size_t shared_bytes,
                   cudaStream_t stream, const FlashMma &p, Arguments... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared_bytes));
    kernel<<<grid, THREADS, shared_bytes, stream>>>(p, arguments...);
    CUDA_CHECK(cudaGetLastError());
}

/* Calls `run.template with<D, DROPOUT>(…)` with HS padded to one of the tile widths. */
template <class Run>
inline void dispatch(const FlashMma &p, Run run) {
    const bool dropout = p.dropout.threshold > 0;
#define FLASH_MMA_WIDTH(D)                                                       \
    if (p.HS <= D)                                                               \
        return dropout ? run.template with<D, true>() : run.template with<D, false>()
    FLASH_MMA_WIDTH(32);
    FLASH_MMA_WIDTH(64);
    FLASH_MMA_WIDTH(96);
    FLASH_MMA_WIDTH(128);
    FLASH_MMA_WIDTH(256);
#undef FLASH_MMA_WIDTH
}

#endif
