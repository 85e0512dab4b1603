#include "gpt/decode.h"

#include <stdlib.h>
#include <string.h>

#include "gpt/model.h"
#include "runtime/error.h"

struct GptDecoder {
    Gpt *model;
    size_t B, T;
    Sampling sampling;
    char *arena;
    char *cache;                  /* (L,B,T,2,C) real */
    char *x, *qkv, *att, *hidden; /* (B,C), (B,3C), (B,C), (B,4C) real */
    char *logits;                 /* (B,V) acc */
    uint32_t *weights;            /* (B,V) of the draw */
    int32_t *tokens, *positions;  /* (B) the newest token of each sequence and its place */
    uint64_t *draws;              /* (B) */
    char *workspace;              /* of attention */
    DeviceGraph *graph;           /* of a step */

    int32_t *window;     /* host (B,T+1): what the sequences hold, `length` tokens each */
    int32_t *input;      /* host (T) */
    size_t length, read; /* read: tokens so far, those that have left the window included */
    size_t queued;       /* steps given whose tokens have not been received */
};

/* --- Memory --------------------------------------------------------------------------------- */

static void *take(char *base, size_t *used, size_t bytes) {
    char *place = base ? base + *used : NULL;
    *used += (bytes + 255) / 256 * 256;
    return place;
}

/* Lays the arena out from base (NULL to measure only); returns its bytes. */
static size_t lay_out(GptDecoder *d, char *base) {
    const Gpt *model = d->model;
    const GptConfig *c = &model->config;
    size_t used = 0, row = d->B * c->C * model->real;
    d->cache = take(base, &used, 2 * c->L * d->T * row);
    d->x = take(base, &used, row);
    d->qkv = take(base, &used, 3 * row);
    d->att = take(base, &used, row);
    d->hidden = take(base, &used, 4 * row);
    d->logits = take(base, &used, d->B * c->V * model->acc);
    d->weights = take(base, &used, d->B * c->V * sizeof *d->weights);
    d->tokens = take(base, &used, d->B * sizeof *d->tokens);
    d->positions = take(base, &used, d->B * sizeof *d->positions);
    d->draws = take(base, &used, d->B * sizeof *d->draws);
    d->workspace = take(base, &used, 0);
    return used + model->layers->cached_attention_workspace(d->B, d->T, c->NH, c->C / c->NH);
}

static size_t scratch_bytes(const GptDecoder *d) {
    const Gpt *model = d->model;
    size_t C = model->config.C;
    size_t up = layers_gemv_scratch_bytes(model->device, model->options.type, d->B, C, 4 * C);
    size_t down = layers_gemv_scratch_bytes(model->device, model->options.type, d->B, 4 * C, C);
    return up > down ? up : down;
}

static bool allocate(GptDecoder *d) {
    Device *device = d->model->device;
    size_t bytes = lay_out(d, NULL);
    d->window = malloc(d->B * (d->T + 1) * sizeof *d->window);
    d->input = malloc(d->T * sizeof *d->input);
    if (!d->window || !d->input) return error_set("out of host memory");
    if (!device_reserve_scratch(device, scratch_bytes(d))) return false;
    d->arena = device_alloc(device, bytes);
    if (!d->arena) return false;
    lay_out(d, d->arena);
    device_zero(device, d->workspace, (size_t)(d->arena + bytes - d->workspace));
    return true;
}

GptDecoder *gpt_decoder_create(Gpt *model, size_t B, const Sampling *sampling) {
    if (B < 1 || B > GPT_DECODER_SEQUENCES) {
        error_set("%zu texts at once were asked for; it can be 1 to %zu", B,
                  (size_t)GPT_DECODER_SEQUENCES);
        return NULL;
    }
    GptDecoder *d = calloc(1, sizeof *d);
    if (!d) {
        error_set("out of host memory");
        return NULL;
    }
    d->model = model;
    d->B = B;
    d->T = model->options.T;
    d->sampling = *sampling;
    if (allocate(d)) return d;
    gpt_decoder_free(d);
    return NULL;
}

static void discard_queued(GptDecoder *d) {
    for (; d->queued > 0; d->queued--) device_receive(d->model->device, d->input, 0);
}

void gpt_decoder_free(GptDecoder *d) {
    if (!d) return;
    discard_queued(d);
    device_synchronize(d->model->device);
    device_graph_free(d->model->device, d->graph);
    device_free(d->model->device, d->arena);
    free(d->window);
    free(d->input);
    free(d);
}

/* --- One token ------------------------------------------------------------------------------ */

static GemvNorm norm_at(const Gpt *model, size_t weight, size_t bias) {
    GemvNorm norm = {param(model, weight), param(model, bias), model->config.layernorm_eps};
    return norm;
}

static void block_step(GptDecoder *d, size_t l) {
    Gpt *model = d->model;
    const Layers *layers = model->layers;
    const Block *b = &model->blocks[l];
    size_t B = d->B, C = model->config.C, NH = model->config.NH;
    GemvNorm ln_1 = norm_at(model, b->ln_1_weight, b->ln_1_bias);
    GemvNorm ln_2 = norm_at(model, b->ln_2_weight, b->ln_2_bias);
    layers->gemv_forward(d->qkv, d->x, &ln_1, param(model, b->qkv_weight),
                         param(model, b->qkv_bias), B, C, 3 * C, GEMV_WRITE, model->device);
    layers->cached_attention_forward(d->att, d->cache + l * B * d->T * 2 * C * model->real, d->qkv,
                                     d->positions, d->workspace, B, d->T, NH, C / NH,
                                     model->device);
    layers->gemv_forward(d->x, d->att, NULL, param(model, b->proj_weight),
                         param(model, b->proj_bias), B, C, C, GEMV_ADD, model->device);
    layers->gemv_forward(d->hidden, d->x, &ln_2, param(model, b->fc_weight),
                         param(model, b->fc_bias), B, C, 4 * C, GEMV_GELU, model->device);
    layers->gemv_forward(d->x, d->hidden, NULL, param(model, b->fcproj_weight),
                         param(model, b->fcproj_bias), B, 4 * C, C, GEMV_ADD, model->device);
}

static void step(void *decoder) {
    GptDecoder *d = decoder;
    Gpt *model = d->model;
    const Layers *layers = model->layers;
    size_t B = d->B, C = model->config.C, V = model->config.V;
    layers->embedding_step(d->x, d->tokens, d->positions, param(model, model->wte),
                           param(model, model->wpe), B, C, model->device);
    for (size_t l = 0; l < model->config.L; l++) block_step(d, l);
    GemvNorm ln_f = norm_at(model, model->ln_f_weight, model->ln_f_bias);
    layers->gemv_head(d->logits, d->x, &ln_f, param(model, model->head), B, C, V, model->device);
    layers->sample_forward(d->tokens, d->positions, d->draws, d->weights, d->logits, B, V,
                           d->sampling, model->device);
}

/* --- Sequences ------------------------------------------------------------------------------ */

static int32_t *window_of(const GptDecoder *d, size_t b) { return d->window + b * (d->T + 1); }

/* Caches all but the newest token of sequence `first`, for it and the count - 1 after it. Lengths
 * are rounded up to few different ones, so that matmul plans are reused: causality hides the
 * padding, and its rows of the cache are overwritten before they are read. */
static void read_window(GptDecoder *d, size_t first, size_t count) {
    size_t n = d->length - 1, padded = 16;
    if (n == 0) return;
    while (padded < n) padded *= 2;
    if (padded > d->T) padded = d->T;
    memset(d->input, 0, padded * sizeof *d->input);
    memcpy(d->input, window_of(d, first), n * sizeof *d->input);
    d->model->cache = (KeyCache){d->cache, d->B, d->T, first, count};
    gpt_forward(d->model, d->input, NULL, 1, padded, GPT_EVALUATE);
    d->model->cache.memory = NULL;
}

/* The device's copy of where the sequences are. */
static void upload_state(GptDecoder *d) {
    for (size_t b = 0; b < d->B; b++) {
        int32_t position = (int32_t)d->length - 1;
        uint64_t draw = d->read;
        device_upload(d->model->device, d->tokens + b, window_of(d, b) + position,
                      sizeof *d->tokens);
        device_upload(d->model->device, d->positions + b, &position, sizeof position);
        device_upload(d->model->device, d->draws + b, &draw, sizeof draw);
    }
}

void gpt_decoder_start(GptDecoder *d, const int32_t *tokens, size_t n) {
    discard_queued(d);
    d->length = n < d->T ? n : d->T;
    d->read = n;
    for (size_t b = 0; b < d->B; b++)
        memcpy(window_of(d, b), tokens + (n - d->length), d->length * sizeof *tokens);
    read_window(d, 0, d->B);
    upload_state(d);
}

/* Drops the older half of a full window. */
static void slide(GptDecoder *d) {
    size_t kept = d->T > 1 ? d->T / 2 : 1;
    for (size_t b = 0; b < d->B; b++)
        memmove(window_of(d, b), window_of(d, b) + (d->length - kept), kept * sizeof *d->window);
    d->length = kept;
    for (size_t b = 0; b < d->B; b++) read_window(d, b, 1);
    upload_state(d);
}

void gpt_decoder_next(GptDecoder *d, int32_t *tokens) {
    Device *device = d->model->device;
    size_t bytes = d->B * sizeof *tokens;
    if (d->length > d->T) slide(d);
    /* Step number k from here reads the token at place length - 1 + k. */
    while (d->queued < device_steps_ahead(device) && d->length + d->queued <= d->T) {
        device_repeat(device, &d->graph, step, d);
        device_fetch(device, d->tokens, bytes);
        d->queued++;
    }
    device_receive(device, tokens, bytes);
    d->queued--;
    for (size_t b = 0; b < d->B; b++) window_of(d, b)[d->length] = tokens[b];
    d->length++;
    d->read++;
}
