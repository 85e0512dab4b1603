/* A configuration as Hugging Face's config.json of a GPT-2: private to gpt/. */
#ifndef GPT_CONFIG_JSON_H
#define GPT_CONFIG_JSON_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads the file. False with error_message() if it asks for what this model does not compute. */
bool config_json_read(const char *path, GptConfig *config);
/* Whether config_json_write wrote it; false, too, if there is no such file. */
bool config_json_is_ours(const char *path);
/* Writes the file, synced. dtype: of the parameters beside it, as torch names it; end: the id of the
 * token that begins and ends texts, or -1. */
bool config_json_write(const char *path, const GptConfig *config, const char *dtype, int32_t end);

#ifdef __cplusplus
}
#endif
#endif
