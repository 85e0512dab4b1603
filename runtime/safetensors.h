/* The safetensors format: a little-endian u64 header length, that many bytes of JSON
 * {"name": {"dtype", "shape", "data_offsets": [begin, end]}, …, "__metadata__": {…}}, then the data,
 * C order, offsets relative to its start.
 *
 * A model too large for one file lies in several, beside an index: JSON with
 * "weight_map": {"name": "file", …}. */
#ifndef RUNTIME_SAFETENSORS_H
#define RUNTIME_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SAFETENSORS_MAX_RANK 8

typedef struct {
    char *name;
    char dtype[8]; /* "F64", "F32", "F16", "BF16", "I32", "I64", "U8", … */
    int rank;
    size_t shape[SAFETENSORS_MAX_RANK];
    size_t elements; /* shape multiplied out */
    size_t begin, bytes;
    size_t source; /* number of the file, where there are several */
} SafetensorsTensor;

typedef struct Safetensors Safetensors;

/* Opens a file and checks its whole header: sizes, overlaps, offsets, dtype × shape against bytes.
 * NULL with error_message(), which names the file, what was found and what was expected. */
Safetensors *safetensors_open(const char *path);
/* Opens all files that an index names, as if they were one. They must lie beside it and hold what
 * it says they hold. */
Safetensors *safetensors_open_index(const char *path);
void safetensors_close(Safetensors *file);
size_t safetensors_count(const Safetensors *file);
const SafetensorsTensor *safetensors_at(const Safetensors *file, size_t i);
/* NULL (and no message) if there is no tensor of that name. */
const SafetensorsTensor *safetensors_find(const Safetensors *file, const char *name);

/* Elements [first, first + n) as floats, from F64, F32, F16 or BF16; as int32 from I32 or I64. False
 * with error_message() for another dtype, a range outside the tensor, or a failing read. */
bool safetensors_read_float(const Safetensors *file, const SafetensorsTensor *tensor, size_t first,
                            size_t n, float *values);
bool safetensors_read_int32(const Safetensors *file, const SafetensorsTensor *tensor, size_t first,
                            size_t n, int32_t *values);

/* Bytes of one element; 0 if there is no such type. */
size_t safetensors_dtype_bytes(const char *dtype);

/* Writing: declare every tensor, then give their data in the same order, in any number of pieces.
 * begin creates the file; finish checks that all was given, syncs and closes it. On failure each
 * returns false with error_message() and the writer is still to be finished (which then also returns
 * false and removes the file). */
typedef struct SafetensorsWriter SafetensorsWriter;
SafetensorsWriter *safetensors_writer(const char *path);
void safetensors_declare(SafetensorsWriter *writer, const char *name, const char *dtype, int rank,
                         const size_t *shape);
bool safetensors_begin(SafetensorsWriter *writer);
bool safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes);
/* The same for n values that are stored as F32, F16 or BF16, rounded to nearest even. */
bool safetensors_write_float(SafetensorsWriter *writer, const char *dtype, const float *values,
                             size_t n);
bool safetensors_finish(SafetensorsWriter *writer);

#ifdef __cplusplus
}
#endif
#endif
