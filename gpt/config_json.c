/* A configuration as Hugging Face's config.json of a GPT-2 (transformers, GPT2Config). Its fields
 * are of three kinds: sizes, which must be there; settings with a default; and switches of variants
 * that this model does not compute, which must be as here. Others (token ids, summary heads, …) are
 * of no account for the parameters' meaning. */
#include "gpt/config_json.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/files.h"

/* Ours among the fields, by which config_json_is_ours knows what config_json_write wrote. */
#define WRITTEN_BY "written_by"

/* "FILE: FIELD is FOUND; EXPECTED". The value is printed as JSON, which also escapes it. */
static bool refuse(const char *path, const cJSON *json, const char *field, const char *expected) {
    char *found = json ? cJSON_PrintUnformatted(json) : NULL;
    error_set("%s: %s is %.60s; %s", path, field, found ? found : "missing", expected);
    cJSON_free(found);
    return false;
}

static bool read_size(const char *path, const cJSON *json, const char *field, size_t *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, field);
    double number = cJSON_IsNumber(item) ? item->valuedouble : 0;
    if (!(number >= 1 && number <= INT32_MAX) || number != (double)(size_t)number)
        return refuse(path, item, field, "a positive integer was expected");
    *value = (size_t)number;
    return true;
}

static bool read_float(const char *path, const cJSON *json, const char *field, float *value) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, field);
    if (!item) return true;
    if (!cJSON_IsNumber(item)) return refuse(path, item, field, "a number was expected");
    *value = (float)item->valuedouble;
    return true;
}

/* An absent field has Hugging Face's default, which is the supported value for each of these. */
static bool require_bool(const char *path, const cJSON *json, const char *field, bool supported) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, field);
    if (!item || (cJSON_IsBool(item) && cJSON_IsTrue(item) == supported)) return true;
    return refuse(path, item, field,
                  supported ? "only true is supported" : "only false is supported");
}

static bool read_fields(const char *path, const cJSON *json, GptConfig *config) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "model_type");
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "gpt2") != 0)
        return refuse(path, type, "model_type", "only \"gpt2\" is supported");

    GptConfig c = {.layernorm_eps = 1e-5f,
                   .embedding_dropout = 0.1f,
                   .residual_dropout = 0.1f,
                   .attention_dropout = 0.1f};
    if (!read_size(path, json, "n_layer", &c.L) || !read_size(path, json, "n_head", &c.NH) ||
        !read_size(path, json, "n_embd", &c.C) || !read_size(path, json, "n_positions", &c.T) ||
        !read_size(path, json, "vocab_size", &c.V) ||
        !read_float(path, json, "layer_norm_epsilon", &c.layernorm_eps) ||
        !read_float(path, json, "embd_pdrop", &c.embedding_dropout) ||
        !read_float(path, json, "resid_pdrop", &c.residual_dropout) ||
        !read_float(path, json, "attn_pdrop", &c.attention_dropout))
        return false;

    const cJSON *inner = cJSON_GetObjectItemCaseSensitive(json, "n_inner");
    if (inner && !cJSON_IsNull(inner) &&
        !(cJSON_IsNumber(inner) && inner->valuedouble == 4 * (double)c.C))
        return refuse(path, inner, "n_inner", "only null or 4 times n_embd is supported");

    /* Two names of the tanh approximation. */
    const cJSON *gelu = cJSON_GetObjectItemCaseSensitive(json, "activation_function");
    if (gelu && !(cJSON_IsString(gelu) && (!strcmp(gelu->valuestring, "gelu_new") ||
                                           !strcmp(gelu->valuestring, "gelu_pytorch_tanh"))))
        return refuse(path, gelu, "activation_function",
                      "only \"gelu_new\" and \"gelu_pytorch_tanh\" are supported");

    if (!require_bool(path, json, "scale_attn_weights", true) ||
        !require_bool(path, json, "scale_attn_by_inverse_layer_idx", false) ||
        !require_bool(path, json, "add_cross_attention", false))
        return false;
    const cJSON *tied = cJSON_GetObjectItemCaseSensitive(json, "tie_word_embeddings");
    if (tied && !cJSON_IsBool(tied))
        return refuse(path, tied, "tie_word_embeddings", "true or false was expected");
    c.untied_head = cJSON_IsFalse(tied);
    if (!gpt_config_check(&c)) return error_set("%s: %s", path, error_message());
    *config = c;
    return true;
}

bool config_json_read(const char *path, GptConfig *config) {
    char *text = file_read(path, (size_t)16 << 20, NULL);
    if (!text) return false;
    cJSON *json = cJSON_ParseWithOpts(text, NULL, /*terminated=*/1);
    free(text);
    bool good = cJSON_IsObject(json) ? read_fields(path, json, config)
                                     : error_set("%s is not a JSON object", path);
    cJSON_Delete(json);
    return good;
}

bool config_json_is_ours(const char *path) {
    char *text = file_read(path, (size_t)1 << 24, NULL);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    const char *by = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, WRITTEN_BY));
    bool ours = by && strcmp(by, "tilegpt") == 0;
    cJSON_Delete(json);
    free(text);
    return ours;
}

/* The double of the shortest decimal that reads back as this float, so that 1e-5f is written as
 * 1e-05 and not as 9.99999974737875e-06. */
static double shortest(float value) {
    char text[32];
    for (int digits = 1; digits < 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtof(text, NULL) == value) return strtod(text, NULL);
    }
    return value;
}

bool config_json_write(const char *path, const GptConfig *config, const char *dtype, int32_t end) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "model_type", "gpt2");
    cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "architectures"),
                         cJSON_CreateString("GPT2LMHeadModel"));
    cJSON_AddNumberToObject(json, "n_layer", (double)config->L);
    cJSON_AddNumberToObject(json, "n_head", (double)config->NH);
    cJSON_AddNumberToObject(json, "n_embd", (double)config->C);
    cJSON_AddNullToObject(json, "n_inner");
    cJSON_AddNumberToObject(json, "n_positions", (double)config->T);
    cJSON_AddNumberToObject(json, "n_ctx", (double)config->T);
    cJSON_AddNumberToObject(json, "vocab_size", (double)config->V);
    cJSON_AddStringToObject(json, "activation_function", "gelu_new");
    cJSON_AddNumberToObject(json, "layer_norm_epsilon", shortest(config->layernorm_eps));
    cJSON_AddNumberToObject(json, "embd_pdrop", shortest(config->embedding_dropout));
    cJSON_AddNumberToObject(json, "resid_pdrop", shortest(config->residual_dropout));
    cJSON_AddNumberToObject(json, "attn_pdrop", shortest(config->attention_dropout));
    cJSON_AddBoolToObject(json, "scale_attn_weights", true);
    cJSON_AddBoolToObject(json, "tie_word_embeddings", !config->untied_head);
    /* Not left out: transformers would then take 50256, which a smaller vocabulary lacks. */
    const char *const ends[] = {"bos_token_id", "eos_token_id"};
    for (int i = 0; i < 2; i++)
        cJSON_AddItemToObject(json, ends[i],
                              end < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(end));
    cJSON_AddStringToObject(json, WRITTEN_BY, "tilegpt");
    cJSON_AddStringToObject(json, "dtype", dtype);
    /* The last field's success is every field's: cJSON fails only for want of memory. */
    bool built = cJSON_AddStringToObject(json, "torch_dtype", dtype) != NULL;
    char *text = built ? cJSON_Print(json) : NULL;
    bool good =
        text ? file_write(path, text, strlen(text)) : error_set("no memory to write %s", path);
    cJSON_free(text);
    cJSON_Delete(json);
    return good;
}
