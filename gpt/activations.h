/* Where every activation of a model lies: private to gpt/. */
#ifndef GPT_ACTIVATIONS_H
#define GPT_ACTIVATIONS_H

#include "gpt/gpt.h"

/* One tensor for each layer, or, where nothing needs to outlive its layer, one for all (stride 0). */
typedef struct {
    char *base;
    size_t stride; /* bytes */
} PerLayer;

static inline void *at(PerLayer tensor, size_t l) { return tensor.base + l * tensor.stride; }

/* N = B·T rows. (N,C) means real unless it says acc. */
typedef struct {
    int32_t *tokens, *targets; /* (N) */
    PerLayer x;    /* (N,C) the residual stream where block l begins; x[L] enters ln_f */
    PerLayer ln_1; /* (N,C) */
    PerLayer ln_1_mean, ln_1_rstd; /* (N) acc */
    PerLayer qkv;                  /* (N,3C), seen by attention as (B,T,3,NH,HS) */
    PerLayer att;                  /* (N,C) attention's output, heads side by side */
    PerLayer lse;                  /* (B,NH,T) acc */
    PerLayer mid;                  /* (N,C) the residual stream between attention and MLP */
    PerLayer ln_2;                 /* (N,C) */
    PerLayer ln_2_mean, ln_2_rstd; /* (N) acc */
    PerLayer fc;                   /* (N,4C) before GELU */
    PerLayer gelu;                 /* (N,4C) */
    char *branch; /* (N,C) what a block adds to the residual stream, before dropout */
    char *ln_f;   /* (N,C) */
    char *ln_f_mean, *ln_f_rstd; /* (N) acc */
    char *logits;                /* (chunk,Vp): the head works on `chunk` rows at a time */
    char *losses;                /* (N) acc */
    char *eval_loss, *norm;      /* (1) acc */
    /* The backward's, shared by all layers. */
    char *dx;      /* (N,C) gradient of the residual stream */
    char *dnorm;   /* (N,C) gradient of a layernorm's output */
    char *dbranch; /* (N,C) gradient of branch, where dropout makes it differ from dx */
    char *datt;    /* (N,C) */
    char *dwide;   /* (N,4C) gradient of fc, then of qkv */
    size_t chunk;
} Activations;

/* Lays the tensors out from base (NULL to measure only); returns the bytes in all. *lse_bytes
 * receives attention's own share. */
size_t gpt_activations(Activations *activations, const GptConfig *config, const GptOptions *options,
                       char *base, size_t *lse_bytes);

#endif
