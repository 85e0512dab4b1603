/* The shapes of GPT-2: presets, what is a valid configuration, and the table of its tensors. */
#include "gpt/config.h"

#include <string.h>

#include "runtime/error.h"

#define GPT2(name, L, NH, C)                                   \
    {                                                          \
        name, { L, NH, C, 1024, 50257, 1e-5f, 0, 0, 0, false } \
    }

static const struct {
    const char *name;
    GptConfig config;
} presets[] = {
    {"shakespeare-cpu", {4, 4, 128, 64, 256, 1e-5f, 0, 0, 0, false}},
    {"shakespeare", {6, 6, 384, 256, 256, 1e-5f, 0.2f, 0.2f, 0.2f, false}},
    GPT2("gpt2-124M", 12, 12, 768),
    GPT2("gpt2-350M", 24, 16, 1024),
    GPT2("gpt2-774M", 36, 20, 1280),
    GPT2("gpt2-1558M", 48, 25, 1600),
};

bool gpt_preset(const char *name, GptConfig *config) {
    char names[256] = "";
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(name, presets[i].name) == 0) {
            *config = presets[i].config;
            return true;
        }
        strcat(strcat(names, i ? ", " : ""), presets[i].name);
    }
    return error_set("there is no preset '%s'; the presets are %s", name, names);
}

bool gpt_config_check(const GptConfig *c) {
    /* Bounds that keep every product of dimensions far from overflow and catch mangled files. */
    const size_t most = (size_t)1 << 24;
    if (c->L < 1 || c->L > 4096) return error_set("a model has 1 to 4096 layers, not %zu", c->L);
    if (c->C < 1 || c->C > most / 16)
        return error_set("the width must be 1 to %zu, not %zu", most / 16, c->C);
    if (c->NH < 1 || c->C % c->NH != 0)
        return error_set(
            "the width must be a positive multiple of the heads, but it is %zu with %zu heads",
            c->C, c->NH);
    if (c->C / c->NH > 256)
        return error_set(
            "a head may have up to 256 channels, but a width of %zu over %zu heads gives %zu", c->C,
            c->NH, c->C / c->NH);
    if (c->T < 1 || c->T > most)
        return error_set("the context must be 1 to %zu, not %zu", most, c->T);
    if (c->V < 1 || c->V > most)
        return error_set("the vocabulary must be 1 to %zu, not %zu", most, c->V);
    if (!(c->layernorm_eps > 0 && c->layernorm_eps < 1))
        return error_set("the layernorm's epsilon must lie between 0 and 1, not %g",
                         c->layernorm_eps);
    const float dropouts[] = {c->embedding_dropout, c->residual_dropout, c->attention_dropout};
    for (int i = 0; i < 3; i++)
        if (!(dropouts[i] >= 0 && dropouts[i] <= 0.99f))
            return error_set("a dropout probability must be 0 to 0.99, not %g", dropouts[i]);
    return true;
}

/* cuBLASLt needs columns in multiples of 8 to be fast; 64 keeps rows of logits on whole cache lines. */
size_t gpt_padded_vocabulary(const GptConfig *config) { return (config->V + 63) / 64 * 64; }

double gpt_flops_per_token(const GptConfig *c, size_t T) {
    double C = (double)c->C, L = (double)c->L;
    return 6 * (12 * L * C * C + (double)c->V * C) + 6 * L * (double)T * C;
}

/* Appends one tensor. Residual projections start smaller, so that the sum over 2L branches keeps the
 * residual stream's variance (Radford et al. 2019, section 2.3). */
static void add(GptTable *table, const char *name, size_t rows, size_t columns, size_t padded_rows,
                float deviation, float constant) {
    GptTensor *t = &table->tensors[table->count++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->rank = columns ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->elements = rows * (columns ? columns : 1);
    t->offset = table->elements;
    t->init_deviation = deviation;
    t->init_constant = constant;
    t->decay = t->rank == 2;
    size_t stored = padded_rows * (columns ? columns : 1);
    table->elements += (stored + ADAMW_CHUNK - 1) / ADAMW_CHUNK * ADAMW_CHUNK;
}

/* Block l's linear layer or layernorm: weight and bias. */
static void add_linear(GptTable *table, size_t l, const char *name, size_t in, size_t out,
                       float deviation) {
    char full[64];
    snprintf(full, sizeof full, "h.%zu.%s.weight", l, name);
    add(table, full, in, out, in, deviation, 0);
    snprintf(full, sizeof full, "h.%zu.%s.bias", l, name);
    add(table, full, out, 0, out, 0, 0);
}

static void add_layernorm(GptTable *table, size_t l, const char *name, size_t C) {
    char full[64];
    snprintf(full, sizeof full, "h.%zu.%s.weight", l, name);
    add(table, full, C, 0, C, 0, 1);
    snprintf(full, sizeof full, "h.%zu.%s.bias", l, name);
    add(table, full, C, 0, C, 0, 0);
}

void gpt_table(GptTable *table, const GptConfig *config) {
    size_t C = config->C;
    float deviation = 0.02f, residual = deviation / sqrtf(2.0f * (float)config->L);
    table->count = table->elements = 0;
    add(table, "wte.weight", config->V, C, gpt_padded_vocabulary(config), deviation, 0);
    add(table, "wpe.weight", config->T, C, config->T, deviation, 0);
    for (size_t l = 0; l < config->L; l++) {
        add_layernorm(table, l, "ln_1", C);
        add_linear(table, l, "attn.c_attn", C, 3 * C, deviation);
        add_linear(table, l, "attn.c_proj", C, C, residual);
        add_layernorm(table, l, "ln_2", C);
        add_linear(table, l, "mlp.c_fc", C, 4 * C, deviation);
        add_linear(table, l, "mlp.c_proj", 4 * C, C, residual);
    }
    add(table, "ln_f.weight", C, 0, C, 0, 1);
    add(table, "ln_f.bias", C, 0, C, 0, 0);
    if (config->untied_head)
        add(table, GPT_HEAD, config->V, C, gpt_padded_vocabulary(config), deviation, 0);
}

size_t gpt_table_capacity(const GptConfig *config) { return 5 + 12 * config->L; }

size_t gpt_parameters(const GptConfig *config) {
    size_t C = config->C;
    size_t vocabularies = config->untied_head ? 2 : 1;
    return (vocabularies * config->V + config->T) * C + config->L * (12 * C * C + 13 * C) + 2 * C;
}
