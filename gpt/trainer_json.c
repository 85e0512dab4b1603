#include "gpt/trainer_json.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/files.h"

#define TRAINER_FORMAT 1

/* 64-bit integers are strings: JSON's numbers are doubles to most readers. */
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

bool trainer_json_write(const char *path, const char *directory, const char *const *names,
                        const TrainerState *state, const char *flags) {
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
    bool good = true;
    for (; good && *names; names++) good = add_file(files, directory, *names);

    char *text = good ? cJSON_Print(json) : NULL;
    if (good && !text) error_set("no memory to write %s", path);
    good = text && file_write(path, text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(json);
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

/* The files that the state belongs with must be those of the same save. */
static bool check_files(const char *record, const char *directory, const char *const *needed,
                        const cJSON *json) {
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(json, "files"), *entry;
    for (; *needed; needed++)
        if (!cJSON_GetObjectItemCaseSensitive(files, *needed))
            return error_set("%s does not name the files it belongs with", record);
    cJSON_ArrayForEach(entry, files) {
        char path[FILE_PATH_BYTES];
        uint64_t bytes, checksum, found_checksum;
        size_t found_bytes;
        if (strchr(entry->string, '/') || !get_u64(entry, "bytes", 10, &bytes) ||
            !get_u64(entry, "checksum", 16, &checksum))
            return error_set("%s: the record of the files is damaged", record);
        if (!file_join(path, directory, entry->string) ||
            !file_checksum(path, &found_bytes, &found_checksum))
            return false;
        if (found_bytes != bytes)
            return error_set("%s has %zu bytes; %" PRIu64
                             " were saved: the file was cut or changed",
                             path, found_bytes, bytes);
        if (found_checksum != checksum)
            return error_set("%s is not what was saved with %s (checksum %016" PRIx64
                             ", expected %016" PRIx64
                             "); to go on from its parameters alone, start a new run from it",
                             path, record, found_checksum, checksum);
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
    if (!get_u64(json, "step", 10, &state->step) || !get_u64(json, "seed", 10, &state->seed) ||
        !get_u64(json, "tokens", 10, &state->tokens) ||
        !get_u64(json, "stale_validations", 10, &state->stale_validations) ||
        !(cJSON_IsNull(best) || cJSON_IsNumber(best)))
        return error_set(
            "%s is damaged: step, seed, tokens, stale_validations and best_loss are needed", path);
    state->best_loss = cJSON_IsNumber(best) ? best->valuedouble : INFINITY;
    return true;
}

bool trainer_json_read(const char *path, const char *directory, const char *const *needed,
                       TrainerState *state) {
    char *text = file_read(path, (size_t)16 << 20, NULL);
    if (!text) return false;
    cJSON *json = cJSON_ParseWithOpts(text, NULL, /*terminated=*/1);
    free(text);
    bool good = cJSON_IsObject(json) || error_set("%s is not a JSON object", path);
    good = good && read_state(path, json, state) && check_files(path, directory, needed, json);
    cJSON_Delete(json);
    return good;
}
