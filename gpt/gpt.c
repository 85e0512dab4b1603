/* The model, written once on the table of layers: forward, backward, update. Knows no device. */
#include <stdlib.h>

#include "gpt/model.h"
#include "runtime/convert.h"
#include "runtime/error.h"

/* --- Forward -------------------------------------------------------------------------------- */

static void *grad(const Gpt *model, size_t offset) { return model->grads + offset * model->acc; }
static char *loss_place(const Gpt *model) { return grad(model, model->table.elements); }

/* Every use of dropout has a key of its own: 0 for the embeddings, then three for each block. */
enum { SITE_ATTENTION, SITE_PROJ, SITE_FCPROJ, SITES };

static Dropout dropout_at(const Gpt *model, float probability, size_t site) {
    Dropout dropout = {model->mode == GPT_TRAIN ? probability : 0,
                       random_mix(model->forward_key, site)};
    return dropout;
}

static Dropout block_dropout(const Gpt *model, float probability, size_t l, size_t site) {
    return dropout_at(model, probability, 1 + SITES * l + site);
}

static Attention block_attention(const Gpt *model, size_t l, AttentionTensors *tensors) {
    const GptConfig *c = &model->config;
    size_t HS = c->C / c->NH;
    Attention problem =
        gpt_attention_problem(c, &model->options, model->device->type, model->B, model->T);
    problem.family = model->attention;
    problem.dropout = block_dropout(model, c->attention_dropout, l, SITE_ATTENTION);
    void *qkv = at(model->act.qkv, l);
    tensors->q = attention_packed_view(qkv, problem.type, 0, model->T, c->NH, HS);
    tensors->k = attention_packed_view(qkv, problem.type, 1, model->T, c->NH, HS);
    tensors->v = attention_packed_view(qkv, problem.type, 2, model->T, c->NH, HS);
    tensors->o = attention_view(at(model->act.att, l), model->T, c->NH, HS);
    tensors->lse = at(model->act.lse, l);
    return problem;
}

static void check_attention(const char *message) {
    if (message) error_fatal(__FILE__, __LINE__, "attention: %s", message);
}

/* x = W in + b with a block's Conv1D weight. */
static void conv1d_forward(Gpt *model, void *out, void *pre_gelu, const void *in, size_t weight,
                           size_t bias, size_t IC, size_t OC) {
    model->layers->linear_forward(out, pre_gelu, in, param(model, weight), param(model, bias),
                                  model->B * model->T, IC, OC, WEIGHT_IN_OUT, model->device);
}

static void conv1d_backward(Gpt *model, void *din, size_t weight, size_t bias, const void *dout,
                            const void *in, const void *pre_gelu, size_t IC, size_t OC) {
    model->layers->linear_backward(din, grad(model, weight), grad(model, bias), dout, in,
                                   param(model, weight), pre_gelu, model->B * model->T, IC, OC,
                                   WEIGHT_IN_OUT, model->device);
}

static void cache_keys(Gpt *model, size_t l) {
    const KeyCache *cache = &model->cache;
    size_t C = model->config.C;
    char *layer = cache->memory + l * cache->B * cache->T * 2 * C * model->real;
    model->layers->cache_store(layer, at(model->act.qkv, l), cache->first, cache->count, model->T,
                               cache->T, C, model->device);
}

/* mid, ln_2 = block l's residual stream after attention, from ln_1; then the MLP's hidden layer. */
static void block_hidden(Gpt *model, size_t l) {
    const Activations *a = &model->act;
    const Block *b = &model->blocks[l];
    size_t N = model->B * model->T, C = model->config.C;
    conv1d_forward(model, at(a->qkv, l), NULL, at(a->ln_1, l), b->qkv_weight, b->qkv_bias, C,
                   3 * C);
    if (model->cache.memory) cache_keys(model, l);
    AttentionTensors tensors;
    Attention problem = block_attention(model, l, &tensors);
    check_attention(
        attention_forward(&problem, &tensors, model->device->scratch, model->device->stream));
    conv1d_forward(model, a->branch, NULL, at(a->att, l), b->proj_weight, b->proj_bias, C, C);
    model->layers->residual_layernorm_forward(
        at(a->ln_2, l), at(a->mid, l), at(a->ln_2_mean, l), at(a->ln_2_rstd, l), at(a->x, l),
        a->branch, param(model, b->ln_2_weight), param(model, b->ln_2_bias), N, C,
        model->config.layernorm_eps,
        block_dropout(model, model->config.residual_dropout, l, SITE_PROJ), model->device);
    conv1d_forward(model, at(a->gelu, l), at(a->fc, l), at(a->ln_2, l), b->fc_weight, b->fc_bias, C,
                   4 * C);
}

static void first_layernorm(Gpt *model, size_t l) {
    const Activations *a = &model->act;
    const Block *b = &model->blocks[l];
    model->layers->layernorm_forward(at(a->ln_1, l), at(a->ln_1_mean, l), at(a->ln_1_rstd, l),
                                     at(a->x, l), param(model, b->ln_1_weight),
                                     param(model, b->ln_1_bias), model->B * model->T,
                                     model->config.C, model->config.layernorm_eps, model->device);
}

/* x[l+1] = mid + dropout(MLP), and the layernorm that reads it next: block l+1's first, or the last. */
static void block_output(Gpt *model, size_t l) {
    const Activations *a = &model->act;
    const Block *b = &model->blocks[l], *next = b + 1;
    bool final = l + 1 == model->config.L;
    size_t N = model->B * model->T, C = model->config.C;
    conv1d_forward(model, a->branch, NULL, at(a->gelu, l), b->fcproj_weight, b->fcproj_bias, 4 * C,
                   C);
    model->layers->residual_layernorm_forward(
        final ? a->ln_f : at(a->ln_1, l + 1), at(a->x, l + 1),
        final ? a->ln_f_mean : at(a->ln_1_mean, l + 1),
        final ? a->ln_f_rstd : at(a->ln_1_rstd, l + 1), at(a->mid, l), a->branch,
        param(model, final ? model->ln_f_weight : next->ln_1_weight),
        param(model, final ? model->ln_f_bias : next->ln_1_bias), N, C, model->config.layernorm_eps,
        block_dropout(model, model->config.residual_dropout, l, SITE_FCPROJ), model->device);
}

/* logits of n rows, into act.logits. */
static void head_forward(Gpt *model, size_t row, size_t n) {
    size_t C = model->config.C;
    model->layers->linear_forward(
        model->act.logits, NULL, model->act.ln_f + row * C * model->real, param(model, model->head),
        NULL, n, C, gpt_padded_vocabulary(&model->config), WEIGHT_OUT_IN, model->device);
}

/* The loss, and in training the gradients of ln_f's output and of the head, a chunk at a time. */
static void head_loss(Gpt *model, size_t valid) {
    const Activations *a = &model->act;
    size_t N = model->B * model->T, C = model->config.C, V = model->config.V;
    size_t Vp = gpt_padded_vocabulary(&model->config);
    bool train = model->mode == GPT_TRAIN;
    float scale = (train ? model->gradient_scale : 1.0f) / (float)(valid ? valid : 1);
    for (size_t row = 0; row < N; row += a->chunk) {
        size_t n = N - row < a->chunk ? N - row : a->chunk;
        char *losses = a->losses + row * model->acc;
        head_forward(model, row, n);
        if (train) {
            model->layers->cross_entropy_backward(losses, a->logits, a->targets + row, scale, n, V,
                                                  Vp, model->device);
            model->layers->linear_backward(
                a->dnorm + row * C * model->real, grad(model, model->head), NULL, a->logits,
                a->ln_f + row * C * model->real, param(model, model->head), NULL, n, C, Vp,
                WEIGHT_OUT_IN, model->device);
        } else {
            model->layers->cross_entropy_forward(losses, a->logits, a->targets + row, n, V, Vp,
                                                 model->device);
        }
    }
    char *loss = train ? loss_place(model) : a->eval_loss;
    if (!train) device_zero(model->device, loss, model->acc);
    model->layers->sum_forward(loss, a->losses, scale, N, model->device);
}

void gpt_forward(Gpt *model, const int32_t *tokens, const int32_t *targets, size_t B, size_t T,
                 GptMode mode) {
    const Activations *a = &model->act;
    if (B * T > model->options.B * model->options.T || T > model->config.T || B * T == 0)
        error_fatal(__FILE__, __LINE__, "gpt_forward: (%zu,%zu) exceeds the model's (%zu,%zu)", B,
                    T, model->options.B, model->options.T);
    if (mode == GPT_TRAIN && (model->options.use != GPT_TRAINING || !targets))
        error_fatal(__FILE__, __LINE__,
                    "gpt_forward: training needs targets and a model made for it");
    model->B = B, model->T = T, model->mode = mode, model->forward_key = model->dropout_key;
    size_t N = B * T, C = model->config.C;
    device_upload(model->device, a->tokens, tokens, N * sizeof *tokens);
    model->layers->embedding_forward(
        at(a->x, 0), a->tokens, param(model, model->wte), param(model, model->wpe), B, T, C,
        dropout_at(model, model->config.embedding_dropout, 0), model->device);
    first_layernorm(model, 0);
    for (size_t l = 0; l < model->config.L; l++) {
        block_hidden(model, l);
        block_output(model, l);
    }
    if (!targets) return;
    size_t valid = 0;
    for (size_t i = 0; i < N; i++) valid += targets[i] >= 0;
    device_upload(model->device, a->targets, targets, N * sizeof *targets);
    head_loss(model, valid);
}

void gpt_logits(Gpt *model, size_t row, size_t n, float *logits) {
    size_t V = model->config.V, Vp = gpt_padded_vocabulary(&model->config), real = model->real;
    size_t chunk = model->act.chunk < n ? model->act.chunk : n;
    char *padded = malloc(chunk * Vp * real);
    if (!padded) error_fatal(__FILE__, __LINE__, "out of host memory");
    for (size_t done = 0; done < n; done += chunk) {
        size_t rows = n - done < chunk ? n - done : chunk;
        head_forward(model, row + done, rows);
        device_download(model->device, padded, model->act.logits, rows * Vp * real);
        for (size_t i = 0; i < rows; i++)
            type_to_float(model->options.type, logits + (done + i) * V, padded + i * Vp * real, V);
    }
    free(padded);
}

/* --- Backward ------------------------------------------------------------------------------- */

/* Sums a range of gradients over the ranks while the backward goes on. */
static void share(Gpt *model, size_t begin, size_t end) {
    if (model->last && model->comm && comm_ranks(model->comm) > 1)
        comm_sum(model->comm, grad(model, begin), end - begin,
                 type_accumulator(model->options.type));
}

/* The gradient of a branch that was dropped out into the residual stream: dx itself without dropout. */
static const void *branch_gradient(Gpt *model, size_t l, size_t site) {
    Dropout dropout = block_dropout(model, model->config.residual_dropout, l, site);
    if (dropout.probability == 0) return model->act.dx;
    model->layers->dropout_forward(model->act.dbranch, model->act.dx,
                                   model->B * model->T * model->config.C, dropout, model->device);
    return model->act.dbranch;
}

/* dx: gradient of x[l+1] in, of x[l] out. */
static void block_backward(Gpt *model, size_t l) {
    const Activations *a = &model->act;
    const Block *b = &model->blocks[l];
    size_t N = model->B * model->T, C = model->config.C;

    const void *dbranch = branch_gradient(model, l, SITE_FCPROJ);
    conv1d_backward(model, a->dwide, b->fcproj_weight, b->fcproj_bias, dbranch, at(a->gelu, l),
                    at(a->fc, l), 4 * C, C);
    conv1d_backward(model, a->dnorm, b->fc_weight, b->fc_bias, a->dwide, at(a->ln_2, l), NULL, C,
                    4 * C);
    model->layers->layernorm_backward(a->dx, grad(model, b->ln_2_weight), grad(model, b->ln_2_bias),
                                      a->dnorm, a->dx, at(a->mid, l), at(a->ln_2_mean, l),
                                      at(a->ln_2_rstd, l), param(model, b->ln_2_weight), N, C,
                                      model->device);

    dbranch = branch_gradient(model, l, SITE_PROJ);
    conv1d_backward(model, a->datt, b->proj_weight, b->proj_bias, dbranch, at(a->att, l), NULL, C,
                    C);
    AttentionTensors tensors;
    Attention problem = block_attention(model, l, &tensors);
    size_t NH = model->config.NH, HS = C / NH;
    AttentionGradients gradients = {
        .dout = attention_view(a->datt, model->T, NH, HS),
        .dq = attention_packed_view(a->dwide, problem.type, 0, model->T, NH, HS),
        .dk = attention_packed_view(a->dwide, problem.type, 1, model->T, NH, HS),
        .dv = attention_packed_view(a->dwide, problem.type, 2, model->T, NH, HS),
    };
    check_attention(attention_backward(&problem, &tensors, &gradients, model->device->scratch,
                                       model->device->stream));
    conv1d_backward(model, a->dnorm, b->qkv_weight, b->qkv_bias, a->dwide, at(a->ln_1, l), NULL, C,
                    3 * C);
    model->layers->layernorm_backward(a->dx, grad(model, b->ln_1_weight), grad(model, b->ln_1_bias),
                                      a->dnorm, a->dx, at(a->x, l), at(a->ln_1_mean, l),
                                      at(a->ln_1_rstd, l), param(model, b->ln_1_weight), N, C,
                                      model->device);
    share(model, b->begin, b->end);
}

/* What was not kept for block l. The last block's activations are still in the shared buffers. */
static void recompute_block(Gpt *model, size_t l) {
    const Activations *a = &model->act;
    if (model->options.recompute == RECOMPUTE_BLOCK && l + 1 < model->config.L) {
        first_layernorm(model, l);
        block_hidden(model, l);
    } else if (model->options.recompute == RECOMPUTE_GELU) {
        model->layers->gelu_forward(at(a->gelu, l), at(a->fc, l),
                                    model->B * model->T * 4 * model->config.C, model->device);
    }
}

void gpt_backward(Gpt *model) {
    const Activations *a = &model->act;
    if (model->mode != GPT_TRAIN)
        error_fatal(__FILE__, __LINE__, "gpt_backward: the last gpt_forward was not in GPT_TRAIN");
    size_t N = model->B * model->T, C = model->config.C, L = model->config.L;
    model->layers->layernorm_backward(a->dx, grad(model, model->ln_f_weight),
                                      grad(model, model->ln_f_bias), a->dnorm, NULL, at(a->x, L),
                                      a->ln_f_mean, a->ln_f_rstd, param(model, model->ln_f_weight),
                                      N, C, model->device);
    /* With an untied head, which lies behind it, and the loss. */
    share(model, model->ln_f_weight, model->table.elements + 1);
    for (size_t l = L; l-- > 0;) {
        recompute_block(model, l);
        block_backward(model, l);
    }
    model->layers->embedding_backward(
        grad(model, model->wte), grad(model, model->wpe), a->dx, a->tokens, model->B, model->T, C,
        model->config.V, dropout_at(model, model->config.embedding_dropout, 0), model->device);
    share(model, 0, model->blocks[0].begin);
    if (model->comm) comm_wait(model->comm);
}

void gpt_zero_gradients(Gpt *model) {
    device_zero(model->device, model->grads, model->plan.gradients);
}

void gpt_set_training(Gpt *model, float gradient_scale, uint64_t dropout_key, bool last) {
    model->gradient_scale = gradient_scale;
    model->dropout_key = dropout_key;
    model->last = last;
}

/* --- Update --------------------------------------------------------------------------------- */

void gpt_update(Gpt *model, AdamW adamw) {
    size_t n = model->table.elements;
    model->layers->grad_norm(model->act.norm, model->grads, n, model->device);
    model->layers->adamw_update(model->params, model->master, model->m, model->v, model->grads,
                                model->decay, model->act.norm, n, adamw, model->device);
}

static double read_scalar(Gpt *model, const void *place) {
    double value;
    float single;
    if (model->acc == sizeof value) {
        device_download(model->device, &value, place, sizeof value);
        return value;
    }
    device_download(model->device, &single, place, sizeof single);
    return single;
}

double gpt_loss(Gpt *model) {
    return read_scalar(model, model->mode == GPT_TRAIN ? loss_place(model) : model->act.eval_loss);
}

void gpt_losses(Gpt *model, double *losses) {
    size_t N = model->B * model->T;
    void *stored = malloc(N * model->acc);
    if (!stored) error_fatal(__FILE__, __LINE__, "out of host memory");
    device_download(model->device, stored, model->act.losses, N * model->acc);
    for (size_t i = 0; i < N; i++)
        losses[i] = model->acc == sizeof(double) ? ((double *)stored)[i] : ((float *)stored)[i];
    free(stored);
}

double gpt_gradient_norm(Gpt *model) { return read_scalar(model, model->act.norm); }
