/* The model, written once on the table of layers: forward, backward, update. Knows no device. */
#include "gpt/gpt.h"

#include <stdlib.h>
#include <string.h>

#include "gpt/activations.h"
#include "gpt/config.h"
#include "runtime/convert.h"
#include "runtime/error.h"

/* Places in the parameter and gradient arenas, in elements. */
typedef struct {
    size_t begin, end; /* the block's range, what one all-reduce sums */
    size_t ln_1_weight, ln_1_bias, qkv_weight, qkv_bias, proj_weight, proj_bias;
    size_t ln_2_weight, ln_2_bias, fc_weight, fc_bias, fcproj_weight, fcproj_bias;
} Block;

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
    Activations act;

    size_t B, T; /* of the last forward */
    GptMode mode;
    float gradient_scale;
    uint64_t dropout_key, forward_key; /* of the next and of the last forward */
    bool last;
};

const char *gpt_recompute_name(GptRecompute recompute) {
    static const char *const names[] = {"none", "gelu", "block"};
    return names[recompute];
}

/* --- The plan ------------------------------------------------------------------------------- */

static Attention attention_problem(const GptConfig *config, const GptOptions *options,
                                   DeviceType device, size_t B, size_t T) {
    Attention problem = {.device = device,
                         .type = options->type,
                         .B = B,
                         .NH = config->NH,
                         .TQ = T,
                         .TK = T,
                         .HS = config->C / config->NH,
                         .mask = ATTENTION_CAUSAL,
                         .dropout = {config->attention_dropout, 0},
                         .deterministic = options->deterministic,
                         .family = options->attention};
    return problem;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static void plan_arenas(GptPlan *plan, const GptConfig *config, const GptOptions *options,
                        const Device *device, size_t elements) {
    size_t real = type_bytes(options->type), acc = type_bytes(type_accumulator(options->type));
    bool training = options->use == GPT_TRAINING,
         master = options->type != type_accumulator(options->type);
    Attention problem = attention_problem(config, options, device->type, options->B, options->T);
    size_t workspace = attention_forward_workspace(&problem);
    if (training) workspace = larger(workspace, attention_backward_workspace(&problem));
    size_t lse;
    Activations unused;

    memset(plan, 0, sizeof *plan);
    plan->parameters = elements * real;
    if (training) {
        plan->gradients = (elements + ADAMW_CHUNK) * acc;
        plan->optimizer = elements * acc * (master ? 3 : 2) + elements / ADAMW_CHUNK;
    }
    plan->activations = gpt_activations(&unused, config, options, NULL, &lse);
    plan->scratch = larger(workspace, layers_scratch_bytes(device->type, options->B * options->T));
    plan->attention = lse + workspace;
    plan->total =
        plan->parameters + plan->gradients + plan->optimizer + plan->activations + plan->scratch;
}

static bool check_options(const GptConfig *config, const GptOptions *options,
                          const Device *device) {
    if (!gpt_config_check(config)) return false;
    if (!layers_get(device->type, options->type)) return false;
    if (options->B < 1 || options->T < 1 || options->T > config->T)
        return error_set(
            "a batch of %zu sequences of %zu does not fit a model with a context of %zu",
            options->B, options->T, config->T);
    if (options->B > ((size_t)1 << 40) / options->T)
        return error_set("a batch of %zu sequences of %zu is too large", options->B, options->T);
    Attention problem = attention_problem(config, options, device->type, options->B, options->T);
    return attention_choose(&problem) != ATTENTION_AUTO;
}

bool gpt_plan(const GptConfig *config, const GptOptions *options, const Device *device,
              GptPlan *plan) {
    if (!check_options(config, options, device)) return false;
    GptTable table = {malloc(gpt_table_capacity(config) * sizeof(GptTensor)), 0, 0};
    if (!table.tensors) return error_set("out of host memory");
    gpt_table(&table, config);
    free(table.tensors);
    plan_arenas(plan, config, options, device, table.elements);
    return true;
}

static const struct {
    const char *name;
    size_t offset;
} plan_rows[] = {
    {"parameters", offsetof(GptPlan, parameters)}, {"gradients", offsetof(GptPlan, gradients)},
    {"optimizer", offsetof(GptPlan, optimizer)},   {"activations", offsetof(GptPlan, activations)},
    {"scratch", offsetof(GptPlan, scratch)},       {"total", offsetof(GptPlan, total)},
};

static size_t plan_format(const GptPlan *plan, char *text, size_t size) {
    size_t used = 0;
    for (size_t i = 0; i < sizeof plan_rows / sizeof plan_rows[0] && used < size; i++)
        used += (size_t)snprintf(
            text + used, size - used, "  %-12s %12.1f MiB\n", plan_rows[i].name,
            (double)*(const size_t *)((const char *)plan + plan_rows[i].offset) / 1048576);
    return used;
}

void gpt_plan_print(const GptPlan *plan, FILE *file) {
    char text[512];
    plan_format(plan, text, sizeof text);
    fprintf(file, "%s  (attention   %12.1f MiB of these)\n", text,
            (double)plan->attention / 1048576);
}

/* The message on running out: the plan, what is free, and the largest batch that would fit. */
static void report_memory(const GptConfig *config, const GptOptions *options, Device *device,
                          const GptPlan *plan, size_t available) {
    char table[512],
        advice[128] = "not even one sequence fits; shorten it or choose a smaller model";
    plan_format(plan, table, sizeof table);
    GptOptions smaller = *options;
    GptPlan fits;
    while (smaller.B > 1) {
        smaller.B /= 2;
        if (gpt_plan(config, &smaller, device, &fits) && fits.total <= available) {
            snprintf(advice, sizeof advice, "a batch of %zu would fit", smaller.B);
            break;
        }
    }
    error_set(
        "not enough memory on %s for a batch of %zu sequences of %zu:\n%s  %-12s %12.1f MiB\n%s",
        device->name, options->B, options->T, table, "free", (double)available / 1048576, advice);
}

/* --- Creation ------------------------------------------------------------------------------- */

static size_t offset_of(const GptTable *table, const char *format, size_t l) {
    char name[64];
    snprintf(name, sizeof name, format, l);
    for (size_t i = 0; i < table->count; i++)
        if (strcmp(table->tensors[i].name, name) == 0) return table->tensors[i].offset;
    error_fatal(__FILE__, __LINE__, "the table has no tensor %s", name);
}

static void find_blocks(Gpt *model) {
    const GptTable *t = &model->table;
    model->wte = offset_of(t, "wte.weight", 0);
    model->wpe = offset_of(t, "wpe.weight", 0);
    model->ln_f_weight = offset_of(t, "ln_f.weight", 0);
    model->ln_f_bias = offset_of(t, "ln_f.bias", 0);
    for (size_t l = 0; l < model->config.L; l++) {
        Block *b = &model->blocks[l];
        b->ln_1_weight = offset_of(t, "h.%zu.ln_1.weight", l);
        b->ln_1_bias = offset_of(t, "h.%zu.ln_1.bias", l);
        b->qkv_weight = offset_of(t, "h.%zu.attn.c_attn.weight", l);
        b->qkv_bias = offset_of(t, "h.%zu.attn.c_attn.bias", l);
        b->proj_weight = offset_of(t, "h.%zu.attn.c_proj.weight", l);
        b->proj_bias = offset_of(t, "h.%zu.attn.c_proj.bias", l);
        b->ln_2_weight = offset_of(t, "h.%zu.ln_2.weight", l);
        b->ln_2_bias = offset_of(t, "h.%zu.ln_2.bias", l);
        b->fc_weight = offset_of(t, "h.%zu.mlp.c_fc.weight", l);
        b->fc_bias = offset_of(t, "h.%zu.mlp.c_fc.bias", l);
        b->fcproj_weight = offset_of(t, "h.%zu.mlp.c_proj.weight", l);
        b->fcproj_bias = offset_of(t, "h.%zu.mlp.c_proj.bias", l);
        b->begin = b->ln_1_weight;
        b->end =
            l + 1 < model->config.L ? offset_of(t, "h.%zu.ln_1.weight", l + 1) : model->ln_f_weight;
    }
}

static bool allocate(Gpt *model) {
    GptPlan *plan = &model->plan;
    size_t n = model->table.elements, lse;
    model->arena_parameters = device_alloc(model->device, plan->parameters);
    model->arena_activations = device_alloc(model->device, plan->activations);
    if (!model->arena_parameters || !model->arena_activations ||
        !device_reserve_scratch(model->device, plan->scratch))
        return false;
    gpt_activations(&model->act, &model->config, &model->options, model->arena_activations, &lse);
    model->params = model->arena_parameters;
    /* Zero once: the padding between and inside tensors must stay zero through every update. */
    device_zero(model->device, model->params, plan->parameters);
    if (model->options.use == GPT_INFERENCE) return true;

    model->grads = device_alloc(model->device, plan->gradients);
    model->arena_optimizer = device_alloc(model->device, plan->optimizer);
    if (!model->grads || !model->arena_optimizer) return false;
    char *next = model->arena_optimizer;
    model->m = next, next += n * model->acc;
    model->v = next, next += n * model->acc;
    if (model->real == model->acc)
        model->master = model->params;
    else
        model->master = next, next += n * model->acc;
    model->decay = (uint8_t *)next;
    device_zero(model->device, model->arena_optimizer, plan->optimizer);

    uint8_t *decay = calloc(n / ADAMW_CHUNK, 1);
    if (!decay) return error_set("out of host memory");
    for (size_t i = 0; i < model->table.count; i++) {
        const GptTensor *t = &model->table.tensors[i];
        size_t chunks = (t->elements + ADAMW_CHUNK - 1) / ADAMW_CHUNK;
        if (t->decay) memset(decay + t->offset / ADAMW_CHUNK, 1, chunks);
    }
    device_upload(model->device, model->decay, decay, n / ADAMW_CHUNK);
    free(decay);
    return true;
}

Gpt *gpt_create(const GptConfig *config, const GptOptions *options, Device *device, Comm *comm) {
    GptPlan plan;
    if (!gpt_plan(config, options, device, &plan)) return NULL;
    size_t available, total;
    device_memory(device, &available, &total);
    available += device->scratch_bytes;
    if (plan.total > available) {
        report_memory(config, options, device, &plan, available);
        return NULL;
    }
    Gpt *model = calloc(1, sizeof *model);
    if (model) model->table.tensors = calloc(gpt_table_capacity(config), sizeof(GptTensor));
    if (model) model->blocks = calloc(config->L, sizeof(Block));
    if (!model || !model->table.tensors || !model->blocks) {
        error_set("out of host memory");
        gpt_free(model);
        return NULL;
    }
    Attention problem = attention_problem(config, options, device->type, options->B, options->T);
    model->config = *config;
    model->options = *options;
    model->plan = plan;
    model->layers = layers_get(device->type, options->type);
    model->device = device;
    model->comm = comm;
    model->attention = attention_choose(&problem);
    model->real = type_bytes(options->type);
    model->acc = type_bytes(type_accumulator(options->type));
    gpt_table(&model->table, config);
    find_blocks(model);
    gpt_set_training(model, 1.0f / (float)(comm ? comm_ranks(comm) : 1), 0, true);
    if (!allocate(model)) {
        report_memory(config, options, device, &plan, available);
        gpt_free(model);
        return NULL;
    }
    return model;
}

void gpt_free(Gpt *model) {
    if (!model) return;
    device_free(model->device, model->arena_parameters);
    device_free(model->device, model->arena_activations);
    device_free(model->device, model->arena_optimizer);
    device_free(model->device, model->grads);
    free(model->table.tensors);
    free(model->blocks);
    free(model);
}

void gpt_init(Gpt *model, uint64_t seed) {
    for (size_t i = 0; i < model->table.count; i++) {
        const GptTensor *t = &model->table.tensors[i];
        float *values = malloc(t->elements * sizeof *values);
        if (!values) error_fatal(__FILE__, __LINE__, "out of host memory");
        if (t->init_deviation > 0)
            random_normal(values, t->elements, random_mix(seed, i), t->init_deviation);
        else
            for (size_t j = 0; j < t->elements; j++) values[j] = t->init_constant;
        gpt_write(model, GPT_PARAMETERS, t, values);
        free(values);
    }
    size_t moments = 2 * model->table.elements * model->acc;
    if (model->m) device_zero(model->device, model->m, moments);
}

const GptConfig *gpt_config(const Gpt *model) { return &model->config; }
const GptOptions *gpt_options(const Gpt *model) { return &model->options; }
const GptPlan *gpt_planned(const Gpt *model) { return &model->plan; }
AttentionFamily gpt_attention(const Gpt *model) { return model->attention; }
Device *gpt_device(const Gpt *model) { return model->device; }
size_t gpt_tensors(const Gpt *model) { return model->table.count; }
const GptTensor *gpt_tensor(const Gpt *model, size_t i) { return &model->table.tensors[i]; }

/* --- Forward -------------------------------------------------------------------------------- */

static void *param(const Gpt *model, size_t offset) { return model->params + offset * model->real; }
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
        attention_problem(c, &model->options, model->device->type, model->B, model->T);
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

/* mid, ln_2 = block l's residual stream after attention, from ln_1; then the MLP's hidden layer. */
static void block_hidden(Gpt *model, size_t l) {
    const Activations *a = &model->act;
    const Block *b = &model->blocks[l];
    size_t N = model->B * model->T, C = model->config.C;
    conv1d_forward(model, at(a->qkv, l), NULL, at(a->ln_1, l), b->qkv_weight, b->qkv_bias, C,
                   3 * C);
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
        model->act.logits, NULL, model->act.ln_f + row * C * model->real, param(model, model->wte),
        NULL, n, C, gpt_padded_vocabulary(&model->config), WEIGHT_OUT_IN, model->device);
}

/* The loss, and in training the gradients of ln_f's output and of wte, a chunk of rows at a time. */
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
                a->dnorm + row * C * model->real, grad(model, model->wte), NULL, a->logits,
                a->ln_f + row * C * model->real, param(model, model->wte), NULL, n, C, Vp,
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
    share(model, model->ln_f_weight, model->table.elements + 1); /* and the loss */
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

double gpt_gradient_norm(Gpt *model) { return read_scalar(model, model->act.norm); }

/* --- Host access ---------------------------------------------------------------------------- */

/* The arena that holds the exact values, and the type of its elements. */
static char *arena_of(const Gpt *model, GptArena arena, DataType *type) {
    DataType acc = type_accumulator(model->options.type);
    *type = arena == GPT_PARAMETERS && !model->master ? model->options.type : acc;
    switch (arena) {
    case GPT_GRADIENTS: return model->grads;
    case GPT_ADAM_M: return model->m;
    case GPT_ADAM_V: return model->v;
    default: return model->master ? model->master : model->params;
    }
}

static void *host_buffer(size_t bytes) {
    void *buffer = malloc(bytes ? bytes : 1);
    if (!buffer) error_fatal(__FILE__, __LINE__, "out of host memory");
    return buffer;
}

void gpt_read(const Gpt *model, GptArena arena, const GptTensor *tensor, float *values) {
    DataType type;
    char *from = arena_of(model, arena, &type);
    size_t bytes = tensor->elements * type_bytes(type);
    void *stored = host_buffer(bytes);
    device_download(model->device, stored, from + tensor->offset * type_bytes(type), bytes);
    type_to_float(type, values, stored, tensor->elements);
    free(stored);
}

/* Writes to one arena after conversion. */
static void write_arena(Gpt *model, char *arena, DataType type, const GptTensor *tensor,
                        const float *values) {
    size_t bytes = tensor->elements * type_bytes(type);
    void *stored = host_buffer(bytes);
    type_from_float(type, stored, values, tensor->elements);
    device_upload(model->device, arena + tensor->offset * type_bytes(type), stored, bytes);
    free(stored);
}

void gpt_write(Gpt *model, GptArena arena, const GptTensor *tensor, const float *values) {
    DataType type;
    char *to = arena_of(model, arena, &type);
    write_arena(model, to, type, tensor, values);
    if (arena == GPT_PARAMETERS && to != model->params)
        write_arena(model, model->params, model->options.type, tensor, values);
}

void gpt_read_double(const Gpt *model, GptArena arena, const GptTensor *tensor, double *values) {
    DataType type;
    char *from = arena_of(model, arena, &type);
    if (type != TYPE_F64) error_fatal(__FILE__, __LINE__, "gpt_read_double: not a double model");
    device_download(model->device, values, from + tensor->offset * sizeof *values,
                    tensor->elements * sizeof *values);
}

void gpt_write_double(Gpt *model, GptArena arena, const GptTensor *tensor, const double *values) {
    DataType type;
    char *to = arena_of(model, arena, &type);
    if (type != TYPE_F64) error_fatal(__FILE__, __LINE__, "gpt_write_double: not a double model");
    device_upload(model->device, to + tensor->offset * sizeof *values, values,
                  tensor->elements * sizeof *values);
}
