/* Writing the safetensors format; see safetensors.h. The header is built from the declarations, so
 * the file is written once, from front to back. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/convert.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/safetensors.h"

struct SafetensorsWriter {
    char *path;
    cJSON *header;
    int file;        /* -1 before _begin */
    size_t declared; /* bytes */
    size_t written;
    bool failed; /* the reason was given to error_set */
};

SafetensorsWriter *safetensors_writer(const char *path) {
    SafetensorsWriter *writer = calloc(1, sizeof *writer);
    if (writer) {
        *writer =
            (SafetensorsWriter){.path = strdup(path), .header = cJSON_CreateObject(), .file = -1};
        cJSON *metadata = cJSON_AddObjectToObject(writer->header, "__metadata__");
        if (writer->path && cJSON_AddStringToObject(metadata, "format", "pt")) return writer;
        cJSON_Delete(writer->header);
        free(writer->path);
        free(writer);
    }
    error_set("no memory to write %s", path);
    return NULL;
}

static bool fail(SafetensorsWriter *writer) {
    writer->failed = true;
    return false;
}

void safetensors_declare(SafetensorsWriter *writer, const char *name, const char *dtype, int rank,
                         const size_t *shape) {
    if (writer->failed) return;
    size_t bytes = safetensors_dtype_bytes(dtype);
    bool valid = bytes > 0 && rank >= 0 && rank <= SAFETENSORS_MAX_RANK && writer->file < 0;
    /* Numbers as text: cJSON prints its doubles with an exponent from 1e15. */
    char shape_text[SAFETENSORS_MAX_RANK * 21 + 2] = "[", offsets_text[44];
    size_t used = 1, end = 0;
    for (int i = 0; valid && i < rank; i++) {
        valid = !__builtin_mul_overflow(bytes, shape[i], &bytes);
        used += (size_t)sprintf(shape_text + used, "%s%zu", i ? "," : "", shape[i]);
    }
    strcpy(shape_text + used, "]");
    valid = valid && !__builtin_add_overflow(writer->declared, bytes, &end);
    if (!valid) {
        error_set("%s: tensor %.80s cannot be declared: %s of rank %d", writer->path, name, dtype,
                  rank);
        fail(writer);
        return;
    }
    sprintf(offsets_text, "[%zu,%zu]", writer->declared, end);
    writer->declared = end;

    cJSON *entry = cJSON_AddObjectToObject(writer->header, name);
    if (!cJSON_AddStringToObject(entry, "dtype", dtype) ||
        !cJSON_AddRawToObject(entry, "shape", shape_text) ||
        !cJSON_AddRawToObject(entry, "data_offsets", offsets_text)) {
        error_set("no memory for the header of %s", writer->path);
        fail(writer);
    }
}

static int compare_texts(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Sorted once: a look-up of every name as it comes would take their number squared. */
static bool check_distinct_names(const SafetensorsWriter *writer) {
    size_t count = 0;
    const char **names = malloc((size_t)cJSON_GetArraySize(writer->header) * sizeof *names);
    if (!names) return error_set("no memory for the header of %s", writer->path);
    const cJSON *entry;
    cJSON_ArrayForEach(entry, writer->header) names[count++] = entry->string;
    qsort(names, count, sizeof *names, compare_texts);
    bool good = true;
    for (size_t i = 1; good && i < count; i++)
        good = strcmp(names[i - 1], names[i]) != 0 ||
               error_set("%s: tensor %.80s was declared twice", writer->path, names[i]);
    free(names);
    return good;
}

bool safetensors_begin(SafetensorsWriter *writer) {
    if (writer->failed) return false;
    if (!check_distinct_names(writer)) return fail(writer);
    char *text = cJSON_PrintUnformatted(writer->header);
    if (!text) return error_set("no memory for the header of %s", writer->path), fail(writer);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    writer->file = open(writer->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool good =
        writer->file >= 0 || error_set("cannot create %s: %s", writer->path, strerror(errno));
    good = good && file_write_all(writer->file, writer->path, &padded, sizeof padded) &&
           file_write_all(writer->file, writer->path, text, length) &&
           file_write_all(writer->file, writer->path, "       ", padded - length);
    cJSON_free(text);
    return good || fail(writer);
}

bool safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes) {
    if (writer->failed) return false;
    if (writer->file < 0 || bytes > writer->declared - writer->written)
        return error_set("%s: data beyond the %zu bytes declared", writer->path, writer->declared),
               fail(writer);
    writer->written += bytes;
    return file_write_all(writer->file, writer->path, data, bytes) || fail(writer);
}

bool safetensors_write_float(SafetensorsWriter *writer, const char *dtype, const float *values,
                             size_t n) {
    enum { PIECE = 4096 };
    uint16_t piece[PIECE];
    if (!strcmp(dtype, "F32")) return safetensors_write(writer, values, n * sizeof *values);
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        if (!strcmp(dtype, "F16"))
            half_from_float(piece, values + done, m);
        else
            type_from_float(TYPE_BF16, piece, values + done, m);
        if (!safetensors_write(writer, piece, m * sizeof *piece)) return false;
    }
    return true;
}

bool safetensors_finish(SafetensorsWriter *writer) {
    bool good = !writer->failed && ((writer->file >= 0 && writer->written == writer->declared) ||
                                    error_set("%s: %zu bytes were declared and %zu given",
                                              writer->path, writer->declared, writer->written));
    if (writer->file >= 0) {
        if (!good) close(writer->file);
        good = good && file_sync_close(writer->file, writer->path);
        if (!good) unlink(writer->path);
    }
    cJSON_Delete(writer->header);
    free(writer->path);
    free(writer);
    return good;
}
