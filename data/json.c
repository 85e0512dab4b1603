#include "data/json.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"
#include "runtime/files.h"

cJSON *json_read(const char *path, size_t limit) {
    size_t bytes;
    char *text = file_read(path, limit, &bytes);
    if (text == NULL) return NULL;
    const char *end = text;
    cJSON *json = cJSON_ParseWithLengthOpts(text, bytes, &end, /*require_null_terminated=*/false);
    if (json != NULL) end += strspn(end, " \t\r\n");
    if (json == NULL || end != text + bytes) {
        error_set("%s: is not JSON: it goes wrong at byte %zu of %zu", path, (size_t)(end - text),
                  bytes);
        cJSON_Delete(json);
        json = NULL;
    }
    free(text);
    return json;
}

void json_write_string(FILE *file, const char *text, size_t bytes) {
    fputc('"', file);
    for (size_t i = 0; i < bytes; i++) {
        if ((unsigned char)text[i] < ' ') {
            fprintf(file, "\\u%04x", (unsigned)text[i]);
        } else {
            if (text[i] == '"' || text[i] == '\\') fputc('\\', file);
            fputc(text[i], file);
        }
    }
    fputc('"', file);
}
