/* Checkpoints; see checkpoint.h. trainer.json is written last, when the files that it speaks of are
 * there. */
#include "gpt/checkpoint.h"

#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gpt/config_json.h"
#include "gpt/generation.h"
#include "gpt/llmc.h"
#include "gpt/tensors_file.h"
#include "gpt/trainer_json.h"
#include "runtime/error.h"
#include "runtime/files.h"

#define CONFIG_FILE "config.json"
#define GENERATION_FILE "generation_config.json"
#define MODEL_FILE "model.safetensors"
#define INDEX_FILE "model.safetensors.index.json"
#define OPTIMIZER_FILE "optimizer.safetensors"
#define TRAINER_FILE "trainer.json"
static const char *const own_files[] = {CONFIG_FILE,    GENERATION_FILE, MODEL_FILE,
                                        OPTIMIZER_FILE, TRAINER_FILE,    NULL};

/* --- Writing -------------------------------------------------------------------------------- */

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* "fp32" as config.json and safetensors call it. */
static const struct {
    const char *name, *torch, *tensors;
} precisions[] = {
    {"fp32", "float32", "F32"}, {"bf16", "bfloat16", "BF16"}, {"fp16", "float16", "F16"}};

static bool write_model(const char *directory, const Gpt *model, const char *precision,
                        const char *const *extra_files) {
    char path[FILE_PATH_BYTES];
    size_t p = 0, kinds = sizeof precisions / sizeof precisions[0];
    while (p < kinds && strcmp(precisions[p].name, precision) != 0) p++;
    if (p == kinds)
        return error_set("a checkpoint holds fp32, bf16 or fp16 numbers, not %s", precision);
    for (const char *const *file = extra_files; file && *file; file++) {
        for (const char *const *own = own_files; *own; own++)
            if (!strcmp(base_name(*file), *own))
                return error_set("%s cannot be kept in a checkpoint, which has its own %s", *file,
                                 *own);
        if (!file_join(path, directory, base_name(*file)) || !file_copy(*file, path)) return false;
    }
    const GptConfig *config = gpt_config(model);
    int32_t end = generation_end(directory, config->V);
    return generation_write(directory, end, config->T) && file_join(path, directory, CONFIG_FILE) &&
           config_json_write(path, config, precisions[p].torch, end) &&
           file_join(path, directory, MODEL_FILE) &&
           tensors_save_model(path, model, precisions[p].tensors);
}

static bool write_training(const char *directory, const Gpt *model, const TrainerState *state,
                           const char *flags, const char *const *extra_files) {
    char optimizer[FILE_PATH_BYTES], trainer[FILE_PATH_BYTES];
    if (!file_join(optimizer, directory, OPTIMIZER_FILE) ||
        !file_join(trainer, directory, TRAINER_FILE) || !tensors_save_optimizer(optimizer, model))
        return false;
    size_t extra = 0, count = 3;
    while (extra_files && extra_files[extra]) extra++;
    const char **names = malloc((count + extra + 1) * sizeof *names);
    if (!names) return error_set("no memory to write %s", trainer);
    names[0] = CONFIG_FILE, names[1] = MODEL_FILE, names[2] = OPTIMIZER_FILE;
    for (size_t i = 0; i < extra; i++) names[count++] = base_name(extra_files[i]);
    names[count] = NULL;
    bool good = trainer_json_write(trainer, directory, names, state, flags);
    free(names);
    return good;
}

static bool check_optimizer(const Gpt *model) {
    return gpt_options(model)->use == GPT_TRAINING ||
           error_set("a model made for inference has no optimizer to save or resume");
}

static bool replace(const char *directory, const Gpt *model, const char *precision,
                    const TrainerState *state, const char *flags, const char *const *extra_files) {
    DirectoryReplacement replacement;
    if (!directory_replace_begin(&replacement, directory)) return false;
    const char *staging = replacement.staging;
    if (write_model(staging, model, precision, extra_files) &&
        (!state || write_training(staging, model, state, flags, extra_files)) &&
        directory_replace_commit(&replacement, own_files))
        return true;
    directory_replace_abandon(&replacement);
    return false;
}

bool checkpoint_save(const char *directory, const Gpt *model, const TrainerState *state,
                     const char *flags, const char *const *extra_files) {
    return (!state || check_optimizer(model)) &&
           replace(directory, model, "fp32", state, flags, extra_files);
}

/* Whether a run keeps its checkpoints by this name, where nothing need be yet. */
static bool is_of_run(const char *directory) {
    static const char *const names[] = {"last",     "best",     "last.old",
                                        "best.old", "last.tmp", "best.tmp"};
    char copy[FILE_PATH_BYTES], flags[FILE_PATH_BYTES];
    size_t i = 0, count = sizeof names / sizeof names[0];
    snprintf(copy, sizeof copy, "%s", directory); /* basename and dirname change what they get */
    const char *name = basename(copy);
    while (i < count && strcmp(name, names[i]) != 0) i++;
    snprintf(copy, sizeof copy, "%s", directory);
    return i < count && file_join(flags, dirname(copy), "flags.txt") && file_exists(flags);
}

/* An export may take the place of an earlier one, and nothing else's: not of a checkpoint of a run,
 * also while that is DIRECTORY.old, nor of files that other programs wrote under the same names. */
static bool check_replaced(const char *directory, const char *const *extra_files) {
    char path[FILE_PATH_BYTES], found[FILE_PATH_BYTES], config[FILE_PATH_BYTES];
    if (directory_replace_find(directory, found)) {
        if (!file_join(path, found, TRAINER_FILE)) return false;
        if (file_exists(path))
            return error_set(
                "%s holds the state of a training, which would be lost; choose another directory",
                found);
    }
    if (is_of_run(directory))
        return error_set("%s is where a run keeps a checkpoint; choose another directory",
                         directory);
    if (!file_join(config, directory, CONFIG_FILE)) return false;
    if (config_json_is_ours(config)) return true;
    for (const char *const *list = own_files; list; list = list == own_files ? extra_files : NULL)
        for (const char *const *file = list; *file; file++) {
            if (!file_join(path, directory, base_name(*file))) return false;
            if (file_exists(path))
                return error_set(
                    "%s is there, and no earlier export wrote it; choose another directory", path);
        }
    return true;
}

bool checkpoint_export(const char *path, const Gpt *model, const char *precision,
                       const char *const *extra_files) {
    if (llmc_is_name(path)) return llmc_save(path, model, precision);
    return check_replaced(path, extra_files) &&
           replace(path, model, precision, NULL, NULL, extra_files);
}

/* --- Reading -------------------------------------------------------------------------------- */

static bool is_directory(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static bool is_file(const char *path) { return file_exists(path) && !is_directory(path); }

bool checkpoint_path(const char *directory, char *path, size_t bytes) {
    char found[FILE_PATH_BYTES], config[FILE_PATH_BYTES];
    const char *source = directory;
    if (!is_file(directory)) {
        source = found;
        if (!directory_replace_find(directory, found) || !file_join(config, found, CONFIG_FILE))
            return false;
        if (!file_exists(config))
            return error_set("%s is not a checkpoint: it has no " CONFIG_FILE, found);
    }
    int n = snprintf(path, bytes, "%s", source);
    return (n >= 0 && (size_t)n < bytes) || error_set("the path %.60s... is too long", source);
}

bool checkpoint_home(const char *path, char directory[FILE_PATH_BYTES]) {
    const char *slash = strrchr(path, '/');
    if (slash == path) slash++; /* the root keeps its own */
    int n = !is_file(path) ? snprintf(directory, FILE_PATH_BYTES, "%s", path)
            : slash ? snprintf(directory, FILE_PATH_BYTES, "%.*s", (int)(slash - path), path)
                    : snprintf(directory, FILE_PATH_BYTES, ".");
    return n < FILE_PATH_BYTES || error_set("the path %.60s... is too long", path);
}

/* The path of one file of the checkpoint. */
static bool checkpoint_file(const char *directory, const char *name, char path[FILE_PATH_BYTES]) {
    char found[FILE_PATH_BYTES];
    return checkpoint_path(directory, found, sizeof found) && file_join(path, found, name);
}

bool checkpoint_config(const char *directory, GptConfig *config) {
    char path[FILE_PATH_BYTES];
    if (is_file(directory)) return llmc_config(directory, config);
    return checkpoint_file(directory, CONFIG_FILE, path) && config_json_read(path, config);
}

/* The file of the parameters, or the index of several; false with a sentence that says in what
 * other form this directory holds them. */
static bool find_model(const char *directory, char path[FILE_PATH_BYTES]) {
    static const char *const names[] = {MODEL_FILE, INDEX_FILE};
    for (int i = 0; i < 2; i++) {
        if (!checkpoint_file(directory, names[i], path)) return false;
        if (file_exists(path)) return true;
    }
    if (!checkpoint_file(directory, "pytorch_model.bin", path)) return false;
    return error_set("%s has no " MODEL_FILE "%s", directory,
                     file_exists(path) ? ": it holds a PyTorch pickle, which is not read; save it "
                                         "again with save_pretrained of a current transformers"
                                       : "");
}

/* What the shapes of the tensors do not show. */
static bool check_config(const char *directory, const Gpt *model) {
    GptConfig stored;
    const GptConfig *config = gpt_config(model);
    if (!checkpoint_config(directory, &stored)) return false;
    if (stored.untied_head != config->untied_head)
        return error_set("%s %s, and this model %s", directory,
                         stored.untied_head ? "has a head of its own" : "ties its head",
                         stored.untied_head ? "ties its head" : "has one of its own");
    return (stored.NH == config->NH && stored.layernorm_eps == config->layernorm_eps) ||
           error_set("%s has %zu heads and a layernorm epsilon of %g; this model has %zu and %g",
                     directory, stored.NH, stored.layernorm_eps, config->NH, config->layernorm_eps);
}

bool checkpoint_load(const char *directory, Gpt *model) {
    char path[FILE_PATH_BYTES];
    if (!check_config(directory, model)) return false;
    if (is_file(directory)) return llmc_load(directory, model);
    return find_model(directory, path) && tensors_load_model(path, model);
}

bool checkpoint_resume(const char *directory, Gpt *model, TrainerState *state) {
    static const char *const needed[] = {MODEL_FILE, OPTIMIZER_FILE, NULL};
    char found[FILE_PATH_BYTES], trainer[FILE_PATH_BYTES], optimizer[FILE_PATH_BYTES];
    TrainerState loaded;
    if (is_file(directory))
        return error_set("%s holds a model but not the state of its training", directory);
    if (!check_optimizer(model) || !checkpoint_path(directory, found, sizeof found) ||
        !file_join(trainer, found, TRAINER_FILE) || !file_join(optimizer, found, OPTIMIZER_FILE))
        return false;
    if (!file_exists(trainer) || !file_exists(optimizer))
        return error_set(
            "%s holds a model but not the state of its training (%s is missing); start a new "
            "run from it instead",
            found, file_exists(trainer) ? OPTIMIZER_FILE : TRAINER_FILE);
    if (!trainer_json_read(trainer, found, needed, &loaded) ||
        !tensors_load_optimizer(optimizer, model))
        return false;
    *state = loaded;
    return true;
}
