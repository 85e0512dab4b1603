/* What a kernel family gives to attention.c: private to attention/.
 *
 * attention.c has checked the problem and filled in its defaults (NKV, scale) before it calls
 * these, so a family sees a complete and valid Attention. */
#ifndef ATTENTION_FAMILY_H
#define ATTENTION_FAMILY_H

#include "attention/attention.h"
#include "runtime/real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef size_t AttentionWorkspace(const Attention *problem);
typedef void AttentionForward(const Attention *problem, const AttentionTensors *tensors,
                              void *workspace, void *stream);
typedef void AttentionBackward(const Attention *problem, const AttentionTensors *tensors,
                               const AttentionGradients *gradients, void *workspace, void *stream);

LAYER_TWINS(AttentionWorkspace, naive_forward_workspace);
LAYER_TWINS(AttentionWorkspace, naive_backward_workspace);
LAYER_TWINS(AttentionForward, naive_forward);
LAYER_TWINS(AttentionBackward, naive_backward);

LAYER_TWINS(AttentionWorkspace, flash_v1_forward_workspace);
LAYER_TWINS(AttentionWorkspace, flash_v1_backward_workspace);
LAYER_TWINS(AttentionForward, flash_v1_forward);
LAYER_TWINS(AttentionBackward, flash_v1_backward);

/* bf16 only, on a GPU that flash_mma_supported accepts (nonzero). */
extern int flash_mma_supported(const Attention *problem);
extern AttentionWorkspace flash_mma_forward_workspace, flash_mma_backward_workspace;
extern AttentionForward flash_mma_forward;
extern AttentionBackward flash_mma_backward;

/* The same on a GPU that flash_hopper_supported accepts. */
extern int flash_hopper_supported(const Attention *problem);
extern AttentionWorkspace flash_hopper_forward_workspace, flash_hopper_backward_workspace;
extern AttentionForward flash_hopper_forward;
extern AttentionBackward flash_hopper_backward;

#ifdef __cplusplus
}
#endif
#endif
