/* The kernels that some work launches, with what each takes of a multiprocessor. The work is
 * captured into a CUDA graph instead of run, and the graph's nodes are asked: so this holds for any
 * family without its help. Kernels of other libraries (cuBLASLt) are listed without figures. */
#ifndef DEV_ATTENTION_LAUNCHES_H
#define DEV_ATTENTION_LAUNCHES_H

#ifdef TILEGPT_CUDA
#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

typedef struct {
    char name[64]; /* without namespace and arguments */
    bool known;    /* the figures below, except the grid's and the block's, are set */
    unsigned blocks, blocks_y, threads;
    size_t static_shared, dynamic_shared; /* bytes of a block */
    size_t local;                         /* bytes of a thread: spilled registers, indexed arrays */
    int registers;                        /* of a thread */
    int resident;                         /* blocks of one multiprocessor at a time */
} Launch;

/* Of the C++ library, which programs with CUDA are linked to. */
extern char *__cxa_demangle(const char *mangled, char *buffer, size_t *bytes, int *status);

/* Of "void (anonymous namespace)::forward_kernel<64, false>(FlashMma, …)" the part from the last
 * name to the arguments. */
static inline void launches_name(char *name, size_t bytes, const void *function) {
    const char *mangled = "kernel";
#if CUDART_VERSION >= 12030
    if (cudaFuncGetName(&mangled, function) != cudaSuccess) {
        cudaGetLastError();
        mangled = "kernel";
    }
#else
    (void)function;
#endif
    const char *const hidden = "(anonymous namespace)::";
    int status, depth = 0; /* of template brackets */
    size_t n = 0;
    char *text = __cxa_demangle(mangled, NULL, NULL, &status);
    for (const char *c = text ? text : mangled; *c && n + 1 < bytes; c++) {
        if (strncmp(c, hidden, strlen(hidden)) == 0) {
            c += strlen(hidden) - 1;
            continue;
        }
        if (depth == 0 && *c == '(') break;
        if (depth == 0 && (*c == ' ' || *c == ':')) { /* it was a type or a namespace */
            n = 0;
            continue;
        }
        depth += (*c == '<') - (*c == '>');
        name[n++] = *c;
    }
    name[n] = '\0';
    free(text);
}

static inline void launches_describe(Launch *launch, cudaGraphNode_t node) {
    struct cudaKernelNodeParams parameters;
    struct cudaFuncAttributes attributes;
    memset(launch, 0, sizeof *launch);
    snprintf(launch->name, sizeof launch->name, "another library's");
    if (cudaGraphKernelNodeGetParams(node, &parameters) != cudaSuccess) {
        cudaGetLastError();
        return;
    }
    launch->blocks = parameters.gridDim.x;
    launch->blocks_y = parameters.gridDim.y * parameters.gridDim.z;
    launch->threads = parameters.blockDim.x * parameters.blockDim.y * parameters.blockDim.z;
    launch->dynamic_shared = parameters.sharedMemBytes;
    if (cudaFuncGetAttributes(&attributes, parameters.func) != cudaSuccess) {
        cudaGetLastError();
        return;
    }
    launch->known = true;
    launches_name(launch->name, sizeof launch->name, parameters.func);
    launch->static_shared = attributes.sharedSizeBytes;
    launch->local = attributes.localSizeBytes;
    launch->registers = attributes.numRegs;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&launch->resident, parameters.func,
                                                      (int)launch->threads,
                                                      parameters.sharedMemBytes) != cudaSuccess)
        cudaGetLastError();
}

/* Captures work(argument, stream), which returns NULL or a complaint. The number of kernels, of
 * which at most `most` are described; 0 if the work complained, or launches nothing. */
static inline size_t launches_of(const char *(*work)(void *argument, void *stream), void *argument,
                                 Launch *launches, size_t most) {
    cudaStream_t stream;
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamCreate(&stream));
    /* Relaxed: a library that allocates when first called may do so. */
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    const char *wrong = work(argument, stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0, kernels = 0;
    CUDA_CHECK(cudaGraphGetNodes(graph, NULL, &nodes));
    cudaGraphNode_t *list = malloc((nodes ? nodes : 1) * sizeof *list);
    if (!list) error_fatal(__FILE__, __LINE__, "not enough host memory");
    if (nodes) CUDA_CHECK(cudaGraphGetNodes(graph, list, &nodes));
    for (size_t i = 0; i < nodes && !wrong; i++) {
        enum cudaGraphNodeType type;
        CUDA_CHECK(cudaGraphNodeGetType(list[i], &type));
        if (type != cudaGraphNodeTypeKernel) continue;
        if (kernels < most) launches_describe(&launches[kernels], list[i]);
        kernels++;
    }
    free(list);
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return kernels;
}
#endif

#endif
