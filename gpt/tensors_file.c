/* One arena of a model is one set of names in a file: "transformer.NAME" for the parameters (an
 * untied head alone has no such prefix), "m.NAME" and "v.NAME" for the optimizer. Tensors pass
 * through one buffer of the largest one's size. */
#include "gpt/tensors_file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/config.h"
#include "runtime/error.h"
#include "runtime/safetensors.h"

#define MODEL_PREFIX "transformer."

typedef struct {
    GptArena arena;
    const char *prefix;
} Part;
static const Part model_part = {GPT_PARAMETERS, MODEL_PREFIX};
static const Part optimizer_parts[] = {{GPT_ADAM_M, "m."}, {GPT_ADAM_V, "v."}};

enum { NAME_BYTES = sizeof((GptTensor *)0)->name + sizeof MODEL_PREFIX };

static void full_name(char name[NAME_BYTES], const Part *part, const GptTensor *tensor) {
    bool bare = part->arena == GPT_PARAMETERS && !strcmp(tensor->name, GPT_HEAD);
    snprintf(name, NAME_BYTES, "%s%s", bare ? "" : part->prefix, tensor->name);
}

float *tensors_buffer(const Gpt *model) {
    size_t largest = 0;
    for (size_t i = 0; i < gpt_tensors(model); i++)
        if (gpt_tensor(model, i)->elements > largest) largest = gpt_tensor(model, i)->elements;
    float *values = malloc(largest * sizeof *values);
    if (!values) error_set("no memory for a tensor of %zu floats", largest);
    return values;
}

/* --- Writing -------------------------------------------------------------------------------- */

/* Whether every parameter stays finite as a half. */
static bool check_half(const Gpt *model) {
    float *values = tensors_buffer(model);
    bool good = values != NULL;
    for (size_t i = 0; good && i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        gpt_read(model, GPT_PARAMETERS, tensor, values);
        for (size_t j = 0; good && j < tensor->elements; j++)
            good = !(fabsf(values[j]) >= 65520 && isfinite(values[j])) ||
                   error_set("%s holds %g, but fp16 ends at 65504; fp32 and bf16 hold it",
                             tensor->name, values[j]);
    }
    free(values);
    return good;
}

static bool write_parts(const char *path, const Gpt *model, const Part *parts, size_t n_parts,
                        const char *dtype) {
    SafetensorsWriter *writer = safetensors_writer(path);
    float *values = tensors_buffer(model);
    bool good = writer && values;
    for (size_t p = 0; good && p < n_parts; p++)
        for (size_t i = 0; i < gpt_tensors(model); i++) {
            const GptTensor *tensor = gpt_tensor(model, i);
            char name[NAME_BYTES];
            full_name(name, &parts[p], tensor);
            safetensors_declare(writer, name, dtype, tensor->rank, tensor->shape);
        }
    good = good && safetensors_begin(writer);
    for (size_t p = 0; good && p < n_parts; p++)
        for (size_t i = 0; good && i < gpt_tensors(model); i++) {
            const GptTensor *tensor = gpt_tensor(model, i);
            gpt_read(model, parts[p].arena, tensor, values);
            good = safetensors_write_float(writer, dtype, values, tensor->elements);
        }
    free(values);
    /* After a failure, finish cleans up and the sentence of that failure stays. */
    return writer && safetensors_finish(writer) && good;
}

bool tensors_save_model(const char *path, const Gpt *model, const char *dtype) {
    return (strcmp(dtype, "F16") != 0 || check_half(model)) &&
           write_parts(path, model, &model_part, 1, dtype);
}

bool tensors_save_optimizer(const char *path, const Gpt *model) {
    return write_parts(path, model, optimizer_parts, 2, "F32");
}

/* --- Reading -------------------------------------------------------------------------------- */

static bool same_shape(const GptTensor *a, const SafetensorsTensor *b) {
    if (a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->shape[i] != b->shape[i]) return false;
    return true;
}

/* "(65, 128)" */
static void format_shape(char *text, size_t bytes, int rank, const size_t *shape) {
    size_t used = (size_t)snprintf(text, bytes, "(");
    for (int i = 0; i < rank && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%zu", i ? ", " : "", shape[i]);
    if (used < bytes) snprintf(text + used, bytes - used, ")");
}

/* The tensor of the file that belongs to one of the model's; NULL with error_message() if it is not
 * there, or not of the right shape or type. Parameters may lack their prefix. */
static const SafetensorsTensor *match(const Safetensors *file, const char *path, const Part *part,
                                      const GptTensor *tensor) {
    char name[NAME_BYTES], expected[64], found[192];
    full_name(name, part, tensor);
    format_shape(expected, sizeof expected, tensor->rank, tensor->shape);
    bool bare = part->arena == GPT_PARAMETERS && strcmp(name, tensor->name) != 0;
    const SafetensorsTensor *with = safetensors_find(file, name);
    const SafetensorsTensor *without = bare ? safetensors_find(file, tensor->name) : NULL;
    const SafetensorsTensor *stored = with ? with : without;
    if (!stored) {
        error_set("%s has no tensor %s; this model needs one of shape %s", path, tensor->name,
                  expected);
        return NULL;
    }
    if (with && without) {
        error_set("%s has both %s and %s", path, name, tensor->name);
        return NULL;
    }
    if (!same_shape(tensor, stored)) {
        format_shape(found, sizeof found, stored->rank, stored->shape);
        error_set("%s: %s has shape %s; this model needs %s", path, stored->name, found, expected);
        return NULL;
    }
    if (strcmp(stored->dtype, "F32") && strcmp(stored->dtype, "F16") &&
        strcmp(stored->dtype, "BF16")) {
        error_set("%s: %s has dtype %s; F32, F16 or BF16 is needed", path, stored->name,
                  stored->dtype);
        return NULL;
    }
    return stored;
}

static bool check_part(const Safetensors *file, const char *path, const Gpt *model,
                       const Part *part) {
    for (size_t i = 0; i < gpt_tensors(model); i++)
        if (!match(file, path, part, gpt_tensor(model, i))) return false;
    return true;
}

static bool load_part(const Safetensors *file, const char *path, Gpt *model, const Part *part,
                      float *values) {
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        const SafetensorsTensor *stored = match(file, path, part, tensor);
        if (!stored) return false;
        if (!safetensors_read_float(file, stored, 0, stored->elements, values))
            return error_set("%s; the model is half loaded and must not be used", error_message());
        gpt_write(model, part->arena, tensor, values);
    }
    return true;
}

/* The causal mask that older files store: h.N.attn.bias and h.N.attn.masked_bias. */
static bool is_mask(const char *name) {
    int end = 0;
    sscanf(name, "h.%*u.attn.%n", &end);
    return end > 0 && (!strcmp(name + end, "bias") || !strcmp(name + end, "masked_bias"));
}

/* A head beside a configuration that ties it to the token embedding must be the same as that. */
static bool check_tied(const Safetensors *file, const char *path, const SafetensorsTensor *head) {
    const SafetensorsTensor *wte = safetensors_find(file, MODEL_PREFIX "wte.weight");
    if (!wte) wte = safetensors_find(file, "wte.weight");
    bool same =
        wte && head->rank == wte->rank && !memcmp(head->shape, wte->shape, sizeof head->shape);
    enum { PIECE = 8192 };
    float a[PIECE], b[PIECE];
    for (size_t i = 0; same && i < head->elements; i += PIECE) {
        size_t n = head->elements - i < PIECE ? head->elements - i : PIECE;
        if (!safetensors_read_float(file, head, i, n, a) ||
            !safetensors_read_float(file, wte, i, n, b))
            return false;
        same = !memcmp(a, b, n * sizeof *a);
    }
    return same || error_set(
                       "%s: %s differs from wte.weight, to which config.json ties it; for a "
                       "head of its own, set \"tie_word_embeddings\": false there",
                       path, head->name);
}

static bool check_other(const Safetensors *file, const char *path, const Gpt *model,
                        const SafetensorsTensor *stored) {
    const char *name = stored->name;
    if (!strncmp(name, MODEL_PREFIX, strlen(MODEL_PREFIX))) name += strlen(MODEL_PREFIX);
    if (is_mask(name)) return true;
    if (strcmp(stored->name, GPT_HEAD) != 0)
        return error_set("%s has a tensor %.80s, which a GPT-2 of %zu layers does not have", path,
                         stored->name, gpt_config(model)->L);
    return check_tied(file, path, stored);
}

/* What is in the file beyond the model's tensors, all of which check_part has found there, must be
 * known to be of no account. */
static bool check_others(const Safetensors *file, const char *path, const Gpt *model) {
    size_t count = safetensors_count(file);
    bool *taken = calloc(count, sizeof *taken);
    bool good = taken || error_set("no memory to check the tensors of %s", path);
    for (size_t i = 0; good && i < gpt_tensors(model); i++)
        taken[match(file, path, &model_part, gpt_tensor(model, i)) - safetensors_at(file, 0)] =
            true;
    for (size_t i = 0; good && i < count; i++)
        good = taken[i] || check_other(file, path, model, safetensors_at(file, i));
    free(taken);
    return good;
}

bool tensors_load_model(const char *path, Gpt *model) {
    size_t length = strlen(path);
    bool index = length >= 5 && !strcmp(path + length - 5, ".json");
    Safetensors *file = index ? safetensors_open_index(path) : safetensors_open(path);
    if (!file) return false;
    float *values = tensors_buffer(model);
    bool good = values && check_part(file, path, model, &model_part) &&
                check_others(file, path, model) &&
                load_part(file, path, model, &model_part, values);
    free(values);
    safetensors_close(file);
    return good;
}

bool tensors_load_optimizer(const char *path, Gpt *model) {
    Safetensors *file = safetensors_open(path);
    if (!file) return false;
    float *values = tensors_buffer(model);
    bool good = values != NULL;
    for (int i = 0; good && i < 2; i++) good = check_part(file, path, model, &optimizer_parts[i]);
    if (good && safetensors_count(file) != 2 * gpt_tensors(model))
        good = error_set("%s has %zu tensors; this model's optimizer has %zu", path,
                         safetensors_count(file), 2 * gpt_tensors(model));
    for (int i = 0; good && i < 2; i++)
        good = load_part(file, path, model, &optimizer_parts[i], values);
    free(values);
    safetensors_close(file);
    return good;
}
