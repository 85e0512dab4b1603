/* generate() ends at eos_token_id, and without one given takes GPT-2's, which a smaller vocabulary
 * lacks. AutoTokenizer takes a GPT-2's tokenizer for one that splits words at spaces, whatever
 * tokenizer.json says, unless tokenizer_config.json names the class that believes it. */
#include "gpt/generation.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/files.h"

#define END_OF_TEXT "<|endoftext|>"

int32_t generation_end(const char *directory, size_t V) {
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, "tokenizer.json") || !file_exists(path)) return -1;
    char *text = file_read(path, (size_t)1 << 28, NULL);
    cJSON *json = text ? cJSON_Parse(text) : NULL;
    free(text);
    const cJSON *added = cJSON_GetObjectItemCaseSensitive(json, "added_tokens"), *token;
    int32_t end = -1;
    cJSON_ArrayForEach(token, added) {
        const cJSON *content = cJSON_GetObjectItemCaseSensitive(token, "content");
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(token, "id");
        if (cJSON_IsString(content) && !strcmp(content->valuestring, END_OF_TEXT) &&
            cJSON_IsNumber(id) && id->valuedouble >= 0 && id->valuedouble < (double)V)
            end = (int32_t)id->valuedouble;
    }
    cJSON_Delete(json);
    return end;
}

bool generation_write(const char *directory, int32_t end, size_t T) {
    char path[FILE_PATH_BYTES], id[16] = "null", text[512];
    if (end >= 0) snprintf(id, sizeof id, "%d", end);
    int n = snprintf(text, sizeof text, "{\n\t\"bos_token_id\": %s,\n\t\"eos_token_id\": %s\n}\n",
                     id, id);
    if (!file_join(path, directory, "generation_config.json") ||
        !file_write(path, text, (size_t)n) || !file_join(path, directory, "tokenizer.json"))
        return false;
    if (!file_exists(path)) return true;
    if (!file_join(path, directory, "tokenizer_config.json")) return false;
    if (file_exists(path)) return true;
    const char *token = end >= 0 ? "\"" END_OF_TEXT "\"" : "null";
    n = snprintf(text, sizeof text,
                 "{\n\t\"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                 "\t\"bos_token\": %s,\n\t\"eos_token\": %s,\n\t\"model_max_length\": %zu,\n"
                 "\t\"clean_up_tokenization_spaces\": false\n}\n",
                 token, token, T);
    return file_write(path, text, (size_t)n);
}
