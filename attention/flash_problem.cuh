/* The problem as the tensor-core kernels (flash_mma, flash_hopper) see it, and what both do around
 * their tiles: which tile of which head is worked on when, and the statistics of the backward. */
#ifndef ATTENTION_FLASH_PROBLEM_CUH
#define ATTENTION_FLASH_PROBLEM_CUH

#include <limits.h>

#include "attention/family.h"
#include "attention/mma_mask.cuh"
#include "runtime/error.h"

typedef uint16_t bf16; /* moved and converted as bits only */

constexpr float LOG2E = 1.44269504f;

enum {
    ROW_PADDING = 128,          /* the backward's statistics fill whole tiles of queries */
    MAX_LENGTH = 1 << 30,       /* of a sequence: a position plus a diagonal is an int */
    SECTION_BYTES = 16 << 20    /* a share of the L2 (50 MiB on an H200, 40 on an A100) */
};

/* The problem as the kernels see it; passed by value. */
struct FlashProblem {
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

/* Rows of head h of batch b. */
__device__ __forceinline__ bf16 *head_rows(const AttentionView &view, int b, int h) {
    return (bf16 *)view.data + b * view.batch + h * view.head;
}

/* Keys that any query before `end` sees: the first so many. */
__device__ __forceinline__ int keys_seen(const FlashProblem &p, int end) {
    return min(p.mask.TK, max(0, min(p.TQ, end) + p.mask.diagonal));
}

/* The next kernel, if it was launched to run under this one, may begin once all blocks have called
 * this and there is room (PTX ISA, "griddepcontrol"). On GPUs before sm_90 it begins afterwards. */
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
/* There, before memory is touched: until the last kernel has ended and what it wrote is seen. */
__device__ __forceinline__ void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/* Which tile of which head is the item-th to be worked on. Heads are taken in sections whose
 * streamed tensors (K and V, or Q and dO) stay in the L2 together; within a section all first tiles
 * come first, so that where the mask makes tiles unequal the longest start first and the short ones
 * fill the end. */
struct Place {
    int tile; /* 0: the heaviest under a causal mask, by the kernel's count */
    int b, h;
};

__device__ __forceinline__ Place find_place(unsigned item, unsigned tiles, unsigned B,
                                            unsigned heads, unsigned section) {
    const unsigned start = item / (tiles * section) * section;
    const unsigned within = item - start * tiles;
    const unsigned width = min(section, B * heads - start);
    const unsigned bh = start + within % width;
    return {(int)(within / width), (int)(bh / heads), (int)(bh % heads)};
}

inline size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/* Heads whose two streamed tensors of T rows fit a section. */
inline unsigned heads_that_fit(const FlashProblem *p, size_t T, int heads) {
    const size_t fit = SECTION_BYTES / (4 * T * p->HS), all = (size_t)p->B * heads;
    return (unsigned)(fit < 1 ? 1 : fit < all ? fit : all);
}

/* Heads in a section. Under a full mask all tiles are equal: head by head then, so that tiles that
 * run together read the same rows. */
inline unsigned heads_per_section(const FlashProblem *p, size_t T, int heads) {
    return p->mask.diagonal == MAX_LENGTH ? 1 : heads_that_fit(p, T, heads);
}

/* Whether every row starts at a multiple of 16 bytes; an axis of one element has any stride. */
inline bool view_aligned(const AttentionView &view, size_t B, size_t T, size_t heads) {
    const size_t strides = (B > 1 ? view.batch : 0) | (T > 1 ? view.token : 0) |
                           (heads > 1 ? view.head : 0);
    return ((size_t)view.data | 2 * strides) % 16 == 0;
}
inline bool queries_aligned(const FlashProblem &p, const AttentionView &view) {
    return view_aligned(view, p.B, p.TQ, p.NH);
}
inline bool keys_aligned(const FlashProblem &p, const AttentionView &view) {
    return view_aligned(view, p.B, p.mask.TK, p.NKV);
}

inline FlashProblem describe(const Attention *problem, const AttentionTensors *tensors) {
    FlashProblem p = {};
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
    p.aligned = queries_aligned(p, p.q) && keys_aligned(p, p.k) && keys_aligned(p, p.v) &&
                queries_aligned(p, p.o);
    return p;
}

inline FlashProblem describe(const Attention *problem, const AttentionTensors *tensors,
                             const AttentionGradients *gradients) {
    FlashProblem p = describe(problem, tensors);
    p.dout = gradients->dout, p.dq = gradients->dq, p.dk = gradients->dk, p.dv = gradients->dv;
    p.aligned = p.aligned && queries_aligned(p, p.dout) && queries_aligned(p, p.dq) &&
                keys_aligned(p, p.dk) && keys_aligned(p, p.dv);
    return p;
}

/* p.lse2 and p.delta, from O, dO and LSE. What a family adds to afterwards becomes 0 on the way:
 * zeros, if not NULL, of (B·NH·rows, columns) floats, columns a multiple of 32, and `count`
 * counters. */
void flash_statistics(const FlashProblem &p, float *zeros, int columns, unsigned *counters,
                      size_t count, cudaStream_t stream);

#endif
