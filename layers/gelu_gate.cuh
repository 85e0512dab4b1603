/* (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)) =: s for u = sqrt(2/π) (x + 0.044715 x³), so that
 * gelu(x) = x s. This form keeps its relative accuracy where 1 + tanh(u) cancels, and costs two
 * special-function instructions.
 *
 * They are the approximate ones, __expf and __fdividef: gelu is within 5e-6 relative for |x| <= 5
 * (the rounding of __expf's argument, which grows with it), well inside what fp32 is used to check.
 * tanh.approx would be off by 5e-4, visible even in bf16. */
#ifndef LAYERS_GELU_GATE_CUH
#define LAYERS_GELU_GATE_CUH

static __device__ __forceinline__ float gelu_gate(float x) {
    const float minus_2u = -1.5957691216057308f * x * (1.0f + 0.044715f * x * x);
    return __fdividef(1.0f, 1.0f + __expf(minus_2u));
}

#endif
