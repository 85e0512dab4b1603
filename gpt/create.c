/* Making a model: the plan of its memory, its arenas, its initial values, and the way in and out of
 * them for the host. */
#include <stdlib.h>
#include <string.h>

#include "gpt/model.h"
#include "runtime/convert.h"
#include "runtime/error.h"

const char *gpt_recompute_name(GptRecompute recompute) {
    static const char *const names[] = {"none", "gelu", "block"};
    return names[recompute];
}

/* --- The plan ------------------------------------------------------------------------------- */

Attention gpt_attention_problem(const GptConfig *config, const GptOptions *options,
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
    Attention problem =
        gpt_attention_problem(config, options, device->type, options->B, options->T);
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
    size_t *const arenas[] = {&plan->parameters, &plan->gradients, &plan->optimizer,
                              &plan->activations, &plan->scratch};
    size_t granule = device_granularity(device);
    for (size_t i = 0; i < sizeof arenas / sizeof arenas[0]; i++) {
        *arenas[i] = (*arenas[i] + granule - 1) / granule * granule;
        plan->total += *arenas[i];
    }
}

/* Refuses what no machine holds before the exact plan is made, whose sums could wrap. From above: 8
 * bytes a value, four arenas of parameters, fewer than 32 C activations a token and layer, and the
 * embedding's and the head's counted as one layer more. */
static bool check_size(const GptConfig *config, const GptOptions *options) {
    double tokens = (double)options->B * (double)options->T;
    double activations = 32 * tokens * (double)(config->L + 1) * (double)config->C;
    double bytes = 8 * (4 * (double)gpt_parameters(config) + activations);
    return bytes <= 0x1p56 ||
           error_set(
               "a batch of %zu sequences of %zu with %zu layers of width %zu could take %.0f "
               "PiB; a smaller batch, a shorter sequence or a smaller model needs less",
               options->B, options->T, config->L, config->C, bytes * 0x1p-50);
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
    if (!check_size(config, options)) return false;
    Attention problem =
        gpt_attention_problem(config, options, device->type, options->B, options->T);
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

/* Each block before l has 12 tensors, so the search need not begin before those. */
static size_t offset_of(const GptTable *table, const char *format, size_t l) {
    char name[64];
    snprintf(name, sizeof name, format, l);
    for (size_t i = 12 * l; i < table->count; i++)
        if (strcmp(table->tensors[i].name, name) == 0) return table->tensors[i].offset;
    error_fatal(__FILE__, __LINE__, "the table has no tensor %s", name);
}

static void find_blocks(Gpt *model) {
    const GptTable *t = &model->table;
    model->wte = offset_of(t, "wte.weight", 0);
    model->wpe = offset_of(t, "wpe.weight", 0);
    model->ln_f_weight = offset_of(t, "ln_f.weight", 0);
    model->ln_f_bias = offset_of(t, "ln_f.bias", 0);
    model->head = model->config.untied_head ? offset_of(t, GPT_HEAD, 0) : model->wte;
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
    Attention problem =
        gpt_attention_problem(config, options, device->type, options->B, options->T);
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
