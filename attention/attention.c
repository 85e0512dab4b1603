/* The interface of attention.h: names, views, what makes a problem valid, which family runs it. */
#include "attention/attention.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "attention/family.h"
#include "runtime/error.h"

#define HEAD_SIZE_MAX 256

/* Queries, keys and heads are counters of 32 bits in the dropout draw and indices of 31 in BLAS. */
#define LENGTH_MAX ((size_t)INT32_MAX)

/* More than any machine holds, and small enough that the bytes of no workspace wrap: up to some
 * 2^16 a row of queries, and 2^4 a score. */
#define ROWS_MAX ((size_t)1 << 40)
#define SCORES_MAX ((size_t)1 << 56)

/* --- families --- */

typedef struct {
    AttentionFamily family;
    DeviceType device;
    DataType type;
    int (*supported)(const Attention *problem); /* NULL: every valid problem */
    AttentionWorkspace *forward_workspace, *backward_workspace;
    AttentionForward *forward;
    AttentionBackward *backward;
} Kernels;

#define KERNELS(family, device, type, supported, name, suffix)                                  \
    {                                                                                           \
        family, device, type, supported, name##_forward_workspace##suffix,                      \
            name##_backward_workspace##suffix, name##_forward##suffix, name##_backward##suffix, \
    }

/* For each device and type the fastest comes first: AUTO takes the first that takes the problem. */
static const Kernels kernels[] = {
    KERNELS(ATTENTION_FLASH_V1, DEVICE_CPU, TYPE_F32, NULL, flash_v1, _cpu_f32),
    KERNELS(ATTENTION_FLASH_V1, DEVICE_CPU, TYPE_F64, NULL, flash_v1, _cpu_f64),
    KERNELS(ATTENTION_NAIVE, DEVICE_CPU, TYPE_F32, NULL, naive, _cpu_f32),
    KERNELS(ATTENTION_NAIVE, DEVICE_CPU, TYPE_F64, NULL, naive, _cpu_f64),
#ifdef TILEGPT_CUDA
    KERNELS(ATTENTION_FLASH_HOPPER, DEVICE_CUDA, TYPE_BF16, flash_hopper_supported, flash_hopper, ),
    KERNELS(ATTENTION_FLASH_MMA, DEVICE_CUDA, TYPE_BF16, flash_mma_supported, flash_mma, ),
    KERNELS(ATTENTION_FLASH_V1, DEVICE_CUDA, TYPE_F32, NULL, flash_v1, _cuda_f32),
    KERNELS(ATTENTION_FLASH_V1, DEVICE_CUDA, TYPE_BF16, NULL, flash_v1, _cuda_bf16),
    KERNELS(ATTENTION_NAIVE, DEVICE_CUDA, TYPE_F32, NULL, naive, _cuda_f32),
    KERNELS(ATTENTION_NAIVE, DEVICE_CUDA, TYPE_BF16, NULL, naive, _cuda_bf16),
#endif
};

static const char *const names[ATTENTION_FAMILIES] = {
    [ATTENTION_AUTO] = "auto",
    [ATTENTION_NAIVE] = "naive",
    [ATTENTION_FLASH_V1] = "flash_v1",
    [ATTENTION_FLASH_MMA] = "flash_mma",
    [ATTENTION_FLASH_HOPPER] = "flash_hopper",
};

const char *attention_name(AttentionFamily family) {
    return (unsigned)family < ATTENTION_FAMILIES ? names[family] : "unknown";
}

AttentionFamily attention_by_name(const char *name) {
    int family = 0;
    while (family < ATTENTION_FAMILIES && strcmp(name, names[family]) != 0) family++;
    return (AttentionFamily)family;
}

static const char *device_word(DeviceType device) {
    return device == DEVICE_CPU ? "the CPU" : "CUDA";
}

/* The kernels that run a valid problem; NULL with error_message(). */
static const Kernels *find_kernels(const Attention *p) {
    bool any_type = false, any_family = false;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        const Kernels *k = &kernels[i];
        if (k->device != p->device || k->type != p->type) continue;
        any_type = true;
        if (p->family != ATTENTION_AUTO && p->family != k->family) continue;
        any_family = true;
        if (!k->supported || k->supported(p)) return k;
    }
#ifndef TILEGPT_CUDA
    if (p->device == DEVICE_CUDA) {
        error_set(
            "attention: this program was built without CUDA; use the CPU, or build with CUDA=1");
        return NULL;
    }
#endif
    if (!any_type)
        error_set("attention: %s has no kernels for %s tensors; it takes %s",
                  device_word(p->device), type_name(p->type),
                  p->device == DEVICE_CPU ? "fp32 and fp64" : "fp32 and bf16");
    else if (!any_family)
        error_set("attention: %s does not run on %s in %s; use auto, naive or flash_v1",
                  attention_name(p->family), device_word(p->device), type_name(p->type));
    else
        error_set("attention: %s needs %s in a build for it; use auto, naive or flash_v1",
                  attention_name(p->family),
                  p->family == ATTENTION_FLASH_HOPPER
                      ? "a Hopper GPU (sm_90) and a head size that is a multiple of 8, at most 128,"
                      : "a GPU from sm_80 on");
    return NULL;
}

/* --- what makes a problem valid --- */

/* *complete = the problem with its defaults filled in. False with error_message() if it is not
 * valid. */
static bool complete_problem(const Attention *problem, Attention *complete) {
    if (!problem) return error_set("attention: the problem is NULL");
    Attention p = *problem;
    if (p.NKV == 0) p.NKV = p.NH;
    if (p.scale == 0 && p.HS > 0) p.scale = 1.0f / sqrtf((float)p.HS);
    *complete = p;

    if (p.device != DEVICE_CPU && p.device != DEVICE_CUDA)
        return error_set("attention: device %d is neither DEVICE_CPU nor DEVICE_CUDA",
                         (int)p.device);
    if (type_bytes(p.type) == 0)
        return error_set("attention: there is no type %d; see DataType", (int)p.type);
    if ((unsigned)p.family >= ATTENTION_FAMILIES)
        return error_set("attention: there is no family %d; see attention_by_name", (int)p.family);
    if (p.mask != ATTENTION_FULL && p.mask != ATTENTION_CAUSAL)
        return error_set("attention: mask %d is neither ATTENTION_FULL nor ATTENTION_CAUSAL",
                         (int)p.mask);
    if (p.B == 0 || p.NH == 0 || p.TQ == 0 || p.TK == 0 || p.HS == 0)
        return error_set("attention: B=%zu NH=%zu TQ=%zu TK=%zu HS=%zu: each must be at least 1",
                         p.B, p.NH, p.TQ, p.TK, p.HS);
    if (p.HS > HEAD_SIZE_MAX)
        return error_set("attention: HS=%zu, but a head is at most %d wide; use more heads", p.HS,
                         HEAD_SIZE_MAX);
    if (p.TQ > LENGTH_MAX || p.TK > LENGTH_MAX || p.NH > LENGTH_MAX || p.B > LENGTH_MAX / p.NH)
        return error_set(
            "attention: B=%zu NH=%zu TQ=%zu TK=%zu: TQ, TK and B·NH must be below 2^31", p.B, p.NH,
            p.TQ, p.TK);
    const size_t rows = p.B * p.NH * p.TQ;
    if (rows > ROWS_MAX)
        return error_set("attention: B=%zu NH=%zu TQ=%zu: B·NH·TQ must be at most 2^40", p.B, p.NH,
                         p.TQ);
    if (p.family == ATTENTION_NAIVE && rows > SCORES_MAX / p.TK)
        return error_set(
            "attention: B=%zu NH=%zu TQ=%zu TK=%zu: naive stores every score, at most 2^56; use "
            "flash_v1 or auto",
            p.B, p.NH, p.TQ, p.TK);
    if (p.NKV > p.NH || p.NH % p.NKV != 0)
        return error_set(
            "attention: NKV=%zu does not divide NH=%zu; equally many query heads share "
            "each key/value head",
            p.NKV, p.NH);
    if (!(p.scale > 0 && p.scale < INFINITY))
        return error_set(
            "attention: the scale is %g; it must be positive and finite, or 0 for "
            "1/sqrt(HS)",
            (double)p.scale);
    if (!(p.dropout.probability >= 0 && p.dropout.probability < 1))
        return error_set("attention: the dropout probability is %g; it must be in [0, 1)",
                         (double)p.dropout.probability);
    if (dropout_threshold(p.dropout.probability) > 255)
        return error_set(
            "attention: the dropout probability %g, rounded to 1/256, drops everything; "
            "255/256 is the largest",
            (double)p.dropout.probability);
    return true;
}

typedef enum { VIEW_READ, VIEW_WRITTEN } ViewUse;

/* From the smallest stride to the largest, each must step over all that the smaller ones span.
 * Doubles, here and in check_view, are exact wherever there is memory, and do not wrap elsewhere. */
static bool check_distinct(const char *name, AttentionView view, size_t B, size_t T, size_t heads,
                           size_t HS) {
    typedef struct {
        const char *name;
        size_t stride, count;
    } Axis;
    Axis axes[3] = {{"token", view.token, T}, {"head", view.head, heads}, {"batch", view.batch, B}};
    for (int i = 1; i < 3; i++)
        for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
            Axis larger = axes[j - 1];
            axes[j - 1] = axes[j];
            axes[j] = larger;
        }
    double span = (double)HS;
    for (int i = 0; i < 3; i++) {
        if (axes[i].count == 1) continue;
        if ((double)axes[i].stride < span)
            return error_set(
                "attention: %s is written, so its elements must not overlap: its %s stride is %zu, "
                "but HS=%zu and the smaller strides span %.0f",
                name, axes[i].name, axes[i].stride, HS, span);
        span += (double)(axes[i].count - 1) * (double)axes[i].stride;
    }
    return true;
}

/* A head's rows must not overlap, which BLAS needs of inputs too; elements that are written must
 * all be distinct. An offset beyond PTRDIFF_MAX would wrap. */
static bool check_view(const char *name, AttentionView view, ViewUse use, const Attention *p,
                       size_t T, size_t heads) {
    if (!view.data) return error_set("attention: %s is NULL", name);
    const double last = (double)(p->B - 1) * (double)view.batch +
                        (double)(T - 1) * (double)view.token +
                        (double)(heads - 1) * (double)view.head;
    if ((last + (double)p->HS) * (double)type_bytes(p->type) >= (double)PTRDIFF_MAX)
        return error_set(
            "attention: the strides of %s span %.3g elements, more than memory can hold", name,
            last);
    if (T > 1 && (view.token < p->HS || view.token > LENGTH_MAX))
        return error_set(
            "attention: the token stride of %s is %zu elements; it must be at least "
            "HS=%zu and below 2^31",
            name, view.token, p->HS);
    return use == VIEW_READ || check_distinct(name, view, p->B, T, heads, p->HS);
}

static bool check_tensors(const Attention *p, const AttentionTensors *x, ViewUse outputs) {
    if (!x) return error_set("attention: the tensors are NULL");
    if (!x->lse) return error_set("attention: lse is NULL; it holds B·NH·TQ numbers");
    return check_view("q", x->q, VIEW_READ, p, p->TQ, p->NH) &&
           check_view("k", x->k, VIEW_READ, p, p->TK, p->NKV) &&
           check_view("v", x->v, VIEW_READ, p, p->TK, p->NKV) &&
           check_view("o", x->o, outputs, p, p->TQ, p->NH);
}

static bool check_gradients(const Attention *p, const AttentionGradients *g) {
    if (!g) return error_set("attention: the gradients are NULL");
    return check_view("dout", g->dout, VIEW_READ, p, p->TQ, p->NH) &&
           check_view("dq", g->dq, VIEW_WRITTEN, p, p->TQ, p->NH) &&
           check_view("dk", g->dk, VIEW_WRITTEN, p, p->TK, p->NKV) &&
           check_view("dv", g->dv, VIEW_WRITTEN, p, p->TK, p->NKV);
}

static bool check_workspace(const void *workspace, size_t bytes, const char *size_query) {
    if (bytes > 0 && !workspace)
        return error_set("attention: the workspace is NULL, but %zu bytes are needed; see %s",
                         bytes, size_query);
    if ((uintptr_t)workspace % 256 != 0)
        return error_set(
            "attention: the workspace is not aligned to 256 bytes; device_alloc aligns");
    return true;
}

/* --- the interface --- */

AttentionView attention_packed_view(void *qkv, DataType type, int which, size_t T, size_t NH,
                                    size_t HS) {
    char *data = (char *)qkv + (size_t)which * NH * HS * type_bytes(type);
    return (AttentionView){
        .data = data, .batch = T * 3 * NH * HS, .token = 3 * NH * HS, .head = HS};
}

AttentionView attention_view(void *data, size_t T, size_t NH, size_t HS) {
    return (AttentionView){.data = data, .batch = T * NH * HS, .token = NH * HS, .head = HS};
}

/* Checks the problem, fills in its defaults and finds its kernels; NULL with error_message(). */
static const Kernels *choose(const Attention *problem, Attention *complete) {
    return complete_problem(problem, complete) ? find_kernels(complete) : NULL;
}

AttentionFamily attention_choose(const Attention *problem) {
    Attention p;
    const Kernels *k = choose(problem, &p);
    return k ? k->family : ATTENTION_AUTO;
}

size_t attention_forward_workspace(const Attention *problem) {
    Attention p;
    const Kernels *k = choose(problem, &p);
    return k ? k->forward_workspace(&p) : 0;
}

size_t attention_backward_workspace(const Attention *problem) {
    Attention p;
    const Kernels *k = choose(problem, &p);
    return k ? k->backward_workspace(&p) : 0;
}

const char *attention_forward(const Attention *problem, const AttentionTensors *tensors,
                              void *workspace, void *stream) {
    Attention p;
    const Kernels *k = choose(problem, &p);
    if (!k || !check_tensors(&p, tensors, VIEW_WRITTEN) ||
        !check_workspace(workspace, k->forward_workspace(&p), "attention_forward_workspace"))
        return error_message();
    k->forward(&p, tensors, workspace, stream);
    return NULL;
}

const char *attention_backward(const Attention *problem, const AttentionTensors *tensors,
                               const AttentionGradients *gradients, void *workspace, void *stream) {
    Attention p;
    const Kernels *k = choose(problem, &p);
    if (!k || !check_tensors(&p, tensors, VIEW_READ) || !check_gradients(&p, gradients) ||
        !check_workspace(workspace, k->backward_workspace(&p), "attention_backward_workspace"))
        return error_message();
    k->backward(&p, tensors, gradients, workspace, stream);
    return NULL;
}
