/* What the measuring programs share: the device, a training step on random tokens, medians. */
#ifndef DEV_MEASURE_H
#define DEV_MEASURE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/gpt.h"
#include "runtime/error.h"
#include "runtime/log.h"

/* Ends the program as the trainer does after what a user can cause. */
static inline void __attribute__((noreturn)) measure_exit(void) {
    fprintf(stderr, "%s\n", error_message());
    exit(2);
}

static inline void *measure_alloc(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (memory) return memory;
    error_set("not enough host memory: %zu bytes wanted", bytes);
    measure_exit();
}

/* "auto", "cpu" or "cuda". NULL with error_message(). */
static inline Device *measure_open(const char *name) {
    bool cuda = strcmp(name, "cuda") == 0 || (strcmp(name, "auto") == 0 && device_count_gpus() > 0);
    return device_open(cuda ? DEVICE_CUDA : DEVICE_CPU, 0);
}

/* The type that the trainer computes in by default. */
static inline DataType measure_type(const Device *device) {
    return device->type == DEVICE_CUDA && device->architecture >= 80 ? TYPE_BF16 : TYPE_F32;
}

static inline int measure_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values. */
static inline double measure_median(double *values, size_t n) {
    qsort(values, n, sizeof *values, measure_compare);
    return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

/* B·T random tokens; target i is the token after token i. To be freed. */
static inline int32_t *measure_tokens(size_t B, size_t T, size_t V) {
    int32_t *tokens = measure_alloc((B * T + 1) * sizeof *tokens);
    for (size_t i = 0; i <= B * T; i++) {
        uint64_t bits = random_mix(1, i) >> 32;
        tokens[i] = (int32_t)(bits * V >> 32);
    }
    return tokens;
}

/* The seconds of one training step, number `step` from 1, on measure_tokens of this size. */
static inline double measure_step(Gpt *model, const int32_t *tokens, size_t B, size_t T,
                                  uint64_t step, double *loss) {
    const AdamW adamw = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, step};
    double start = log_seconds();
    gpt_zero_gradients(model);
    gpt_forward(model, tokens, tokens + 1, B, T, GPT_TRAIN);
    gpt_backward(model);
    gpt_update(model, adamw);
    *loss = gpt_loss(model);
    device_synchronize(gpt_device(model));
    return log_seconds() - start;
}

#endif
