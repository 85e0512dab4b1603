/* The table of layer functions of one device and one tensor type. The model is written once on it. */
#ifndef LAYERS_LAYERS_H
#define LAYERS_LAYERS_H

#include "layers/adamw.h"
#include "layers/cached_attention.h"
#include "layers/cross_entropy.h"
#include "layers/dropout.h"
#include "layers/embedding.h"
#include "layers/gelu.h"
#include "layers/gemv.h"
#include "layers/layernorm.h"
#include "layers/linear.h"
#include "layers/reduce.h"
#include "layers/sample.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    DeviceType device;
    DataType type; /* real; acc is type_accumulator(type) */
    EmbeddingForward *embedding_forward;
    EmbeddingBackward *embedding_backward;
    LayernormForward *layernorm_forward;
    ResidualLayernormForward *residual_layernorm_forward;
    LayernormBackward *layernorm_backward;
    LinearForward *linear_forward;
    LinearBackward *linear_backward;
    GeluForward *gelu_forward;
    GeluBackward *gelu_backward;
    DropoutForward *dropout_forward;
    CrossEntropyForward *cross_entropy_forward;
    CrossEntropyBackward *cross_entropy_backward;
    AdamwUpdate *adamw_update;
    SumForward *sum_forward;
    GradNorm *grad_norm;
    /* Generating text, one token of each sequence at a time. */
    EmbeddingStep *embedding_step;
    GemvForward *gemv_forward;
    GemvHead *gemv_head;
    CacheStore *cache_store;
    CachedAttentionForward *cached_attention_forward;
    CachedAttentionWorkspace *cached_attention_workspace;
    SampleForward *sample_forward;
} Layers;

/* CPU: fp32 and fp64. CUDA: fp32 and bf16. NULL with error_message() for another pair, or for CUDA in
 * a program built without it. */
const Layers *layers_get(DeviceType device, DataType type);

/* Scratch that the largest layer call needs with at most N rows, for device_reserve_scratch. */
size_t layers_scratch_bytes(DeviceType device, size_t N);

/* The scratch of gemv_forward, and of gemv_head with OC = 0. */
size_t layers_gemv_scratch_bytes(const Device *device, DataType type, size_t N, size_t IC,
                                 size_t OC);

#ifdef __cplusplus
}
#endif
#endif
