/* Checkpoints; see checkpoint.h. Parameters, then the optimizer, pass through one buffer of the
 * largest tensor's size. trainer.json is written last and carries the size and checksum of the
 * files that it belongs with, so a directory put together from two checkpoints is noticed. */
#include "gpt/checkpoint.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/config_json.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/safetensors.h"

#define CONFIG_FILE "config.json"
#define GENERATION_FILE "generation_config.json"
#define MODEL_FILE "model.safetensors"
#define OPTIMIZER_FILE "optimizer.safetensors"
#define TRAINER_FILE "trainer.json"
static const char *const own_files[] = {CONFIG_FILE,    GENERATION_FILE, MODEL_FILE,
                                        OPTIMIZER_FILE, TRAINER_FILE,    NULL};

#define TRAINER_FORMAT 1
#define MODEL_PREFIX "transformer."

/* One arena of the model in a safetensors file: its tensors' names there begin with prefix. */
typedef struct {
    GptArena arena;
    const char *prefix;
} Part;
static const Part model_part = {GPT_PARAMETERS, MODEL_PREFIX};
static const Part optimizer_parts[] = {{GPT_ADAM_M, "m."}, {GPT_ADAM_V, "v."}};

enum { NAME_BYTES = sizeof((GptTensor *)0)->name + sizeof MODEL_PREFIX };

static void full_name(char name[NAME_BYTES], const char *prefix, const GptTensor *tensor) {
    snprintf(name, NAME_BYTES, "%s%s", prefix, tensor->name);
}

/* A buffer for any one tensor of the model. */
static float *tensor_buffer(const Gpt *model) {
    size_t largest = 0;
    for (size_t i = 0; i < gpt_tensors(model); i++)
        if (gpt_tensor(model, i)->elements > largest) largest = gpt_tensor(model, i)->elements;
    float *values = malloc(largest * sizeof *values);
    if (!values) error_set("no memory for a tensor of %zu floats", largest);
    return values;
}

/* ---------------------------------------------------------------------------- writing */

static bool write_tensors(const char *path, const Gpt *model, const Part *parts, size_t n_parts) {
    SafetensorsWriter *writer = safetensors_writer(path);
    float *values = tensor_buffer(model);
    bool good = writer && values;
    for (size_t p = 0; good && p < n_parts; p++)
        for (size_t i = 0; i < gpt_tensors(model); i++) {
            const GptTensor *tensor = gpt_tensor(model, i);
            char name[NAME_BYTES];
            full_name(name, parts[p].prefix, tensor);
            safetensors_declare(writer, name, "F32", tensor->rank, tensor->shape);
        }
    good = good && safetensors_begin(writer);
    for (size_t p = 0; good && p < n_parts; p++)
        for (size_t i = 0; good && i < gpt_tensors(model); i++) {
            const GptTensor *tensor = gpt_tensor(model, i);
            gpt_read(model, parts[p].arena, tensor, values);
            good = safetensors_write(writer, values, tensor->elements * sizeof *values);
        }
    free(values);
    /* After a failure, finish cleans up and the sentence of that failure stays. */
    return writer && safetensors_finish(writer) && good;
}

/* 64-bit integers are strings in trainer.json: JSON's numbers are doubles to most readers. */
static bool add_u64(cJSON *json, const char *field, uint64_t value, const char *format) {
    char text[32];
    snprintf(text, sizeof text, format, value);
    return cJSON_AddStringToObject(json, field, text) != NULL;
}

/* Records a file of the directory, by its name there. */
static bool add_file(cJSON *files, const char *directory, const char *name) {
    char path[FILE_PATH_BYTES];
    size_t bytes;
    uint64_t checksum;
    if (!file_join(path, directory, name) || !file_checksum(path, &bytes, &checksum)) return false;
    cJSON *entry = cJSON_AddObjectToObject(files, name);
    return (add_u64(entry, "bytes", bytes, "%" PRIu64) &&
            add_u64(entry, "checksum", checksum, "%016" PRIx64)) ||
           error_set("no memory for the record of %s", path);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool write_trainer(const char *directory, const TrainerState *state, const char *flags,
                          const char *const *extra_files) {
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, TRAINER_FILE)) return false;
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(json, "format", TRAINER_FORMAT);
    add_u64(json, "step", state->step, "%" PRIu64);
    add_u64(json, "seed", state->seed, "%" PRIu64);
    add_u64(json, "tokens", state->tokens, "%" PRIu64);
    add_u64(json, "stale_validations", state->stale_validations, "%" PRIu64);
    if (isfinite(state->best_loss))
        cJSON_AddNumberToObject(json, "best_loss", state->best_loss);
    else
        cJSON_AddNullToObject(json, "best_loss");
    if (flags) cJSON_AddStringToObject(json, "flags", flags);
    cJSON *files = cJSON_AddObjectToObject(json, "files");
    bool good = add_file(files, directory, CONFIG_FILE) && add_file(files, directory, MODEL_FILE) &&
                add_file(files, directory, OPTIMIZER_FILE);
    for (; good && extra_files && *extra_files; extra_files++)
        good = add_file(files, directory, base_name(*extra_files));

    char *text = good ? cJSON_Print(json) : NULL;
    if (good && !text) error_set("no memory to write %s", path);
    good = text && file_write(path, text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(json);
    return good;
}

static bool write_files(const char *directory, const Gpt *model, const TrainerState *state,
                        const char *flags, const char *const *extra_files) {
    /* Token ids are given so that generate() does not take GPT-2's; see config_json_write. */
    static const char generation[] = "{\n\t\"bos_token_id\": null,\n\t\"eos_token_id\": null\n}\n";
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, CONFIG_FILE) || !config_json_write(path, gpt_config(model)) ||
        !file_join(path, directory, GENERATION_FILE) ||
        !file_write(path, generation, sizeof generation - 1))
        return false;
    for (const char *const *file = extra_files; file && *file; file++) {
        for (const char *const *own = own_files; *own; own++)
            if (!strcmp(base_name(*file), *own))
                return error_set("%s cannot be kept in a checkpoint, which has its own %s", *file,
                                 *own);
        if (!file_join(path, directory, base_name(*file)) || !file_copy(*file, path)) return false;
    }
    if (!file_join(path, directory, MODEL_FILE) || !write_tensors(path, model, &model_part, 1))
        return false;
    return !state || (file_join(path, directory, OPTIMIZER_FILE) &&
                      write_tensors(path, model, optimizer_parts, 2) &&
                      write_trainer(directory, state, flags, extra_files));
}

static bool check_optimizer(const Gpt *model) {
    return gpt_options(model)->use == GPT_TRAINING ||
           error_set("a model made for inference has no optimizer to save or resume");
}

bool checkpoint_save(const char *directory, const Gpt *model, const TrainerState *state,
                     const char *flags, const char *const *extra_files) {
    char staging[FILE_PATH_BYTES];
    if (state && !check_optimizer(model)) return false;
    if (!directory_replace_begin(directory, staging)) return false;
    if (write_files(staging, model, state, flags, extra_files) &&
        directory_replace_commit(directory, own_files))
        return true;
    directory_replace_abandon(directory);
    return false;
}

/* ---------------------------------------------------------------------------- reading */

bool checkpoint_path(const char *directory, char *path, size_t bytes) {
    char found[FILE_PATH_BYTES], config[FILE_PATH_BYTES];
    if (!directory_replace_find(directory, found) || !file_join(config, found, CONFIG_FILE))
        return false;
    if (!file_exists(config))
        return error_set("%s is not a checkpoint: it has no " CONFIG_FILE, found);
    int n = snprintf(path, bytes, "%s", found);
    return (n >= 0 && (size_t)n < bytes) || error_set("the path %.60s... is too long", found);
}

/* The path of one file of the checkpoint. */
static bool checkpoint_file(const char *directory, const char *name, char path[FILE_PATH_BYTES]) {
    char found[FILE_PATH_BYTES];
    return checkpoint_path(directory, found, sizeof found) && file_join(path, found, name);
}

bool checkpoint_config(const char *directory, GptConfig *config) {
    char path[FILE_PATH_BYTES];
    return checkpoint_file(directory, CONFIG_FILE, path) && config_json_read(path, config);
}

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
 * there, or not of the right shape or type. An absent prefix is allowed where `bare` says so. */
static const SafetensorsTensor *match(const Safetensors *file, const char *path, const char *prefix,
                                      bool bare, const GptTensor *tensor) {
    char name[NAME_BYTES], expected[64], found[192];
    full_name(name, prefix, tensor);
    format_shape(expected, sizeof expected, tensor->rank, tensor->shape);
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
                       const Part *part, bool bare) {
    for (size_t i = 0; i < gpt_tensors(model); i++)
        if (!match(file, path, part->prefix, bare, gpt_tensor(model, i))) return false;
    return true;
}

static bool load_part(const Safetensors *file, const char *path, Gpt *model, const Part *part,
                      bool bare, float *values) {
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        const SafetensorsTensor *stored = match(file, path, part->prefix, bare, tensor);
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

/* The head is tied to the token embedding: a stored one must be the same. */
static bool check_head(const Safetensors *file, const char *path, const SafetensorsTensor *head) {
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
                       "%s: %s differs from wte.weight; only a head tied to the token embedding is "
                       "supported",
                       path, head->name);
}

static bool check_other(const Safetensors *file, const char *path, const Gpt *model,
                        const SafetensorsTensor *stored) {
    const char *name = stored->name;
    if (!strncmp(name, MODEL_PREFIX, strlen(MODEL_PREFIX))) name += strlen(MODEL_PREFIX);
    if (is_mask(name)) return true;
    if (strcmp(stored->name, "lm_head.weight") != 0)
        return error_set("%s has a tensor %.80s, which a GPT-2 of %zu layers does not have", path,
                         stored->name, gpt_config(model)->L);
    return check_head(file, path, stored);
}

/* What is in the file beyond the model's tensors, all of which check_part has found there, must be
 * known to be of no account. */
static bool check_others(const Safetensors *file, const char *path, const Gpt *model) {
    size_t count = safetensors_count(file);
    bool *taken = calloc(count, sizeof *taken);
    bool good = taken || error_set("no memory to check the tensors of %s", path);
    for (size_t i = 0; good && i < gpt_tensors(model); i++)
        taken[match(file, path, MODEL_PREFIX, /*bare=*/true, gpt_tensor(model, i)) -
              safetensors_at(file, 0)] = true;
    for (size_t i = 0; good && i < count; i++)
        good = taken[i] || check_other(file, path, model, safetensors_at(file, i));
    free(taken);
    return good;
}

/* Opens the parameters, or says in what other form this directory holds them. */
static Safetensors *open_model(const char *directory, char path[FILE_PATH_BYTES]) {
    static const struct {
        const char *name, *sentence;
    } others[] = {
        {MODEL_FILE ".index.json",
         "its parameters are spread over several files, which is not supported "
         "yet; save it again in transformers with max_shard_size=\"100GB\""},
        {"pytorch_model.bin",
         "it holds a PyTorch pickle, which is not read; save it again with "
         "save_pretrained of a current transformers"},
    };
    if (!checkpoint_file(directory, MODEL_FILE, path)) return NULL;
    if (file_exists(path)) return safetensors_open(path);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        char other[FILE_PATH_BYTES];
        if (!checkpoint_file(directory, others[i].name, other)) return NULL;
        if (file_exists(other)) {
            error_set("%s has no " MODEL_FILE ": %s", directory, others[i].sentence);
            return NULL;
        }
    }
    error_set("%s has no " MODEL_FILE, directory);
    return NULL;
}

/* What the shapes of the tensors do not show. */
static bool check_config(const char *directory, const Gpt *model) {
    GptConfig stored;
    const GptConfig *config = gpt_config(model);
    if (!checkpoint_config(directory, &stored)) return false;
    return (stored.NH == config->NH && stored.layernorm_eps == config->layernorm_eps) ||
           error_set("%s has %zu heads and a layernorm epsilon of %g; this model has %zu and %g",
                     directory, stored.NH, stored.layernorm_eps, config->NH, config->layernorm_eps);
}

bool checkpoint_load(const char *directory, Gpt *model) {
    char path[FILE_PATH_BYTES];
    if (!check_config(directory, model)) return false;
    Safetensors *file = open_model(directory, path);
    if (!file) return false;
    float *values = tensor_buffer(model);
    bool good = values && check_part(file, path, model, &model_part, /*bare=*/true) &&
                check_others(file, path, model) &&
                load_part(file, path, model, &model_part, /*bare=*/true, values);
    free(values);
    safetensors_close(file);
    return good;
}

static bool get_u64(const cJSON *json, const char *field, int base, uint64_t *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, field);
    if (!cJSON_IsString(item) || !*item->valuestring ||
        item->valuestring[strspn(item->valuestring, "0123456789abcdef")])
        return false;
    char *end;
    errno = 0;
    *value = strtoull(item->valuestring, &end, base);
    return !*end && errno != ERANGE;
}

/* The files that the trainer's state belongs with must be those of the same save. */
static bool check_files(const char *directory, const cJSON *json) {
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(json, "files"), *entry;
    if (!cJSON_GetObjectItemCaseSensitive(files, MODEL_FILE) ||
        !cJSON_GetObjectItemCaseSensitive(files, OPTIMIZER_FILE))
        return error_set("%s: the " TRAINER_FILE " does not name the files it belongs with",
                         directory);
    cJSON_ArrayForEach(entry, files) {
        char path[FILE_PATH_BYTES];
        uint64_t bytes, checksum, found_checksum;
        size_t found_bytes;
        if (strchr(entry->string, '/') || !get_u64(entry, "bytes", 10, &bytes) ||
            !get_u64(entry, "checksum", 16, &checksum))
            return error_set("%s: the files' record in " TRAINER_FILE " is damaged", directory);
        if (!file_join(path, directory, entry->string) ||
            !file_checksum(path, &found_bytes, &found_checksum))
            return false;
        if (found_bytes != bytes)
            return error_set("%s has %zu bytes; %" PRIu64
                             " were saved: the file was cut or changed",
                             path, found_bytes, bytes);
        if (found_checksum != checksum)
            return error_set("%s is not what was saved with this " TRAINER_FILE
                             " (checksum %016" PRIx64 ", expected %016" PRIx64
                             "); to go on from its parameters alone, start a new "
                             "run from it",
                             path, found_checksum, checksum);
    }
    return true;
}

static bool read_state(const char *path, const cJSON *json, TrainerState *state) {
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(json, "format");
    const cJSON *best = cJSON_GetObjectItemCaseSensitive(json, "best_loss");
    if (!cJSON_IsNumber(format))
        return error_set("%s is not the record of a training run: it has no format number", path);
    if (format->valuedouble != TRAINER_FORMAT)
        return error_set("%s has format %g; this program reads format %d", path,
                         format->valuedouble, TRAINER_FORMAT);
    if (!get_u64(json, "step", 10, &state->step) ||
        !get_u64(json, "seed", 10, &state->seed) || !get_u64(json, "tokens", 10, &state->tokens) ||
        !get_u64(json, "stale_validations", 10, &state->stale_validations) ||
        !(cJSON_IsNull(best) || cJSON_IsNumber(best)))
        return error_set(
            "%s is damaged: step, seed, tokens, "
            "stale_validations and best_loss are needed",
            path);
    state->best_loss = cJSON_IsNumber(best) ? best->valuedouble : INFINITY;
    return true;
}

static bool load_optimizer(const char *path, Gpt *model) {
    Safetensors *file = safetensors_open(path);
    if (!file) return false;
    float *values = tensor_buffer(model);
    bool good = values != NULL;
    for (int i = 0; good && i < 2; i++)
        good = check_part(file, path, model, &optimizer_parts[i], /*bare=*/false);
    if (good && safetensors_count(file) != 2 * gpt_tensors(model))
        good = error_set("%s has %zu tensors; this model's optimizer has %zu", path,
                         safetensors_count(file), 2 * gpt_tensors(model));
    for (int i = 0; good && i < 2; i++)
        good = load_part(file, path, model, &optimizer_parts[i], /*bare=*/false, values);
    free(values);
    safetensors_close(file);
    return good;
}

bool checkpoint_resume(const char *directory, Gpt *model, TrainerState *state) {
    char found[FILE_PATH_BYTES], trainer[FILE_PATH_BYTES], optimizer[FILE_PATH_BYTES];
    if (!check_optimizer(model) || !checkpoint_path(directory, found, sizeof found) ||
        !file_join(trainer, found, TRAINER_FILE) || !file_join(optimizer, found, OPTIMIZER_FILE))
        return false;
    if (!file_exists(trainer) || !file_exists(optimizer))
        return error_set(
            "%s holds a model but not the state of its training (%s is missing); start a new "
            "run from it instead",
            found, file_exists(trainer) ? OPTIMIZER_FILE : TRAINER_FILE);
    char *text = file_read(trainer, (size_t)16 << 20, NULL);
    if (!text) return false;
    cJSON *json = cJSON_ParseWithOpts(text, NULL, /*terminated=*/1);
    free(text);
    TrainerState loaded;
    bool good = cJSON_IsObject(json) || error_set("%s is not a JSON object", trainer);
    good = good && read_state(trainer, json, &loaded) && check_files(found, json) &&
           load_optimizer(optimizer, model);
    cJSON_Delete(json);
    if (good) *state = loaded;
    return good;
}
