/* The one place that decides how long an activation lives. */
#include "gpt/activations.h"

/* Rows of logits at a time: the head's matmuls lose under 1% to whole batches at 16384 rows, and the
 * logits of 124M at 65,536 tokens shrink from 6.6 to 1.6 GB. */
#define HEAD_CHUNK 16384

typedef struct {
    char *base;
    size_t used;
} Cursor;

static char *take(Cursor *cursor, size_t bytes) {
    char *place = cursor->base ? cursor->base + cursor->used : NULL;
    cursor->used += (bytes + 255) / 256 * 256;
    return place;
}

static PerLayer take_layers(Cursor *cursor, size_t bytes, size_t layers, bool kept) {
    size_t stride = (bytes + 255) / 256 * 256;
    PerLayer tensor = {take(cursor, stride * (kept ? layers : 1)), kept ? stride : 0};
    return tensor;
}

size_t gpt_activations(Activations *a, const GptConfig *config, const GptOptions *options,
                       char *base, size_t *lse_bytes) {
    Cursor cursor = {base, 0};
    size_t N = options->B * options->T, L = config->L, C = config->C;
    size_t real = type_bytes(options->type), acc = type_bytes(type_accumulator(options->type));
    bool training = options->use == GPT_TRAINING;
    bool keep_block = training && options->recompute != RECOMPUTE_BLOCK;
    bool keep_gelu = training && options->recompute == RECOMPUTE_NONE;

    a->chunk = N < HEAD_CHUNK ? N : HEAD_CHUNK;
    a->tokens = (int32_t *)take(&cursor, N * sizeof(int32_t));
    a->targets = (int32_t *)take(&cursor, N * sizeof(int32_t));
    a->x = take_layers(&cursor, N * C * real, L + 1, training);
    a->ln_1 = take_layers(&cursor, N * C * real, L, keep_block);
    a->ln_1_mean = take_layers(&cursor, N * acc, L, keep_block);
    a->ln_1_rstd = take_layers(&cursor, N * acc, L, keep_block);
    a->qkv = take_layers(&cursor, N * 3 * C * real, L, keep_block);
    a->att = take_layers(&cursor, N * C * real, L, keep_block);
    size_t before_lse = cursor.used;
    a->lse = take_layers(&cursor, N * config->NH * acc, L, keep_block);
    *lse_bytes = cursor.used - before_lse;
    a->mid = take_layers(&cursor, N * C * real, L, keep_block);
    a->ln_2 = take_layers(&cursor, N * C * real, L, keep_block);
    a->ln_2_mean = take_layers(&cursor, N * acc, L, keep_block);
    a->ln_2_rstd = take_layers(&cursor, N * acc, L, keep_block);
    a->fc = take_layers(&cursor, N * 4 * C * real, L, keep_block);
    a->gelu = take_layers(&cursor, N * 4 * C * real, L, keep_gelu);
    a->branch = take(&cursor, N * C * real);
    a->ln_f = take(&cursor, N * C * real);
    a->ln_f_mean = take(&cursor, N * acc);
    a->ln_f_rstd = take(&cursor, N * acc);
    a->logits = take(&cursor, a->chunk * gpt_padded_vocabulary(config) * real);
    a->losses = take(&cursor, N * acc);
    a->eval_loss = take(&cursor, acc);
    a->norm = take(&cursor, acc);
    if (training) {
        a->dx = take(&cursor, N * C * real);
        a->dnorm = take(&cursor, N * C * real);
        a->dbranch = take(&cursor, config->residual_dropout > 0 ? N * C * real : 0);
        a->datt = take(&cursor, N * C * real);
        a->dwide = take(&cursor, N * 4 * C * real);
    }
    return cursor.used;
}
