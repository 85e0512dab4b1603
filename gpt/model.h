/* A model's insides: private to gpt/. */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include "gpt/activations.h"
#include "gpt/config.h"
#include "gpt/gpt.h"

/* Places in the parameter and gradient arenas, in elements. */
typedef struct {
    size_t begin, end; /* the block's range, what one all-reduce sums */
    size_t ln_1_weight, ln_1_bias, qkv_weight, qkv_bias, proj_weight, proj_bias;
    size_t ln_2_weight, ln_2_bias, fc_weight, fc_bias, fcproj_weight, fcproj_bias;
} Block;

/* Where forwards of one sequence also leave their keys and values. */
typedef struct {
    char *memory;        /* (L,B,T,2,C) real; NULL: nowhere */
    size_t B, T;
    size_t first, count; /* the sequences of the cache that receive them */
} KeyCache;

struct Gpt {
    GptConfig config;
    GptOptions options;
    GptPlan plan;
    GptTable table;
    const Layers *layers;
    Device *device;
    Comm *comm;
    AttentionFamily attention;
    size_t real, acc; /* bytes of an element */

    char *params; /* (elements) real */
    char
        *master; /* (elements) acc; the same memory as params when real is acc; NULL in inference */
    char *
        grads; /* (elements + ADAMW_CHUNK) acc; the first element after the gradients is the mean */
               /* loss, so that it is summed over the ranks with them                             */
    char *m, *v; /* (elements) acc */
    uint8_t *decay;
    char *arena_parameters, *arena_optimizer, *arena_activations;

    Block *blocks;
    size_t wte, wpe, ln_f_weight, ln_f_bias;
    size_t head; /* wte, or the place of a matrix of its own */
    Activations act;

    size_t B, T; /* of the last forward */
    GptMode mode;
    float gradient_scale;
    uint64_t dropout_key, forward_key; /* of the next and of the last forward */
    bool last;
    KeyCache cache; /* set by gpt/decode.c for its own forwards */
};

static inline void *param(const Gpt *model, size_t offset) {
    return model->params + offset * model->real;
}

/* The attention of B sequences of T: what the plan asks the size of, and what a block runs. */
Attention gpt_attention_problem(const GptConfig *config, const GptOptions *options,
                                DeviceType device, size_t B, size_t T);

#endif
