#include "test/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/random.h"

Gpt *create_model(const GptConfig *config, const GptOptions *options, Device *device) {
    Gpt *model = gpt_create(config, options, device, NULL);
    if (!model) fail_msg("%s", error_message());
    return model;
}

void randomize(Gpt *model) {
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        float *values = malloc(tensor->elements * sizeof *values);
        random_normal(values, tensor->elements, i, 0.3f);
        gpt_write(model, GPT_PARAMETERS, tensor, values);
        free(values);
    }
}

Gpt *random_model(Device *device, GptConfig config, size_t B, DataType type, GptUse use) {
    GptOptions options = {
        .B = B, .T = config.T, .type = type, .use = use, .recompute = RECOMPUTE_BLOCK};
    Gpt *model = create_model(&config, &options, device);
    randomize(model);
    return model;
}

bool same_arena(const Gpt *a, const Gpt *b, GptArena arena) {
    bool same = gpt_tensors(a) == gpt_tensors(b);
    for (size_t i = 0; same && i < gpt_tensors(a); i++) {
        size_t bytes = gpt_tensor(a, i)->elements * sizeof(float);
        float *x = malloc(bytes), *y = malloc(bytes);
        gpt_read(a, arena, gpt_tensor(a, i), x);
        gpt_read(b, arena, gpt_tensor(b, i), y);
        same = !memcmp(x, y, bytes);
        free(x);
        free(y);
    }
    return same;
}
