/* Scaled dot-product attention, forward and backward, with O(T) memory.
 *
 *   S = scale · Q Kᵀ + mask,  P = softmax(S) by rows,  O = dropout(P) V,  LSE = log Σ exp(S)
 *
 * The one interface to every kernel family; callable from C, and from anything that can call C.
 * Q, K, V and their gradients are read and written in place through strides, so packed
 * (B,T,3,NH,HS) activations, (B,NH,T,HS) tensors and others need no permute.
 *
 *   naive        materialises S and P in its workspace: the baseline    any device and type
 *   flash_v1     Dao et al. 2022, queries outside: running (m, ℓ, O)    any device and type
 *   flash_mma    bf16 tensor cores through mma.sync (Dao 2023)          CUDA, bf16, sm_80 and newer
 *   flash_hopper bf16 tensor cores through wgmma (Shah et al. 2024)     CUDA, bf16, sm_90, and HS a
 *                                                                       multiple of 8 up to 128
 *
 * The papers are arXiv 2205.14135 (2022), 2307.08691 (2023) and 2407.08608 (2024). flash_v1 keeps
 * the arithmetic of the first, O normalised at every tile, but swaps the loops of its forward:
 * queries outside and keys inside, so that m, ℓ and O never return to memory between tiles.
 *
 * Every family computes the same function, the dropout mask (runtime/random.h) included. Only O and
 * LSE are saved for the backward, which recomputes P. */
#ifndef ATTENTION_ATTENTION_H
#define ATTENTION_ATTENTION_H

#include <stddef.h>

#include "runtime/device.h"
#include "runtime/random.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ATTENTION_AUTO, /* the fastest that takes the problem, see attention_choose */
    ATTENTION_NAIVE,
    ATTENTION_FLASH_V1,
    ATTENTION_FLASH_MMA,
    ATTENTION_FLASH_HOPPER,
    ATTENTION_FAMILIES
} AttentionFamily;

typedef enum { ATTENTION_FULL, ATTENTION_CAUSAL } AttentionMask;

/* The problem. Zero-initialise it, then set what is needed: everything but B, NH, TQ, TK and HS has
 * a usable zero. */
typedef struct {
    DeviceType device; /* DEVICE_CPU or DEVICE_CUDA */
    DataType type;     /* of all tensors but LSE. CPU: F32, F64. CUDA: F32, BF16 */
    size_t B;          /* batch */
    size_t NH;         /* query heads */
    /* Key/value heads, a divisor of NH; 0 means NH. Query head h reads key/value head
     * h / (NH / NKV). */
    size_t NKV;
    size_t TQ, TK; /* queries and keys per sequence, >= 1 */
    size_t HS;     /* head size, 1 … 256 */
    /* Causal is aligned at the bottom right: query i sees keys j <= i + TK - TQ. A query that sees
     * none has O = 0, LSE = -inf and no gradient. */
    AttentionMask mask;
    float scale; /* 0 means 1/sqrt(HS) */
    Dropout dropout;
    /* Nonzero: equal inputs give equal bits in the backward too. flash_mma and flash_hopper have
     * another way for 0, which takes up to 28% less time. */
    int deterministic;
    AttentionFamily family;
} Attention;

/* Element (b,t,h,i) is data[b*batch + t*token + h*head + i]. Strides in elements; the HS elements
 * of a head are contiguous. Any alignment that the type allows is correct; data and strides that
 * are multiples of 16 bytes are fast. What is written must nest: each stride is at least what HS
 * and the smaller strides span. */
typedef struct {
    void *data;
    size_t batch, token, head;
} AttentionView;

typedef struct {
    AttentionView q; /* (B,TQ,NH,HS) */
    AttentionView k; /* (B,TK,NKV,HS) */
    AttentionView v; /* (B,TK,NKV,HS) */
    AttentionView o; /* (B,TQ,NH,HS): written by the forward, read by the backward */
    void *lse;       /* (B,NH,TQ) contiguous; float, or double when type is F64 */
} AttentionTensors;

typedef struct {
    AttentionView dout; /* (B,TQ,NH,HS): gradient of o, read */
    AttentionView dq;   /* (B,TQ,NH,HS): written */
    AttentionView dk;   /* (B,TK,NKV,HS): written */
    AttentionView dv;   /* (B,TK,NKV,HS): written */
} AttentionGradients;

/* Views of one (B,T,3,NH,HS) tensor: which = 0, 1, 2 for q, k, v. */
AttentionView attention_packed_view(void *qkv, DataType type, int which, size_t T, size_t NH,
                                    size_t HS);
/* View of a (B,T,NH,HS) tensor. */
AttentionView attention_view(void *data, size_t T, size_t NH, size_t HS);

/* The family that will run: problem->family if it takes the problem, or the choice for AUTO.
 * ATTENTION_AUTO if none can, with the reason in error_message(). */
AttentionFamily attention_choose(const Attention *problem);

/* "auto", "naive", "flash_v1", "flash_mma", "flash_hopper" */
const char *attention_name(AttentionFamily family);
/* The family of that name; ATTENTION_FAMILIES if there is none. */
AttentionFamily attention_by_name(const char *name);

/* Bytes of device memory that a forward, and a backward, may overwrite; 0 is possible. */
size_t attention_forward_workspace(const Attention *problem);
size_t attention_backward_workspace(const Attention *problem);

/* Runs on `stream` (cudaStream_t; ignored on the CPU) without waiting for it. workspace holds
 * attention_forward_workspace (or _backward_) bytes, 256-byte aligned, and may be NULL when that is
 * 0. No output may alias an input, except that dq, dk, dv may be interleaved in one packed tensor.
 * NULL on success, else a sentence that says what is wrong with the problem; then nothing was
 * written. */
const char *attention_forward(const Attention *problem, const AttentionTensors *tensors,
                              void *workspace, void *stream);
const char *attention_backward(const Attention *problem, const AttentionTensors *tensors,
                               const AttentionGradients *gradients, void *workspace, void *stream);

#ifdef __cplusplus
}
#endif
#endif
