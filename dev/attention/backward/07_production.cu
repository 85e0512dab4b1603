/* Rung 7: the production file itself (through attention/attention.h).
 *
 * The change: everything that the rungs left out, dropout, shared key/value heads, unequal lengths,
 * a deterministic order; and the family that attention_choose takes for this GPU, which on Hopper
 * is attention/flash_hopper_backward.cu.
 *
 * Measured (NVIDIA H200, T=4096, causal, TFLOP/s): HS=128 510 (75%), HS=64 429 (63%). */
#include "dev/attention/production.cuh"

namespace {

size_t workspace(const Problem &p) {
    const Attention problem = production_problem(p);
    return attention_backward_workspace(&problem);
}

void run(const Problem &p, cudaStream_t stream) {
    const Attention problem = production_problem(p);
    const AttentionTensors tensors = production_tensors(p);
    const AttentionGradients gradients = {production_view(p, p.dout), production_view(p, p.dq),
                                          production_view(p, p.dk), production_view(p, p.dv)};
    if (attention_backward(&problem, &tensors, &gradients, p.workspace, stream))
        error_fatal(__FILE__, __LINE__, "%s", error_message());
}

} // namespace

const Rung backward_07 = {"07_production", NEEDS_NOTHING, workspace, NULL, run};
