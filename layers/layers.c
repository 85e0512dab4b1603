/* The tables of layer functions, one for each device and type that was built. */
#include "layers/layers.h"

#include "runtime/error.h"

#define LAYERS_TABLE(device_, type_, suffix)                                                    \
    {                                                                                           \
        .device = device_, .type = type_, .embedding_forward = embedding_forward_##suffix,      \
        .embedding_backward = embedding_backward_##suffix,                                      \
        .layernorm_forward = layernorm_forward_##suffix,                                        \
        .residual_layernorm_forward = residual_layernorm_forward_##suffix,                      \
        .layernorm_backward = layernorm_backward_##suffix,                                      \
        .linear_forward = linear_forward_##suffix, .linear_backward = linear_backward_##suffix, \
        .gelu_forward = gelu_forward_##suffix, .gelu_backward = gelu_backward_##suffix,         \
        .dropout_forward = dropout_forward_##suffix,                                            \
        .cross_entropy_forward = cross_entropy_forward_##suffix,                                \
        .cross_entropy_backward = cross_entropy_backward_##suffix,                              \
        .adamw_update = adamw_update_##suffix, .sum_forward = sum_forward_##suffix,             \
        .grad_norm = grad_norm_##suffix, .embedding_step = embedding_step_##suffix,             \
        .gemv_forward = gemv_forward_##suffix, .gemv_head = gemv_head_##suffix,                 \
        .cache_store = cache_store_##suffix,                                                    \
        .cached_attention_forward = cached_attention_forward_##suffix,                          \
        .cached_attention_workspace = cached_attention_workspace_##suffix,                      \
        .sample_forward = sample_forward_##suffix,                                              \
    }

static const Layers tables[] = {
    LAYERS_TABLE(DEVICE_CPU, TYPE_F32, cpu_f32),
    LAYERS_TABLE(DEVICE_CPU, TYPE_F64, cpu_f64),
#ifdef TILEGPT_CUDA
    LAYERS_TABLE(DEVICE_CUDA, TYPE_F32, cuda_f32),
    LAYERS_TABLE(DEVICE_CUDA, TYPE_BF16, cuda_bf16),
#endif
};

const Layers *layers_get(DeviceType device, DataType type) {
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (tables[i].device == device && tables[i].type == type) return &tables[i];
    error_set("there are no layers for %s tensors on %s%s", type_name(type),
              device == DEVICE_CPU ? "the CPU" : "CUDA",
              device == DEVICE_CPU ? "; the CPU computes in fp32" : "");
    return NULL;
}

/* CPU: none. CUDA: cuBLASLt's workspace and partial sums of fixed size, and the sorted token positions
 * of the embedding's backward. */
size_t layers_scratch_bytes(DeviceType device, size_t N) {
    return device == DEVICE_CUDA ? ((size_t)64 << 20) + 32 * N : 0;
}

/* CPU: the normalised rows with their statistics, and each thread's sums. */
size_t layers_gemv_scratch_bytes(const Device *device, DataType type, size_t N, size_t IC,
                                 size_t OC) {
    size_t elements = N * (IC + 2) + (size_t)device->processors * N * OC;
    return device->type == DEVICE_CPU ? elements * type_bytes(type) : 0;
}
