/* Rung 11: the production file itself (through attention/attention.h).
 *
 * The change: everything that the rungs left out, dropout, shared key/value heads, unequal lengths,
 * any head size, strides; and the family that attention_choose takes for this GPU, which on Hopper
 * is attention/flash_hopper_forward.cu.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 555 (81%), HS=64 453 (67%). */
#include "dev/attention/production.cuh"

namespace {

size_t workspace(const Problem &p) {
    const Attention problem = production_problem(p);
    return attention_forward_workspace(&problem);
}

void run(const Problem &p, cudaStream_t stream) {
    const Attention problem = production_problem(p);
    const AttentionTensors tensors = production_tensors(p);
    if (attention_forward(&problem, &tensors, p.workspace, stream))
        error_fatal(__FILE__, __LINE__, "%s", error_message());
}

} // namespace

const Rung forward_11 = {"11_production", NEEDS_NOTHING, workspace, NULL, run};
