/* Reading the safetensors format; see safetensors.h. A header is believed only when every number in
 * it has been checked: tensors must fill the data without gap or overlap, as the format demands.
 * Data are read where they are wanted, in pieces, and never mapped or held. */
#include "runtime/safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/convert.h"
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

size_t safetensors_dtype_bytes(const char *name) {
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (!strcmp(dtypes[i].name, name)) return dtypes[i].bytes;
    return 0;
}

typedef struct {
    char *path;
    int file;
    size_t start; /* of the data */
} Source;

struct Safetensors {
    size_t source_count, count;
    Source *sources;
    SafetensorsTensor *tensors;  /* source after source, each by offset */
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

    size_t size = safetensors_dtype_bytes(dtype->valuestring);
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

/* The header of the last source, whose tensors are appended. */
static bool parse_header(Safetensors *set, const cJSON *header, size_t data_bytes) {
    const char *path = set->sources[set->source_count - 1].path;
    size_t entries = (size_t)cJSON_GetArraySize(header), first = set->count;
    SafetensorsTensor *tensors = realloc(set->tensors, (first + entries + 1) * sizeof *tensors);
    if (!tensors) return error_set("no memory for the header of %s", path);
    set->tensors = tensors;

    const cJSON *entry;
    cJSON_ArrayForEach(entry, header) {
        if (!cJSON_IsObject(entry))
            return error_set("%s: \"%.80s\" in the header is not an object", path, entry->string);
        if (!strcmp(entry->string, "__metadata__")) continue;
        SafetensorsTensor *tensor = &tensors[set->count++];
        *tensor = (SafetensorsTensor){.source = set->source_count - 1};
        if (!parse_tensor(path, entry, tensor)) return false;
    }

    qsort(tensors + first, set->count - first, sizeof *tensors, compare_places);
    size_t end = 0;
    for (size_t i = first; i < set->count; i++) {
        const SafetensorsTensor *tensor = &tensors[i];
        if (tensor->begin != end)
            return error_set("%s: the data of tensor %.80s begin at byte %zu, expected %zu (%s)",
                             path, tensor->name, tensor->begin, end,
                             tensor->begin < end ? "they overlap another's" : "a gap");
        end += tensor->bytes;
        if (end > data_bytes) break;
    }
    return end == data_bytes ||
           error_set("%s holds %zu bytes of data; its header speaks of %s%zu: the file %s", path,
                     data_bytes, end > data_bytes ? "at least " : "", end,
                     end > data_bytes ? "is cut short" : "has something after its end");
}

static bool read_header(Safetensors *set) {
    Source *source = &set->sources[set->source_count - 1];
    const char *path = source->path;
    struct stat status;
    if (fstat(source->file, &status) != 0)
        return error_set("cannot read %s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode)) return error_set("%s is not a file", path);
    size_t bytes = (size_t)status.st_size;
    uint64_t length;
    if (bytes < sizeof length)
        return error_set("%s has %zu bytes, too few for a safetensors file", path, bytes);
    if (!file_read_at(source->file, path, &length, sizeof length, 0)) return false;
    if (length > bytes - sizeof length || length > HEADER_LIMIT)
        return error_set(
            "%s is not a safetensors file or is cut short: its header would take %llu bytes "
            "of the %zu that follow (at most %zu are allowed)",
            path, (unsigned long long)length, bytes - sizeof length, HEADER_LIMIT);
    source->start = sizeof length + length;

    char *text = malloc(length + 1);
    if (!text) return error_set("no memory for the header of %s", path);
    bool good = file_read_at(source->file, path, text, length, sizeof length);
    if (good) {
        /* The terminating 0 lets cJSON check that nothing but blanks follows the object. */
        text[length] = 0;
        cJSON *header = memchr(text, 0, length)
                            ? NULL
                            : cJSON_ParseWithLengthOpts(text, length + 1, NULL, /*terminated=*/1);
        good =
            cJSON_IsObject(header)
                ? parse_header(set, header, bytes - source->start)
                : error_set("%s is not a safetensors file: its header is not a JSON object", path);
        cJSON_Delete(header);
    }
    free(text);
    return good;
}

/* Opens one more file of the set. */
static bool add_source(Safetensors *set, const char *path) {
    Source *sources = realloc(set->sources, (set->source_count + 1) * sizeof *sources);
    if (!sources) return error_set("no memory to open %s", path);
    set->sources = sources;
    Source *source = &sources[set->source_count];
    *source = (Source){.path = strdup(path), .file = -1};
    if (!source->path) return error_set("no memory to open %s", path);
    set->source_count++;
    /* O_NONBLOCK: a pipe by that name must not hang the program. */
    source->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (source->file < 0) return error_set("cannot read %s: %s", path, strerror(errno));
    return read_header(set);
}

/* After the last source. */
static bool sort_names(Safetensors *set) {
    set->by_name = malloc((set->count + 1) * sizeof *set->by_name);
    if (!set->by_name) return error_set("no memory for the names of %zu tensors", set->count);
    for (size_t i = 0; i < set->count; i++) set->by_name[i] = &set->tensors[i];
    qsort(set->by_name, set->count, sizeof *set->by_name, compare_names);
    for (size_t i = 1; i < set->count; i++) {
        const SafetensorsTensor *a = set->by_name[i - 1], *b = set->by_name[i];
        const char *a_path = set->sources[a->source].path, *b_path = set->sources[b->source].path;
        if (strcmp(a->name, b->name) != 0) continue;
        if (a->source == b->source) return error_set("%s has tensor %.80s twice", a_path, a->name);
        return error_set("tensor %.80s is in both %s and %s", a->name, a_path, b_path);
    }
    return true;
}

Safetensors *safetensors_open(const char *path) {
    Safetensors *set = calloc(1, sizeof *set);
    if (!set) error_set("no memory to open %s", path);
    if (set && add_source(set, path) && sort_names(set)) return set;
    safetensors_close(set);
    return NULL;
}

/* A file named by an index: in its directory, and printable in a sentence. */
static bool is_file_name(const cJSON *item) {
    if (!cJSON_IsString(item) || !*item->valuestring) return false;
    for (const unsigned char *c = (const unsigned char *)item->valuestring; *c; c++)
        if (*c < 32 || *c == 127 || *c == '/') return false;
    return strcmp(item->valuestring, ".") != 0 && strcmp(item->valuestring, "..") != 0;
}

static int compare_file_names(const void *a, const void *b) {
    return strcmp((*(const cJSON *const *)a)->valuestring, (*(const cJSON *const *)b)->valuestring);
}

/* Opens each file that the map names, once. */
static bool add_mapped(Safetensors *set, const char *path, const cJSON *map) {
    size_t entries = (size_t)cJSON_GetArraySize(map), n = 0;
    const cJSON **by_file = malloc((entries + 1) * sizeof *by_file), *entry;
    if (!by_file) return error_set("no memory for the names in %s", path);
    bool good = true;
    cJSON_ArrayForEach(entry, map) {
        good = is_file_name(entry) ||
               error_set("%s: a tensor's place is not the name of a file beside it", path);
        if (!good) break;
        by_file[n++] = entry;
    }
    if (good) qsort(by_file, n, sizeof *by_file, compare_file_names);
    for (size_t i = 0; good && i < n; i++) {
        char source[FILE_PATH_BYTES];
        if (i > 0 && !compare_file_names(&by_file[i - 1], &by_file[i])) continue;
        const char *slash = strrchr(path, '/'), *name = by_file[i]->valuestring;
        int length = snprintf(source, sizeof source, "%.*s%s", slash ? (int)(slash - path + 1) : 0,
                              path, name);
        good = length < FILE_PATH_BYTES || error_set("the path %.60s... is too long", path);
        if (good && !file_exists(source))
            good = error_set("%s names %.80s, which is missing beside it", path, name);
        good = good && add_source(set, source);
    }
    free(by_file);
    return good;
}

/* Each tensor of the map is where the map says. */
static bool check_map(const Safetensors *set, const char *path, const cJSON *map) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, map) {
        const SafetensorsTensor *tensor = safetensors_find(set, entry->string);
        const char *source = tensor ? set->sources[tensor->source].path : "";
        const char *slash = strrchr(source, '/');
        if (strcmp(slash ? slash + 1 : source, entry->valuestring) != 0)
            return error_set("%s promises a tensor in %.80s that is not there%s%.80s", path,
                             entry->valuestring, tensor ? ": " : "", tensor ? tensor->name : "");
    }
    return true;
}

Safetensors *safetensors_open_index(const char *path) {
    char *text = file_read(path, HEADER_LIMIT, NULL);
    if (!text) return NULL;
    cJSON *json = cJSON_ParseWithOpts(text, NULL, /*terminated=*/1);
    free(text);
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map");
    Safetensors *set = calloc(1, sizeof *set);
    bool good = set || error_set("no memory to open %s", path);
    if (good && (!cJSON_IsObject(map) || !map->child))
        good = error_set("%s is not the index of safetensors files: it has no weight_map", path);
    good = good && add_mapped(set, path, map) && sort_names(set) && check_map(set, path, map);
    cJSON_Delete(json);
    if (good) return set;
    safetensors_close(set);
    return NULL;
}

void safetensors_close(Safetensors *set) {
    if (!set) return;
    for (size_t i = 0; i < set->source_count; i++) {
        if (set->sources[i].file >= 0) close(set->sources[i].file);
        free(set->sources[i].path);
    }
    for (size_t i = 0; i < set->count; i++) free(set->tensors[i].name);
    free(set->sources);
    free(set->tensors);
    free(set->by_name);
    free(set);
}

size_t safetensors_count(const Safetensors *set) { return set->count; }

const SafetensorsTensor *safetensors_at(const Safetensors *set, size_t i) {
    return &set->tensors[i];
}

const SafetensorsTensor *safetensors_find(const Safetensors *set, const char *name) {
    SafetensorsTensor key = {.name = (char *)name}, *pointer = &key;
    SafetensorsTensor **found =
        bsearch(&pointer, set->by_name, set->count, sizeof *set->by_name, compare_names);
    return found ? *found : NULL;
}

/* Where an element of a tensor lies; false if not all n from there on are its own. */
static bool locate(const Safetensors *set, const SafetensorsTensor *tensor, size_t first, size_t n,
                   size_t *offset) {
    const Source *source = &set->sources[tensor->source];
    *offset = source->start + tensor->begin + first * safetensors_dtype_bytes(tensor->dtype);
    return (first <= tensor->elements && n <= tensor->elements - first) ||
           error_set("%s: elements %zu to %zu of tensor %.80s were asked for; it has %zu",
                     source->path, first, first + n, tensor->name, tensor->elements);
}

static bool wrong_dtype(const Safetensors *set, const SafetensorsTensor *tensor,
                        const char *expected) {
    return error_set("%s: tensor %.80s has dtype %s; %s was expected",
                     set->sources[tensor->source].path, tensor->name, tensor->dtype, expected);
}

enum { PIECE = 4096 }; /* elements converted at a time */

bool safetensors_read_float(const Safetensors *set, const SafetensorsTensor *tensor, size_t first,
                            size_t n, float *values) {
    bool f64 = !strcmp(tensor->dtype, "F64"), f32 = !strcmp(tensor->dtype, "F32"),
         f16 = !strcmp(tensor->dtype, "F16"), bf16 = !strcmp(tensor->dtype, "BF16");
    if (!f64 && !f32 && !f16 && !bf16) return wrong_dtype(set, tensor, "F32, F16, BF16 or F64");
    const Source *source = &set->sources[tensor->source];
    size_t size = safetensors_dtype_bytes(tensor->dtype), offset;
    if (!locate(set, tensor, first, n, &offset)) return false;
    if (f32) return file_read_at(source->file, source->path, values, n * size, offset);
    union {
        double f64[PIECE];
        uint16_t bits[PIECE];
    } piece;
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        if (!file_read_at(source->file, source->path, &piece, m * size, offset + done * size))
            return false;
        if (f16)
            half_to_float(values + done, piece.bits, m);
        else
            type_to_float(f64 ? TYPE_F64 : TYPE_BF16, values + done, &piece, m);
    }
    return true;
}

bool safetensors_read_int32(const Safetensors *set, const SafetensorsTensor *tensor, size_t first,
                            size_t n, int32_t *values) {
    bool wide = !strcmp(tensor->dtype, "I64");
    if (!wide && strcmp(tensor->dtype, "I32")) return wrong_dtype(set, tensor, "I32 or I64");
    const Source *source = &set->sources[tensor->source];
    size_t size = safetensors_dtype_bytes(tensor->dtype), offset;
    if (!locate(set, tensor, first, n, &offset)) return false;
    if (!wide) return file_read_at(source->file, source->path, values, n * size, offset);
    int64_t piece[PIECE];
    for (size_t done = 0; done < n; done += PIECE) {
        size_t m = n - done < PIECE ? n - done : PIECE;
        if (!file_read_at(source->file, source->path, piece, m * size, offset + done * size))
            return false;
        for (size_t i = 0; i < m; i++) {
            if (piece[i] < INT32_MIN || piece[i] > INT32_MAX)
                return error_set("%s: element %zu of tensor %.80s is %lld, too large for 32 bits",
                                 source->path, first + done + i, tensor->name, (long long)piece[i]);
            values[done + i] = (int32_t)piece[i];
        }
    }
    return true;
}
