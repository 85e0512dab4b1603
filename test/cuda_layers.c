#include "test/cuda_layers.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/convert.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "test/compare.h"
#include "test/devices.h"

enum { GUARD = 256 }; /* bytes of 0xff, which are NaN in each type, before and after a tensor */

struct Tensor {
    const char *name;
    size_t n;
    DataType type; /* on CUDA */
    char *memory[SIDES];
    size_t first[SIDES], end[SIDES]; /* bytes: where the values lie in memory */
};

/* The largest error of one quantity over all cases. */
typedef struct {
    char name[80], where[120];
    double error, tolerance;
} Worst;

LayerTest t;
DataType fp32 = TYPE_F32, bf16 = TYPE_BF16;

/* Of the case that runs. */
static Tensor tensors[20];
static int tensor_count;
static const char *case_layer;
static char shape[100];

/* Of the test that runs. */
static Worst quantities[40];
static int quantity_count;

void begin_case(const char *layer, const char *format, ...) {
    case_layer = layer;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(shape, sizeof shape, format, arguments);
    va_end(arguments);
}

static DataType type_on(const Tensor *tensor, Side side) {
    return side == REFERENCE && tensor->type != TYPE_I32 ? TYPE_F64 : tensor->type;
}

void *at(const Tensor *tensor, Side side) {
    return tensor ? tensor->memory[side] + tensor->first[side] : NULL;
}

/* A tensor with these bytes on each side, or NaN where there are none. */
static Tensor *place(const char *name, size_t n, DataType type, const void *values[SIDES]) {
    assert_true((size_t)tensor_count < COUNT(tensors));
    Tensor *tensor = &tensors[tensor_count++];
    *tensor = (Tensor){.name = name, .n = n, .type = type};
    FOR_SIDES(s) {
        size_t element = type_bytes(type_on(tensor, s));
        tensor->first[s] = GUARD + (type == t.type ? t.shift * element : 0);
        tensor->end[s] = tensor->first[s] + n * element;
        size_t bytes = tensor->end[s] + GUARD;
        char *host = malloc(bytes);
        assert_non_null(host);
        memset(host, 0xff, bytes);
        if (values[s]) memcpy(host + tensor->first[s], values[s], n * element);
        tensor->memory[s] = put(t.devices[s], host, bytes);
        free(host);
    }
    return tensor;
}

Tensor *output(const char *name, size_t n, DataType type) {
    return place(name, n, type, (const void *[SIDES]){NULL});
}

Tensor *integers(const char *name, size_t n, const int32_t *values) {
    return place(name, n, TYPE_I32, (const void *[SIDES]){values, values, values});
}

Tensor *given(const char *name, size_t n, DataType type, float *values) {
    void *stored = malloc(n * type_bytes(type) + 1);
    double *reference = malloc(n * sizeof(double) + 1);
    type_from_float(type, stored, values, n);
    type_to_float(type, values, stored, n);
    for (size_t i = 0; i < n; i++) reference[i] = values[i];
    Tensor *tensor = place(name, n, type, (const void *[SIDES]){reference, stored, stored});
    free(stored);
    free(reference);
    return tensor;
}

Tensor *normal(const char *name, size_t n, DataType type, float mean, float deviation) {
    float *values = malloc(n * sizeof(float) + 1);
    random_normal(values, n, t.key++, deviation);
    for (size_t i = 0; i < n; i++) values[i] += mean;
    Tensor *tensor = given(name, n, type, values);
    free(values);
    return tensor;
}

uint64_t random_below(uint64_t below) { return random_mix(7, t.key++) % below; }

double *download(const Tensor *tensor, Side side) {
    double *values = malloc(tensor->n * sizeof(double) + 1);
    if (type_on(tensor, side) == TYPE_F64) {
        device_download(t.devices[side], values, at(tensor, side), tensor->n * sizeof(double));
        return values;
    }
    void *stored = malloc(tensor->n * type_bytes(tensor->type) + 1);
    float *floats = malloc(tensor->n * sizeof(float) + 1);
    device_download(t.devices[side], stored, at(tensor, side),
                    tensor->n * type_bytes(tensor->type));
    type_to_float(tensor->type, floats, stored, tensor->n);
    for (size_t i = 0; i < tensor->n; i++) values[i] = floats[i];
    free(stored);
    free(floats);
    return values;
}

static void record(const char *name, double error, double tolerance) {
    char full[80];
    snprintf(full, sizeof full, "%s %s: %s", case_layer, type_name(t.type), name);
    Worst *worst = quantities, *end = quantities + quantity_count;
    while (worst < end && strcmp(worst->name, full) != 0) worst++;
    if (worst == end) {
        assert_true((size_t)quantity_count < COUNT(quantities));
        quantity_count++;
        *worst = (Worst){.tolerance = tolerance, .error = -1};
        memcpy(worst->name, full, sizeof full);
    }
    if (isnan(worst->error) || error / tolerance <= worst->error / worst->tolerance) return;
    worst->error = error;
    worst->tolerance = tolerance;
    memcpy(worst->where, shape, sizeof shape);
}

void check_norm(const Tensor *tensor, double tolerance) {
    double *cuda = download(tensor, FIRST), *cpu = download(tensor, REFERENCE);
    record(tensor->name, relative_error(cuda, cpu, tensor->n), tolerance);
    free(cuda);
    free(cpu);
}

void check_each(const Tensor *tensor, double relative, double absolute) {
    double *cuda = download(tensor, FIRST), *cpu = download(tensor, REFERENCE), worst = 0;
    for (size_t i = 0; i < tensor->n; i++) {
        double difference = fabs(cuda[i] - cpu[i]);
        double fraction = difference == 0 ? 0 : difference / (relative * fabs(cpu[i]) + absolute);
        if (!(fraction <= worst) && !isnan(worst)) worst = fraction;
    }
    record(tensor->name, worst, 1);
    free(cuda);
    free(cpu);
}

void adopt(const Tensor *tensor) {
    double *cuda = download(tensor, FIRST);
    device_upload(t.devices[REFERENCE], at(tensor, REFERENCE), cuda, tensor->n * sizeof(double));
    free(cuda);
}

static void release(void) {
    for (int i = 0; i < tensor_count; i++)
        FOR_SIDES(s) device_free(t.devices[s], tensors[i].memory[s]);
    tensor_count = 0;
}

void end_case(void) {
    for (int i = 0; i < tensor_count; i++) {
        Tensor *tensor = &tensors[i];
        size_t bytes = tensor->end[FIRST] + GUARD;
        unsigned char *run[] = {[FIRST] = malloc(bytes), [AGAIN] = malloc(bytes)};
        for (Side s = FIRST; s <= AGAIN; s++)
            device_download(t.devices[s], run[s], tensor->memory[s], bytes);
        if (memcmp(run[FIRST], run[AGAIN], bytes) != 0)
            fail_msg("%s %s: two runs differ in %s", case_layer, shape, tensor->name);
        for (size_t b = 0; b < bytes; b++)
            if ((b < tensor->first[FIRST] || b >= tensor->end[FIRST]) && run[FIRST][b] != 0xff)
                fail_msg("%s %s: wrote outside %s", case_layer, shape, tensor->name);
        free(run[FIRST]);
        free(run[AGAIN]);
    }
    release();
}

void start(void **state) {
    if (device_count_gpus() == 0) {
        print_message("no GPU here: the CUDA layers are not held against the CPU's\n");
        skip();
    }
    release(); /* of a test that failed before this one */
    t.type = *(const DataType *)*state;
    quantity_count = 0;
    t.shift = 0;
    t.key = 1;
    t.layers[REFERENCE] = layers_get(DEVICE_CPU, TYPE_F64);
    t.layers[FIRST] = t.layers[AGAIN] = layers_get(DEVICE_CUDA, t.type);
    FOR_SIDES(s) assert_non_null(t.layers[s]);
}

void finish(void) {
    bool passed = true;
    for (int i = 0; i < quantity_count; i++) {
        bool good = compare(quantities[i].name, quantities[i].error, quantities[i].tolerance);
        if (!good) print_message("  at %s\n", quantities[i].where);
        passed = passed && good;
    }
    assert_true(passed);
}

int open_sides(void **state) {
    (void)state;
    if (device_count_gpus() == 0) return 0; /* each test skips */
    t.devices[REFERENCE] = device_open(DEVICE_CPU, 0);
    t.devices[FIRST] = t.devices[AGAIN] = device_open(DEVICE_CUDA, 0);
    for (Side s = REFERENCE; s <= FIRST; s++) {
        Device *device = t.devices[s];
        size_t bytes = device ? layers_scratch_bytes(device->type, MAX_N) : 0;
        if (!device || !device_reserve_scratch(device, bytes)) {
            print_error("%s\n", error_message());
            return -1;
        }
    }
    return 0;
}

int close_sides(void **state) {
    (void)state;
    device_close(t.devices[REFERENCE]);
    device_close(t.devices[FIRST]);
    return 0;
}

double rounded(void) { return (t.type == TYPE_BF16 ? 0x1p-8 : 0) + ARITHMETIC; }
double matmul(void) { return t.type == TYPE_BF16 ? 1e-4 : ARITHMETIC; }
double matmul_rounded(void) { return (t.type == TYPE_BF16 ? 0x1p-8 : 0) + matmul(); }
double matmul_rounded_twice(void) { return (t.type == TYPE_BF16 ? 0x1p-7 : 0) + matmul(); }

const size_t rows[5] = {1, 17, 113, 257, 1023};
const size_t widths[7] = {1, 7, 48, 65, 384, 768, 1600};
const Dropout no_dropout = {0, 0}, dropout_tenth = {0.1f, 0x123456789abcdefu};
