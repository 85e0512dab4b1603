#include "data/tokenize_record.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "data/json.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/replace.h"

#define PROGRESS "progress.json"
#define MANIFEST "manifest.json"

static const size_t file_limit = (size_t)1 << 30;
static const char *const part_names[PARTS] = {"train", "validation"};

static bool no_memory(void) { return error_set("no memory for a description of the shards"); }

/* ---- the plan ---- */

/* cJSON's functions pass NULL on, so a missing member tells that there was no memory. */
static bool add_number(cJSON *object, const char *name, uint64_t number) {
    return cJSON_AddNumberToObject(object, name, (double)number) != NULL;
}

static bool add_text(cJSON *object, const char *name, const char *text) {
    return cJSON_AddStringToObject(object, name, text) != NULL;
}

static bool add_tokenizer(cJSON *plan, const TokenizeOptions *options) {
    char sha256[SHA256_HEX_BYTES];
    const Tokenizer *tokenizer = options->tokenizer;
    cJSON *object = cJSON_AddObjectToObject(plan, "tokenizer");
    int32_t separator = tokenizer_special(tokenizer, "<|endoftext|>");
    return tokenizer_hash(tokenizer, sha256) &&
           add_text(object, "kind", tokenizer_kind(tokenizer)) &&
           add_number(object, "vocabulary", tokenizer_vocabulary(tokenizer)) &&
           add_text(object, "sha256", sha256) &&
           (separator < 0 ||
            add_number(object, "token_before_each_document", (uint64_t)separator)) &&
           cJSON_AddBoolToObject(object, "special_tokens_in_text", options->special) != NULL;
}

static bool add_inputs(cJSON *plan, const Survey *survey) {
    cJSON *inputs = cJSON_AddArrayToObject(plan, "inputs");
    bool good = inputs != NULL;
    for (size_t i = 0; good && i < survey->paths->count; i++) {
        const SurveyFile *file = &survey->file[i];
        cJSON *object = cJSON_CreateObject();
        good = object != NULL && cJSON_AddItemToArray(inputs, object) &&
               add_text(object, "sha256", file->sha256) &&
               add_number(object, "bytes", file->bytes) &&
               add_text(object, "format", file->format == TEXT_JSONL ? "jsonl" : "text") &&
               add_number(object, "text_bytes", file->text_bytes) &&
               add_number(object, "documents", file->documents);
    }
    return good;
}

cJSON *tokenize_plan(const TokenizeOptions *options, TokenizeSplit split, const Survey *survey) {
    cJSON *plan = cJSON_CreateObject();
    size_t V = tokenizer_vocabulary(options->tokenizer);
    bool good = add_tokenizer(plan, options) &&
                add_number(plan, "bytes_per_token", shard_width(V)) &&
                add_number(plan, "shard_tokens", options->shard_tokens) &&
                cJSON_AddNumberToObject(plan, "val_fraction", options->val_fraction) != NULL &&
                add_text(plan, "split", split == SPLIT_END ? "end" : "documents") &&
                add_number(plan, "seed", options->seed) && add_inputs(plan, survey);
    if (good) return plan;
    no_memory();
    cJSON_Delete(plan);
    return NULL;
}

/* ---- files ---- */

static bool write_json(const char *directory, const char *name, const cJSON *json) {
    char path[FILE_PATH_BYTES];
    FileReplacement replacement;
    char *text = cJSON_Print(json);
    if (text == NULL) return no_memory();
    bool good = file_join(path, directory, name) && file_replace_begin(&replacement, path);
    if (good) {
        fprintf(replacement.file, "%s\n", text);
        good = file_replace_commit(&replacement);
    }
    cJSON_free(text);
    return good;
}

/* NULL with error_message() if there is none that can be read. */
static cJSON *read_json(const char *directory, const char *name) {
    char path[FILE_PATH_BYTES];
    return file_join(path, directory, name) ? json_read(path, file_limit) : NULL;
}

static bool has_plan(const cJSON *json, const cJSON *plan) {
    const cJSON *found = cJSON_GetObjectItemCaseSensitive(json, "plan");
    return cJSON_Compare(found, plan, /*case_sensitive=*/true);
}

/* A whole number; false if there is none of this name. */
static bool get_number(const cJSON *object, const char *name, uint64_t *number) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble < 9e15))
        return false;
    *number = (uint64_t)item->valuedouble;
    return true;
}

/* ---- progress.json ---- */

bool tokenize_write_progress(const char *directory, const cJSON *plan, const TokenizeState *state) {
    cJSON *json = cJSON_CreateObject();
    bool good = json != NULL &&
                cJSON_AddItemToObject(json, "plan", cJSON_Duplicate(plan, /*recurse=*/true)) &&
                add_number(json, "input", state->input) &&
                add_number(json, "byte", state->place.bytes) &&
                add_number(json, "line", state->place.lines) &&
                add_number(json, "document", state->document);
    for (int part = 0; good && part < PARTS; part++) {
        cJSON *object = cJSON_AddObjectToObject(json, part_names[part]);
        good = add_number(object, "tokens", state->tokens[part]) &&
               add_number(object, "documents", state->documents[part]);
    }
    if (good)
        good = write_json(directory, PROGRESS, json);
    else
        no_memory();
    cJSON_Delete(json);
    return good;
}

bool tokenize_read_progress(const char *directory, const cJSON *plan, TokenizeState *state) {
    cJSON *json = read_json(directory, PROGRESS);
    uint64_t input = 0;
    const cJSON *inputs = cJSON_GetObjectItemCaseSensitive(plan, "inputs");
    bool good = has_plan(json, plan) && get_number(json, "input", &input) &&
                input <= (uint64_t)cJSON_GetArraySize(inputs) &&
                get_number(json, "byte", &state->place.bytes) &&
                get_number(json, "line", &state->place.lines) &&
                get_number(json, "document", &state->document);
    for (int part = 0; good && part < PARTS; part++) {
        const cJSON *object = cJSON_GetObjectItemCaseSensitive(json, part_names[part]);
        good = get_number(object, "tokens", &state->tokens[part]) &&
               get_number(object, "documents", &state->documents[part]);
    }
    state->input = (size_t)input;
    cJSON_Delete(json);
    return good;
}

/* ---- manifest.json ---- */

static bool add_shards(cJSON *part, const ShardWriter *writer) {
    cJSON *shards = cJSON_AddArrayToObject(part, "shards");
    bool good = shards != NULL;
    for (size_t i = 0; good && i < shard_writer_shards(writer); i++) {
        char name[FILE_PATH_BYTES], path[FILE_PATH_BYTES], sha256[SHA256_HEX_BYTES];
        uint64_t bytes, left = writer->tokens - i * (uint64_t)writer->shard_tokens;
        cJSON *shard = cJSON_CreateObject();
        shard_writer_name(writer, i, name);
        good = shard != NULL && cJSON_AddItemToArray(shards, shard);
        if (!good) break;
        if (!file_join(path, writer->directory, name) || !sha256_file(path, sha256, &bytes))
            return false;
        good = add_text(shard, "name", name) &&
               add_number(shard, "tokens",
                          left < writer->shard_tokens ? left : writer->shard_tokens) &&
               add_number(shard, "bytes", bytes) && add_text(shard, "sha256", sha256);
    }
    return good || no_memory();
}

bool tokenize_write_manifest(const char *directory, const cJSON *plan, const Paths *inputs,
                             const ShardWriter writer[PARTS], const uint64_t documents[PARTS]) {
    cJSON *json = cJSON_CreateObject();
    add_text(json, "format", "llm.c token shards");
    cJSON_AddItemToObject(json, "plan", cJSON_Duplicate(plan, /*recurse=*/true));
    cJSON_AddItemToObject(
        json, "input_names",
        cJSON_CreateStringArray((const char *const *)inputs->path, (int)inputs->count));
    bool good = cJSON_GetArraySize(json) == 3 || no_memory();
    for (int part = 0; good && part < PARTS; part++) {
        cJSON *object = cJSON_AddObjectToObject(json, part_names[part]);
        good = (add_number(object, "tokens", writer[part].tokens) &&
                add_number(object, "documents", documents[part])) ||
               no_memory();
        good = good && add_shards(object, &writer[part]);
    }
    good = good && write_json(directory, MANIFEST, json);
    cJSON_Delete(json);
    return good;
}

static bool check_shard(const char *directory, const cJSON *shard, bool hash) {
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(shard, "name"));
    const char *said = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(shard, "sha256"));
    char path[FILE_PATH_BYTES], sha256[SHA256_HEX_BYTES];
    uint64_t bytes;
    struct stat status;
    if (name == NULL || !get_number(shard, "bytes", &bytes) || (hash && said == NULL))
        return error_set("%s/" MANIFEST " is damaged: a shard has no name, size or hash",
                         directory);
    if (!file_join(path, directory, name)) return false;
    if (stat(path, &status) != 0)
        return error_set("%s, which " MANIFEST " lists, cannot be read: %s", path, strerror(errno));
    if ((uint64_t)status.st_size != bytes)
        return error_set("%s has %lld bytes, and " MANIFEST " says %llu", path,
                         (long long)status.st_size, (unsigned long long)bytes);
    if (!hash) return true;
    return sha256_file(path, sha256, &bytes) &&
           (strcmp(sha256, said) == 0 ||
            error_set("%s has other bytes than those that " MANIFEST " gives the hash of", path));
}

static bool check_shards(const char *directory, bool hash) {
    cJSON *json = read_json(directory, MANIFEST);
    bool good = json != NULL;
    for (int part = 0; good && part < PARTS; part++) {
        const cJSON *object = cJSON_GetObjectItemCaseSensitive(json, part_names[part]), *shard;
        const cJSON *shards = cJSON_GetObjectItemCaseSensitive(object, "shards");
        good =
            cJSON_IsArray(shards) || error_set("%s/" MANIFEST " is damaged: it lists no %s shards",
                                               directory, part_names[part]);
        if (!good) break;
        cJSON_ArrayForEach(shard, shards) good = good && check_shard(directory, shard, hash);
    }
    cJSON_Delete(json);
    return good;
}

bool tokenize_check_shards(const char *directory) {
    return check_shards(directory, /*hash=*/false) ||
           error_set("%s; remove the directory and tokenize again", error_message());
}

bool tokenize_verify_shards(const char *directory) {
    return check_shards(directory, /*hash=*/true);
}

int tokenize_read_manifest(const char *directory, const cJSON *plan, TokenizeReport *report) {
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, MANIFEST)) return -1;
    if (!file_exists(path)) return 0;
    cJSON *json = read_json(directory, MANIFEST);
    bool same = has_plan(json, plan);
    for (int part = 0; same && part < PARTS; part++) {
        const cJSON *object = cJSON_GetObjectItemCaseSensitive(json, part_names[part]);
        TokenizePart *counts = part == TRAIN ? &report->train : &report->validation;
        same = get_number(object, "tokens", &counts->tokens) &&
               get_number(object, "documents", &counts->documents);
        counts->shards =
            (size_t)cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(object, "shards"));
    }
    cJSON_Delete(json);
    if (same) return tokenize_check_shards(directory) ? 1 : -1;
    error_set(
        "%s holds shards of other texts, or made with other options; name another directory, "
        "or remove this one",
        directory);
    return -1;
}
