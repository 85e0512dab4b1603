/* JSON files, by cJSON: reading one whole, writing a string. */
#ifndef DATA_JSON_H
#define DATA_JSON_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* NULL with error_message() if the file has more than `limit` bytes or is not one JSON value. */
cJSON *json_read(const char *path, size_t limit);

/* Writes the UTF-8 text as a JSON string, with its quotes. */
void json_write_string(FILE *file, const char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
