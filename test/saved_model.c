#include "test/saved_model.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/random.h"

const GptConfig config = {.L = 2,
                          .NH = 3,
                          .C = 12,
                          .T = 5,
                          .V = 11,
                          .layernorm_eps = 1e-5f,
                          .embedding_dropout = 0.1f,
                          .residual_dropout = 0.2f,
                          .attention_dropout = 0.3f};
const TrainerState example = {.step = 1000,
                              .stale_validations = 2,
                              .seed = UINT64_MAX,
                              .best_loss = 1.4697265625001,
                              .tokens = 1ull << 63};

char directory[64], other[FILE_PATH_BYTES];
static Device *device;

static void empty_directory(const char *path) {
    DIR *entries = opendir(path);
    if (!entries) return;
    for (struct dirent *entry; (entry = readdir(entries));) {
        char name[FILE_PATH_BYTES];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (!file_join(name, path, entry->d_name)) continue;
        if (unlink(name) != 0) empty_directory(name), rmdir(name);
    }
    closedir(entries);
}

int open_group(void **state) {
    device = device_open(DEVICE_CPU, 0);
    if (!device || enter_scratch(state) != 0) return -1;
    snprintf(directory, sizeof directory, "%s/checkpoint", scratch);
    snprintf(other, sizeof other, "%s/other", scratch);
    return 0;
}

int close_group(void **state) {
    device_close(device);
    return leave_scratch(state);
}

int clean(void **state) {
    (void)state;
    empty_directory(scratch);
    return 0;
}

Gpt *create(const GptConfig *shape, GptUse use) {
    GptOptions options = {
        .B = 1, .T = shape->T, .type = TYPE_F32, .use = use, .attention = ATTENTION_NAIVE};
    return create_model(shape, &options, device);
}

void fill(Gpt *model, GptArena arena, uint64_t key) {
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        uint32_t *bits = malloc(tensor->elements * sizeof *bits);
        for (size_t j = 0; j < tensor->elements; j++)
            bits[j] = (uint32_t)random_mix(random_mix(key, i), j);
        gpt_write(model, arena, tensor, (float *)bits);
        free(bits);
    }
}

Gpt *filled(GptUse use) {
    Gpt *model = create(&config, use);
    fill(model, GPT_PARAMETERS, 1);
    if (use == GPT_TRAINING) fill(model, GPT_ADAM_M, 2), fill(model, GPT_ADAM_V, 3);
    return model;
}

void save(const Gpt *model, const TrainerState *state) {
    if (!checkpoint_save(directory, model, state, NULL, NULL)) fail_msg("%s", error_message());
}

void join(char path[FILE_PATH_BYTES], const char *file) {
    assert_true(file_join(path, directory, file));
}

void write_text(const char *file, const char *text) {
    char path[FILE_PATH_BYTES];
    join(path, file);
    mkdir(directory, 0777);
    assert_true(file_write(path, text, strlen(text)));
}

void assert_exists(const char *path, bool expected) {
    if (file_exists(path) != expected)
        fail_msg("%s %s", path, expected ? "is missing" : "was left");
}
