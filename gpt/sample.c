#include "gpt/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The k-th largest logit; everything below it is left out. */
static float top_k_bound(const float *logits, size_t V, size_t k) {
    float *sorted = malloc(V * sizeof *sorted);
    if (!sorted) error_fatal(__FILE__, __LINE__, "out of host memory");
    memcpy(sorted, logits, V * sizeof *sorted);
    qsort(sorted, V, sizeof *sorted, descending);
    float bound = sorted[k - 1];
    free(sorted);
    return bound;
}

static int32_t draw(const float *logits, size_t V, const Sampling *sampling, size_t n) {
    size_t best = 0;
    for (size_t v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (!isfinite(logits[best])) return -1;
    if (sampling->temperature == 0) return (int32_t)best;
    bool limited = sampling->top_k > 0 && sampling->top_k < V;
    float bound = limited ? top_k_bound(logits, V, sampling->top_k) : -INFINITY;
    double total = 0;
    for (size_t v = 0; v < V; v++)
        if (logits[v] >= bound) total += exp((logits[v] - logits[best]) / sampling->temperature);
    Philox bits = philox(sampling->seed, (uint32_t)n, (uint32_t)((uint64_t)n >> 32), 0, 2);
    double left = random_uniform(bits.word[0]) * total;
    for (size_t v = 0; v < V; v++) {
        if (!(logits[v] >= bound)) continue;
        left -= exp((logits[v] - logits[best]) / sampling->temperature);
        if (left < 0) return (int32_t)v;
    }
    return (int32_t)best; /* rounding left a crumb */
}

int32_t gpt_sample(Gpt *model, const int32_t *tokens, size_t n, const Sampling *sampling) {
    size_t V = gpt_config(model)->V, most = gpt_options(model)->T;
    size_t read = n < most ? n : most, T = 16;
    /* Few different lengths, so that matmul plans are reused: causality hides the padding. */
    while (T < read) T *= 2;
    if (T > most) T = most;
    int32_t *input = calloc(T, sizeof *input);
    float *logits = malloc(V * sizeof *logits);
    if (!input || !logits) error_fatal(__FILE__, __LINE__, "out of host memory");
    memcpy(input, tokens + (n - read), read * sizeof *input);
    gpt_forward(model, input, NULL, 1, T, GPT_EVALUATE);
    gpt_logits(model, read - 1, 1, logits);
    int32_t token = draw(logits, V, sampling, n);
    free(input);
    free(logits);
    return token;
}

bool gpt_write_text(Gpt *model, const Tokenizer *tokenizer, const char *prompt, size_t count,
                    const Sampling *sampling, FILE *file, const volatile sig_atomic_t *stop) {
    size_t n, bytes;
    int32_t *encoded =
        tokenizer_encode(tokenizer, prompt[0] ? prompt : "\n", prompt[0] ? strlen(prompt) : 1, &n);
    if (!encoded && prompt[0]) return false;
    if (!encoded) n = 1;
    int32_t *tokens = realloc(encoded, (n + count) * sizeof *tokens);
    if (!tokens) {
        free(encoded);
        return error_set("out of host memory");
    }
    if (!encoded) tokens[0] = 0;
    fputs(prompt, file);
    for (size_t i = 0; i < count && !(stop && *stop); i++, n++) {
        tokens[n] = gpt_sample(model, tokens, n, sampling);
        if (tokens[n] < 0) {
            free(tokens);
            return error_set("the model's logits are not finite");
        }
        const char *piece = tokenizer_decode(tokenizer, tokens[n], &bytes);
        fwrite(piece, 1, bytes, file);
        fflush(file);
    }
    fputc('\n', file);
    free(tokens);
    return true;
}
