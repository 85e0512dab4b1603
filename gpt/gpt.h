/* GPT-2 as Hugging Face defines it: learned positions, pre-layernorm blocks, tanh GELU, biases, and a
 * head that is the token embedding (Radford et al. 2019) or a matrix of its own.
 *
 * The training loop:
 *
 *   gpt_zero_gradients(model);
 *   gpt_forward(model, tokens, targets, B, T, GPT_TRAIN);     loss
 *   gpt_backward(model);                                      gradients, summed over ranks if any
 *   gpt_update(model, adamw);                                 parameters
 *   printf("%f\n", gpt_loss(model));                          waits for the device
 */
#ifndef GPT_GPT_H
#define GPT_GPT_H

#include <stdio.h>

#include "attention/attention.h"
#include "layers/layers.h"
#include "runtime/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t L;            /* layers */
    size_t NH;           /* heads */
    size_t C;            /* width, a multiple of NH */
    size_t T;            /* longest sequence (Hugging Face's n_positions) */
    size_t V;            /* vocabulary */
    float layernorm_eps; /* 1e-5 in GPT-2 */
    float embedding_dropout, residual_dropout, attention_dropout;
    bool untied_head; /* lm_head.weight (V,C) is a parameter; otherwise it is wte.weight */
} GptConfig;

/* What the backward keeps from the forward, from fastest to smallest. */
typedef enum {
    RECOMPUTE_NONE,  /* keep every activation it needs: 16 C a token and layer */
    RECOMPUTE_GELU,  /* redo GELU: 12 C */
    RECOMPUTE_BLOCK, /* keep the blocks' inputs only and redo each block: C */
    RECOMPUTE_KINDS
} GptRecompute;
const char *gpt_recompute_name(GptRecompute recompute); /* "none", "gelu", "block" */

typedef enum { GPT_INFERENCE, GPT_TRAINING } GptUse;

typedef struct {
    size_t B, T;   /* largest batch of a call; T at most the configuration's */
    DataType type; /* F32 (CPU, CUDA), BF16 (CUDA), F64 (CPU) */
    GptUse use;    /* inference has no gradients and no optimizer */
    AttentionFamily attention;
    GptRecompute recompute;
    bool deterministic;
} GptOptions;

/* One parameter tensor. Names are Hugging Face's GPT-2 names without "transformer.". Everything that
 * walks the parameters walks this table. */
typedef struct {
    char name[64];
    int rank;             /* 1 or 2 */
    size_t shape[2];      /* of the real tensor: (V,C) for wte, not (Vp,C) */
    size_t elements;      /* shape multiplied out */
    size_t offset;        /* in elements from the start of each arena; a multiple of ADAMW_CHUNK */
    float init_deviation; /* of a normal; 0 with init_constant */
    float init_constant;
    bool decay; /* weight decay applies (matrices) */
} GptTensor;

/* What a model will allocate, one line an arena; all of it, except the device context itself. */
typedef struct {
    size_t parameters, gradients, optimizer, activations, scratch; /* bytes */
    size_t
        attention; /* part of activations and scratch that attention alone needs: lse, workspace */
    size_t total;
} GptPlan;

typedef struct Gpt Gpt;

/* The configuration of that name ("gpt2-124M", …, "shakespeare", …); false with error_message() listing
 * the names. V of the character presets is set by the text. */
bool gpt_preset(const char *name, GptConfig *config);
/* False with error_message() when no such model exists (C not a multiple of NH, V = 0, HS > 256 …). */
bool gpt_config_check(const GptConfig *config);
size_t gpt_parameters(const GptConfig *config);        /* number of trained values */
size_t gpt_padded_vocabulary(const GptConfig *config); /* Vp */

/* The plan without allocating. False with error_message() for invalid input. */
bool gpt_plan(const GptConfig *config, const GptOptions *options, const Device *device,
              GptPlan *plan);
void gpt_plan_print(const GptPlan *plan, FILE *file);

/* NULL with error_message(); out of memory gives the plan as a table, what is free, and the largest B
 * that would fit. Parameters are uninitialised: call gpt_init or load a checkpoint. comm may be NULL. */
Gpt *gpt_create(const GptConfig *config, const GptOptions *options, Device *device, Comm *comm);
void gpt_free(Gpt *model);

/* GPT-2's initialisation: normals of deviation 0.02, residual projections 0.02/sqrt(2L), biases 0,
 * layernorm weights 1. Also zeroes the optimizer. */
void gpt_init(Gpt *model, uint64_t seed);

const GptConfig *gpt_config(const Gpt *model);
const GptOptions *gpt_options(const Gpt *model);
const GptPlan *gpt_planned(const Gpt *model);
AttentionFamily gpt_attention(const Gpt *model); /* the family that runs */
Device *gpt_device(const Gpt *model);

size_t gpt_tensors(const Gpt *model);
const GptTensor *gpt_tensor(const Gpt *model, size_t i);

/* The four arenas, tensor by tensor, to and from host floats (master weights are the parameters). */
typedef enum { GPT_PARAMETERS, GPT_GRADIENTS, GPT_ADAM_M, GPT_ADAM_V } GptArena;
void gpt_read(const Gpt *model, GptArena arena, const GptTensor *tensor, float *values);
void gpt_write(Gpt *model, GptArena arena, const GptTensor *tensor, const float *values);
/* The same in double for F64 models, whose values do not fit a float. */
void gpt_read_double(const Gpt *model, GptArena arena, const GptTensor *tensor, double *values);
void gpt_write_double(Gpt *model, GptArena arena, const GptTensor *tensor, const double *values);

typedef enum { GPT_EVALUATE, GPT_TRAIN } GptMode;

void gpt_zero_gradients(Gpt *model);
/* tokens and targets are host arrays (B,T); targets may be NULL (no loss) and a negative target is
 * ignored. In GPT_TRAIN dropout applies and the head's gradients are computed here, chunk by chunk
 * with the loss, so that the logits never exist whole. gradient_scale multiplies the gradient of the
 * mean loss (1 / (accumulation steps · ranks)) and dropout_key selects the masks: see
 * gpt_set_training. */
void gpt_forward(Gpt *model, const int32_t *tokens, const int32_t *targets, size_t B, size_t T,
                 GptMode mode);
/* Gradients += those of the last gpt_forward in GPT_TRAIN. */
void gpt_backward(Gpt *model);

/* For the forwards that follow: the scale of their gradients, the key of their dropout masks, and
 * whether their backward is the last of the step, whose gradients are summed over the ranks. The
 * defaults are 1/ranks, 0 and true. */
void gpt_set_training(Gpt *model, float gradient_scale, uint64_t dropout_key, bool last);

/* The global norm of the gradients, on the device, and one AdamW step. */
void gpt_update(Gpt *model, AdamW adamw);

/* Mean loss of the forwards since gpt_zero_gradients (or since the last gpt_forward in GPT_EVALUATE),
 * averaged over ranks after a training step; and the gradient norm before clipping. Both wait. */
double gpt_loss(Gpt *model);
double gpt_gradient_norm(Gpt *model);
/* The loss of each row of the last gpt_forward with targets, to the host (B,T); 0 where the target was
 * negative. Waits. */
void gpt_losses(Gpt *model, double *losses);

/* Logits of rows [row, row + n) of the last gpt_forward, row = b*T + t, as floats (n,V), to the host. */
void gpt_logits(Gpt *model, size_t row, size_t n, float *logits);

/* Floating-point operations of one token's forward and backward at this T: 6 per matmul weight, the
 * head included, plus attention's 4·T·C forward and twice that backward, halved for causality. */
double gpt_flops_per_token(const GptConfig *config, size_t T);

#ifdef __cplusplus
}
#endif
#endif
