/* check_gpt DIR [--device=…] [--precision=…] [--attention=…]: the whole model against Hugging Face.
 *
 * DIR is a GPT-2 directory with expected.safetensors (step0.logits, step0.grad.NAME, after3.NAME,
 * stepS.tokens and .targets, greedy.ids) and expected.json (losses, grad_norms_before_clip, adamw),
 * computed in float64. Prints a line for each quantity; exits with 1 if any is off.
 *
 * --only=logits needs but step0.tokens and step0.logits.
 *
 * Tolerances. fp32 rounds each value to 6e-8 and sums of a few hundred lose about two digits: 1e-5
 * on the CPU, 1e-4 on CUDA, whose sums have other orders and whose exponentials are approximate to
 * a few ulp. bf16 rounds to 4e-3 at each of the tens of operations in a row: 5e-2; a flash family
 * may not err more than twice as much as the naive one in the same precision.
 *
 * One part is judged otherwise. A key bias adds the same number to all scores of a query, which the
 * softmax ignores: its exact gradient is 0, what is computed is rounding, and Adam scales rounding
 * up to steps of at most the learning rate. So after three steps the keys' third of c_attn.bias may
 * be off by three times that. */
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/checkpoint.h"
#include "gpt/decode.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/flags.h"
#include "runtime/safetensors.h"
#include "test/compare.h"

enum { STEPS = 3, QUANTITIES = 4096, GREEDY_PROMPT = 8 };

static const char *device_flag = "cpu", *precision_flag = "fp32", *attention_flag = "auto",
                  *only_flag = "all";
static Flag flags[] = {
    {"device", FLAG_CHOICE, &device_flag, 0, 0, "cpu|cuda", "where to compute", 0},
    {"precision", FLAG_CHOICE, &precision_flag, 0, 0, "fp32|bf16", "type of tensors", 0},
    {"attention", FLAG_CHOICE, &attention_flag, 0, 0, "auto|naive|flash_v1|flash_mma|flash_hopper",
     "kernels", 0},
    {"only", FLAG_CHOICE, &only_flag, 0, 0, "all|logits", "what to compare", 0},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, 0}};

/* The run that is judged, and what it is judged by. */
typedef struct {
    const char *directory;
    Safetensors *expected;
    cJSON *json;
    Device *device;
    DataType type;
    double tolerance;
    bool print;
    double errors[QUANTITIES]; /* in the order in which they are compared */
    const double *yardstick;   /* the naive family's errors, or NULL */
    size_t count;
    bool failed;
} Check;

static void die(const char *message) {
    fprintf(stderr, "check_gpt: %s\n", message);
    exit(2);
}

static void judge(Check *check, const char *name, double error) {
    double tolerance = check->tolerance;
    if (check->count >= QUANTITIES) die("too many tensors");
    /* Half the tolerance of one rounding: below that, the ratio of two errors means nothing. */
    if (check->yardstick)
        tolerance = fmin(tolerance, fmax(2 * check->yardstick[check->count], 2e-3));
    check->errors[check->count++] = error;
    if (check->print && !compare(name, error, tolerance)) check->failed = true;
}

static float *read_floats(Check *check, const char *name, size_t elements) {
    const SafetensorsTensor *tensor = safetensors_find(check->expected, name);
    if (!tensor || tensor->elements != elements)
        die("expected.safetensors lacks a tensor of the right size");
    float *values = malloc(elements * sizeof *values);
    if (!values || !safetensors_read_float(check->expected, tensor, 0, elements, values))
        die(error_message());
    return values;
}

static int32_t *read_ids(Check *check, const char *name, size_t *B, size_t *T) {
    const SafetensorsTensor *tensor = safetensors_find(check->expected, name);
    if (!tensor || tensor->rank != 2) die("expected.safetensors lacks token ids");
    int32_t *ids = malloc(tensor->elements * sizeof *ids);
    if (!ids || !safetensors_read_int32(check->expected, tensor, 0, tensor->elements, ids))
        die(error_message());
    *B = tensor->shape[0];
    *T = tensor->shape[1];
    return ids;
}

static double number(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item)) die("expected.json lacks a number");
    return item->valuedouble;
}

static double listed(const cJSON *object, const char *name, int i) {
    const cJSON *item = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(object, name), i);
    if (!cJSON_IsNumber(item)) die("expected.json lacks a list of three numbers");
    return item->valuedouble;
}

static void judge_scalar(Check *check, const char *name, int step, double value, double expected) {
    char label[64];
    snprintf(label, sizeof label, "step%d.%s", step, name);
    judge(check, label, fabs(value - expected) / fabs(expected));
}

static void judge_logits(Check *check, Gpt *model, size_t rows) {
    size_t n = rows * gpt_config(model)->V;
    float *expected = read_floats(check, "step0.logits", n), *logits = malloc(n * sizeof *logits);
    if (!logits) die("out of memory");
    gpt_logits(model, 0, rows, logits);
    judge(check, "step0.logits", relative_error_float(logits, expected, n));
    free(expected);
    free(logits);
}

/* Takes the keys' third out of both, if this is a c_attn.bias: its largest deviation is judged
 * alone. */
static void judge_key_bias(Check *check, const GptTensor *tensor, float *values, float *expected) {
    const char *ending = strstr(tensor->name, ".c_attn.bias");
    if (!ending) return;
    double lr = number(cJSON_GetObjectItemCaseSensitive(check->json, "adamw"), "lr"), largest = 0;
    for (size_t i = tensor->elements / 3; i < tensor->elements / 3 * 2; i++) {
        double deviation = fabs((double)values[i] - expected[i]);
        if (!(deviation <= largest)) largest = deviation;
        values[i] = expected[i] = 0;
    }
    if (check->print &&
        !compare("  its key biases, in steps of the learning rate", largest / lr, STEPS))
        check->failed = true;
}

static void judge_tensors(Check *check, Gpt *model, GptArena arena, const char *prefix) {
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        char name[128];
        snprintf(name, sizeof name, "%s.transformer.%s", prefix, tensor->name);
        float *expected = read_floats(check, name, tensor->elements);
        float *values = malloc(tensor->elements * sizeof *values);
        if (!values) die("out of memory");
        gpt_read(model, arena, tensor, values);
        if (arena == GPT_PARAMETERS) judge_key_bias(check, tensor, values, expected);
        judge(check, name, relative_error_float(values, expected, tensor->elements));
        free(expected);
        free(values);
    }
}

static void judge_steps(Check *check, Gpt *model) {
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(check->json, "adamw");
    AdamW adamw = {(float)number(a, "lr"),
                   (float)number(a, "beta1"),
                   (float)number(a, "beta2"),
                   (float)number(a, "eps"),
                   (float)number(a, "weight_decay_2d"),
                   (float)number(a, "clip_grad_norm"),
                   0};
    for (int step = 0; step < STEPS; step++) {
        char name[64];
        size_t B, T;
        snprintf(name, sizeof name, "step%d.tokens", step);
        int32_t *tokens = read_ids(check, name, &B, &T);
        snprintf(name, sizeof name, "step%d.targets", step);
        int32_t *targets = read_ids(check, name, &B, &T);
        gpt_zero_gradients(model);
        gpt_forward(model, tokens, targets, B, T, GPT_TRAIN);
        if (step == 0) judge_logits(check, model, B * T);
        gpt_backward(model);
        if (step == 0) judge_tensors(check, model, GPT_GRADIENTS, "step0.grad");
        adamw.step = (uint64_t)step + 1;
        gpt_update(model, adamw);
        judge_scalar(check, "loss", step, gpt_loss(model), listed(check->json, "losses", step));
        judge_scalar(check, "norm", step, gpt_gradient_norm(model),
                     listed(check->json, "grad_norms_before_clip", step));
        free(tokens);
        free(targets);
    }
    check->yardstick = NULL;
    judge_tensors(check, model, GPT_PARAMETERS, "after3");
}

/* The likeliest tokens after the prompt that greedy.ids begins with are those that follow there. */
static void judge_greedy(Check *check, Gpt *model) {
    size_t B, T, wrong = 0;
    int32_t *ids = read_ids(check, "greedy.ids", &B, &T);
    Sampling greedy = {.temperature = 0};
    GptDecoder *decoder = gpt_decoder_create(model, 1, &greedy);
    if (!decoder) die(error_message());
    gpt_decoder_start(decoder, ids, GREEDY_PROMPT);
    for (size_t n = GREEDY_PROMPT; n < T; n++) {
        int32_t token;
        gpt_decoder_next(decoder, &token);
        wrong += token != ids[n];
    }
    gpt_decoder_free(decoder);
    judge(check, "greedy.wrong_tokens", (double)wrong);
    free(ids);
}

static void run(Check *check, AttentionFamily family) {
    GptConfig config;
    size_t B, T;
    int32_t *tokens = read_ids(check, "step0.tokens", &B, &T);
    bool logits = strcmp(only_flag, "logits") == 0;
    if (!checkpoint_config(check->directory, &config)) die(error_message());
    GptOptions options = {.B = B,
                          .T = T,
                          .type = check->type,
                          .use = logits ? GPT_INFERENCE : GPT_TRAINING,
                          .attention = family,
                          .deterministic = true};
    Gpt *model = gpt_create(&config, &options, check->device, NULL);
    if (!model || !checkpoint_load(check->directory, model)) die(error_message());
    if (logits) {
        gpt_forward(model, tokens, NULL, B, T, GPT_EVALUATE);
        judge_logits(check, model, B * T);
    } else {
        if (check->type == TYPE_F32) judge_greedy(check, model);
        judge_steps(check, model);
    }
    free(tokens);
    gpt_free(model);
}

int main(int argc, char **argv) {
    if (argc < 2 || argv[1][0] == '-')
        die("usage: check_gpt DIR [--device=cpu|cuda] [--precision=fp32|bf16] [--attention=NAME] "
            "[--only=logits]");
    if (!flags_parse(flags, argc - 2, argv + 2)) die(error_message());
    char path[FILE_PATH_BYTES];
    static Check check, naive;
    bool cuda = strcmp(device_flag, "cuda") == 0, bf16 = strcmp(precision_flag, "bf16") == 0;
    check.directory = argv[1];
    check.type = bf16 ? TYPE_BF16 : TYPE_F32;
    check.tolerance = bf16 ? 5e-2 : cuda ? 1e-4 : 1e-5;
    check.device = device_open(cuda ? DEVICE_CUDA : DEVICE_CPU, 0);
    if (!check.device) die(error_message());
    if (!file_join(path, argv[1], "expected.safetensors") ||
        !(check.expected = safetensors_open(path)))
        die(error_message());
    char *text = NULL;
    if (strcmp(only_flag, "all") == 0) {
        text = file_join(path, argv[1], "expected.json") ? file_read(path, 1 << 20, NULL) : NULL;
        if (!text) die(error_message());
        check.json = cJSON_Parse(text);
        if (!check.json) die("expected.json is not JSON");
    }

    AttentionFamily family = attention_by_name(attention_flag);
    if (bf16 && family != ATTENTION_NAIVE) {
        naive = check;
        run(&naive, ATTENTION_NAIVE);
        check.yardstick = naive.errors;
    }
    check.print = true;
    run(&check, family);
    printf("%s: %zu quantities, %s\n", argv[1], check.count,
           check.failed ? "FAILED" : "all within tolerance");
    safetensors_close(check.expected);
    cJSON_Delete(check.json);
    free(text);
    device_close(check.device);
    return check.failed;
}
