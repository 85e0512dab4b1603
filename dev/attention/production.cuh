/* A Problem in the terms of attention/attention.h. */
#ifndef DEV_ATTENTION_PRODUCTION_CUH
#define DEV_ATTENTION_PRODUCTION_CUH

#include "attention/attention.h"
#include "dev/attention/ladder.cuh"

inline Attention production_problem(const Problem &p) {
    Attention problem = {};
    problem.device = DEVICE_CUDA, problem.type = TYPE_BF16;
    problem.B = p.B, problem.NH = p.NH, problem.TQ = problem.TK = p.T, problem.HS = p.HS;
    problem.mask = p.causal ? ATTENTION_CAUSAL : ATTENTION_FULL;
    return problem;
}

inline AttentionView production_view(const Problem &p, const bf16 *tensor) {
    return attention_view((void *)tensor, p.T, p.NH, p.HS);
}

inline AttentionTensors production_tensors(const Problem &p) {
    return {production_view(p, p.q), production_view(p, p.k), production_view(p, p.v),
            production_view(p, p.o), p.lse};
}

#endif
