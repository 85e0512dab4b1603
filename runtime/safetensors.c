/* The safetensors format; see safetensors.h. A header is believed only when every number in it has
 * been checked: tensors must fill the data without gap or overlap, as the format demands. Data are
 * read where they are wanted, in pieces, and never mapped or held. */
#include "runtime/safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/files.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format's numbers are little-endian");

/* Limits: the format's on the header; that of a double, in which cJSON holds numbers. */
#define HEADER_LIMIT ((size_t)100 * 1000 * 1000)
#define INTEGER_LIMIT 9007199254740992.0

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
    {"F64", 8},  {"F32", 4}, {"F16", 2},     {"BF16", 2},    {"I64", 8}, {"I32", 4},
    {"I16", 2},  {"I8", 1},  {"U64", 8},     {"U32", 4},     {"U16", 2}, {"U8", 1},
    {"BOOL", 1}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
};

/* 0 if there is no such type. */
static size_t dtype_bytes(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (!strcmp(dtypes[i].name, name)) return dtypes[i].bytes;
    return 0;
}

struct Safetensors {
    char *path;
    int file;
    size_t start; /* of the data */
    size_t count;
    SafetensorsTensor *tensors;  /* by offset */
    SafetensorsTensor **by_name; /* sorted */
};

static int compare_places(const void *a, const void *b) {
    const SafetensorsTensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int compare_names(const void *a, const void *b) {
    return strcmp((*(SafetensorsTensor *const *)a)->name, (*(SafetensorsTensor *const *)b)->name);
}

static bool read_integer(const cJSON *json, size_t *value) {
    double number = cJSON_IsNumber(json) ? json->valuedouble : -1;
    if (!(number >= 0 && number <= INTEGER_LIMIT) || number != (double)(size_t)number) return false;
    *value = (size_t)number;
    return true;
}

/* One entry of the header. */
static bool parse_tensor(const char *path, const cJSON *json, SafetensorsTensor *tensor) {
    const char *name = json->string;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        if (*c < 32 || *c == 127)
            return error_set("%s has a tensor with a control character in its name", path);
    tensor->name = strdup(name);
    if (!tensor->name) return error_set("no memory for the header of %s", path);

    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(json, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(json, "data_offsets");
    if (!cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets) ||
        cJSON_GetArraySize(json) != 3)
        return error_set("%s: tensor %.80s must have exactly a dtype, a shape and data_offsets",
                         path, name);

    size_t size = dtype_bytes(dtype->valuestring);
    if (!size)
        return error_set("%s: tensor %.80s has the unknown dtype \"%.20s\"", path, name,
                         dtype->valuestring);
    snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtype->valuestring);

    tensor->elements = 1;
    size_t bytes;
    const cJSON *item;
    cJSON_ArrayForEach(item, shape) {
        size_t n;
        if (tensor->rank == SAFETENSORS_MAX_RANK)
            return error_set("%s: tensor %.80s has more than %d dimensions", path, name,
                             SAFETENSORS_MAX_RANK);
        if (!read_integer(item, &n))
            return error_set("%s: the shape of tensor %.80s holds something that is not a size",
                             path, name);
        tensor->shape[tensor->rank++] = n;
        if (__builtin_mul_overflow(tensor->elements, n, &tensor->elements))
            return error_set("%s: the shape of tensor %.80s is too large", path, name);
    }
    if (__builtin_mul_overflow(tensor->elements, size, &bytes))
        return error_set("%s: the shape of tensor %.80s is too large", path, name);

    size_t end;
    if (cJSON_GetArraySize(offsets) != 2 || !read_integer(offsets->child, &tensor->begin) ||
        !read_integer(offsets->child->next, &end) || tensor->begin > end)
        return error_set(
            "%s: the data_offsets of tensor %.80s are not [begin, end], 0 <= begin <= end", path,
            name);
    tensor->bytes = end - tensor->begin;
    return tensor->bytes == bytes ||
           error_set(
               "%s: tensor %.80s has %zu bytes by its data_offsets but %zu by its shape and dtype",
               path, name, tensor->bytes, bytes);
}

static bool parse_header(Safetensors *file, const cJSON *header, size_t data_bytes) {
    const char *path = file->path;
    size_t entries = (size_t)cJSON_GetArraySize(header);
    file->tensors = calloc(entries + 1, sizeof *file->tensors);
    file->by_name = calloc(entries + 1, sizeof *file->by_name);
    if (!file->tensors || !file->by_name) return error_set("no memory for the header of %s", path);

    const cJSON *entry;
    cJSON_ArrayForEach(entry, header) {
        if (!cJSON_IsObject(entry))
            return error_set("%s: \"%.80s\" in the header is not an object", path, entry->string);
        if (!strcmp(entry->string, "__metadata__")) continue;
        if (!parse_tensor(path, entry, &file->tensors[file->count++])) return false;
    }

    qsort(file->tensors, file->count, sizeof *file->tensors, compare_places);
    size_t end = 0;
    for (size_t i = 0; i < file->count; i++) {
        const SafetensorsTensor *tensor = &file->tensors[i];
        if (tensor->begin != end)
            return error_set("%s: the data of tensor %.80s begin at byte %zu, expected %zu (%s)",
                             path, tensor->name, tensor->begin, end,
                             tensor->begin < end ? "they overlap another's" : "a gap");
        end += tensor->bytes;
        if (end > data_bytes) break;
    }
    if (end != data_bytes)
        return error_set("%s holds %zu bytes of data; its header speaks of %s%zu: the file %s",
                         path, data_bytes, end > data_bytes ? "at least " : "", end,
                         end > data_bytes ? "is cut short" : "has something after its end");

    for (size_t i = 0; i < file->count; i++) file->by_name[i] = &file->tensors[i];
    qsort(file->by_name, file->count, sizeof *file->by_name, compare_names);
    for (size_t i = 1; i < file->count; i++)
        if (!compare_names(&file->by_name[i - 1], &file->by_name[i]))
            return error_set("%s has tensor %.80s twice", path, file->by_name[i]->name);
    return true;
}

static bool read_header(Safetensors *file) {
    const char *path = file->path;
    struct stat status;
    if (fstat(file->file, &status) != 0)
        return error_set("cannot read %s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode)) return error_set("%s is not a file", path);
    size_t bytes = (size_t)status.st_size;
    uint64_t length;
    if (bytes < sizeof length)
        return error_set("%s has %zu bytes, too few for a safetensors file", path, bytes);
    if (!file_read_at(file->file, path, &length, sizeof length, 0)) return false;
    if (length > bytes - sizeof length || length > HEADER_LIMIT)
        return error_set(
            "%s is not a safetensors file or is cut short: its header would take %llu bytes "
            "of the %zu that follow (at most %zu are allowed)",
            path, (unsigned long long)length, bytes - sizeof length, HEADER_LIMIT);
    file->start = sizeof length + length;

    char *text = malloc(length + 1);
    if (!text) return error_set("no memory for the header of %s", path);
    bool good = file_read_at(file->file, path, text, length, sizeof length);
    if (good) {
        /* The terminating 0 lets cJSON check that nothing but blanks follows the object. */
        text[length] = 0;
        cJSON *header = memchr(text, 0, length)
                            ? NULL
                            : cJSON_ParseWithLengthOpts(text, length + 1, NULL, /*terminated=*/1);
        good =
            cJSON_IsObject(header)
                ? parse_header(file, header, bytes - file->start)
                : error_set("%s is not a safetensors file: its header is not a JSON object", path);
        cJSON_Delete(header);
    }
    free(text);
    return good;
}

Safetensors *safetensors_open(const char *path) {
    Safetensors *file = calloc(1, sizeof *file);
    if (file) file->path = strdup(path);
    if (!file || !file->path) {
        error_set("no memory to open %s", path);
        free(file);
        return NULL;
    }
    /* O_NONBLOCK: a pipe by that name must not hang the program. */
    file->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->file < 0) error_set("cannot read %s: %s", path, strerror(errno));
    if (file->file < 0 || !read_header(file)) {
        safetensors_close(file);
        return NULL;
    }
    return file;
}

void safetensors_close(Safetensors *file) {
    if (!file) return;
    if (file->file >= 0) close(file->file);
    for (size_t i = 0; i < file->count; i++) free(file->tensors[i].name);
    free(file->tensors);
    free(file->by_name);
    free(file->path);
    free(file);
}

size_t safetensors_count(const Safetensors *file) { return file->count; }

const SafetensorsTensor *safetensors_at(const Safetensors *file, size_t i) {
    return &file->tensors[i];
}

const SafetensorsTensor *safetensors_find(const Safetensors *file, const char *name) {
    SafetensorsTensor key = {.name = (char *)name}, *pointer = &key;
    SafetensorsTensor **found =
        bsearch(&pointer, file->by_name, file->count, sizeof *file->by_name, compare_names);
    return found ? *found : NULL;
}

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float float_of_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31,
             mantissa = half & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent > 0) return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float subnormal = (float)mantissa * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

static bool check_range(const Safetensors *file, const SafetensorsTensor *tensor, size_t first,
                        size_t n) {
    return (first <= tensor->elements && n <= tensor->elements - first) ||
           error_set("%s: elements %zu to %zu of tensor %.80s were asked for; it has %zu",
                     file->path, first, first + n, tensor->name, tensor->elements);
}

enum { PIECE = 4096 }; /* elements converted at a time */

bool safetensors_read_float(const Safetensors *file, const SafetensorsTensor *tensor, size_t first,
                            size_t n, float *values) {
    enum { F64, F32, F16, BF16, NEITHER } type = NEITHER;
    static const char *const names[] = {"F64", "F32", "F16", "BF16"};
    for (int i = 0; i < NEITHER; i++)
        if (!strcmp(tensor->dtype, names[i])) type = i;
    if (type == NEITHER)
        return error_set("%s: tensor %.80s has dtype %s; F32, F16, BF16 or F64 was expected",
                         file->path, tensor->name, tensor->dtype);
    if (!check_range(file, tensor, first, n)) return false;

    size_t size = dtype_bytes(tensor->dtype), offset = file->start + tensor->begin + first * size;
    if (type == F32) return file_read_at(file->file, file->path, values, n * size, offset);
    union {
        double f64[PIECE];
        uint16_t bits[PIECE];
    } piece;
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        if (!file_read_at(file->file, file->path, &piece, m * size, offset + done * size))
            return false;
        for (size_t i = 0; i < m; i++)
            values[done + i] = type == F64   ? (float)piece.f64[i]
                               : type == F16 ? float_of_half(piece.bits[i])
                                             : float_of_bits((uint32_t)piece.bits[i] << 16);
    }
    return true;
}

bool safetensors_read_int32(const Safetensors *file, const SafetensorsTensor *tensor, size_t first,
                            size_t n, int32_t *values) {
    bool wide = !strcmp(tensor->dtype, "I64");
    if (!wide && strcmp(tensor->dtype, "I32"))
        return error_set("%s: tensor %.80s has dtype %s; I32 or I64 was expected", file->path,
                         tensor->name, tensor->dtype);
    if (!check_range(file, tensor, first, n)) return false;

    size_t size = dtype_bytes(tensor->dtype), offset = file->start + tensor->begin + first * size;
    if (!wide) return file_read_at(file->file, file->path, values, n * size, offset);
    int64_t piece[PIECE];
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        if (!file_read_at(file->file, file->path, piece, m * size, offset + done * size))
            return false;
        for (size_t i = 0; i < m; i++) {
            if (piece[i] < INT32_MIN || piece[i] > INT32_MAX)
                return error_set("%s: element %zu of tensor %.80s is %lld, too large for 32 bits",
                                 file->path, first + done + i, tensor->name, (long long)piece[i]);
            values[done + i] = (int32_t)piece[i];
        }
    }
    return true;
}

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
    size_t bytes = dtype_bytes(dtype);
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
