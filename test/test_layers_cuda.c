/* Every layer on CUDA, in fp32 and bf16, against its CPU twin in double on the same inputs.
 *
 * A case makes its tensors once for each of three sides: the CPU in double, CUDA, and CUDA again.
 * The layer is called for all sides; then check() holds CUDA against the CPU, and both CUDA runs
 * must have written the same bits and nothing outside their tensors. Inputs are rounded to the type
 * under test first, so that both devices start from equal numbers. Outputs start as NaN, so what a
 * kernel leaves unwritten fails; accumulators start at numbers, so `=` for `+=` fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "layers/layers.h"
#include "runtime/convert.h"
#include "runtime/error.h"
#include "test/compare.h"
#include "test/part.h"

typedef enum { REFERENCE, FIRST, AGAIN, SIDES } Side;

#define FOR_SIDES(s) for (Side s = REFERENCE; s < SIDES; s++)
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { GUARD = 256 }; /* bytes of 0xff, which are NaN in each type, before and after a tensor */
enum { MAX_N = 4096, MAX_C = 5000 };

typedef struct {
    const char *name;
    size_t n;
    DataType type; /* on CUDA */
    char *memory[SIDES];
    size_t first[SIDES], end[SIDES]; /* bytes: where the values lie in memory */
} Tensor;

/* The largest error of one quantity over all cases. */
typedef struct {
    char name[80], where[120];
    double error, tolerance;
} Worst;

static struct {
    Device *devices[SIDES];
    const Layers *layers[SIDES];
    DataType type;  /* under test */
    size_t shift;   /* elements from a 16-byte boundary at which real tensors start */
    uint64_t key;   /* of the next random tensor */
    Tensor tensors[20];
    int tensor_count;
    const char *layer;
    char shape[100];
    Worst worst[40];
    int worst_count;
} t;

/* Cases. */

static void begin(const char *layer, const char *format, ...) {
    t.layer = layer;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(t.shape, sizeof t.shape, format, arguments);
    va_end(arguments);
}

static DataType type_on(const Tensor *tensor, Side side) {
    return side == REFERENCE && tensor->type != TYPE_I32 ? TYPE_F64 : tensor->type;
}

/* The tensor's address for a layer call; NULL for no tensor. */
static void *at(const Tensor *tensor, Side side) {
    return tensor ? tensor->memory[side] + tensor->first[side] : NULL;
}

/* A tensor with these bytes on each side, or NaN where there are none. */
static Tensor *place(const char *name, size_t n, DataType type, const void *values[SIDES]) {
    assert_true((size_t)t.tensor_count < COUNT(t.tensors));
    Tensor *tensor = &t.tensors[t.tensor_count++];
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
        tensor->memory[s] = device_alloc(t.devices[s], bytes);
        if (!tensor->memory[s]) fail_msg("%s", error_message());
        device_upload(t.devices[s], tensor->memory[s], host, bytes);
        free(host);
    }
    return tensor;
}

static Tensor *output(const char *name, size_t n, DataType type) {
    return place(name, n, type, (const void *[SIDES]){NULL});
}

static Tensor *integers(const char *name, size_t n, const int32_t *values) {
    return place(name, n, TYPE_I32, (const void *[SIDES]){values, values, values});
}

/* These values, rounded to the tensor's type on every side. */
static Tensor *given(const char *name, size_t n, DataType type, float *values) {
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

static Tensor *normal(const char *name, size_t n, DataType type, float mean, float deviation) {
    float *values = malloc(n * sizeof(float) + 1);
    random_normal(values, n, t.key++, deviation);
    for (size_t i = 0; i < n; i++) values[i] += mean;
    Tensor *tensor = given(name, n, type, values);
    free(values);
    return tensor;
}

static uint64_t draw(uint64_t below) { return random_mix(7, t.key++) % below; }

/* Comparison. */

static double *download(const Tensor *tensor, Side side) {
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
    snprintf(full, sizeof full, "%s %s: %s", t.layer, type_name(t.type), name);
    Worst *worst = t.worst, *end = t.worst + t.worst_count;
    while (worst < end && strcmp(worst->name, full) != 0) worst++;
    if (worst == end) {
        assert_true((size_t)t.worst_count < COUNT(t.worst));
        t.worst_count++;
        *worst = (Worst){.tolerance = tolerance, .error = -1};
        memcpy(worst->name, full, sizeof full);
    }
    if (isnan(worst->error) || error / tolerance <= worst->error / worst->tolerance) return;
    worst->error = error;
    worst->tolerance = tolerance;
    memcpy(worst->where, t.shape, sizeof t.shape);
}

/* ‖CUDA - CPU‖ / ‖CPU‖ <= tolerance. */
static void check(const Tensor *tensor, double tolerance) {
    double *cuda = download(tensor, FIRST), *cpu = download(tensor, REFERENCE);
    record(tensor->name, relative_error(cuda, cpu, tensor->n), tolerance);
    free(cuda);
    free(cpu);
}

/* |CUDA - CPU| <= relative |CPU| + absolute for each element; recorded as a fraction of that. With
 * absolute = 0 a reference of 0 must be met exactly. */
static void check_each(const Tensor *tensor, double relative, double absolute) {
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

/* Makes what CUDA computed the reference for what is computed from it. */
static void adopt(const Tensor *tensor) {
    double *cuda = download(tensor, FIRST);
    device_upload(t.devices[REFERENCE], at(tensor, REFERENCE), cuda, tensor->n * sizeof(double));
    free(cuda);
}

static void release(void) {
    for (int i = 0; i < t.tensor_count; i++)
        FOR_SIDES(s) device_free(t.devices[s], t.tensors[i].memory[s]);
    t.tensor_count = 0;
}

/* Ends a case: equal bits from both runs, nothing written outside. */
static void end(void) {
    for (int i = 0; i < t.tensor_count; i++) {
        Tensor *tensor = &t.tensors[i];
        size_t bytes = tensor->end[FIRST] + GUARD;
        unsigned char *run[] = {[FIRST] = malloc(bytes), [AGAIN] = malloc(bytes)};
        for (Side s = FIRST; s <= AGAIN; s++)
            device_download(t.devices[s], run[s], tensor->memory[s], bytes);
        if (memcmp(run[FIRST], run[AGAIN], bytes) != 0)
            fail_msg("%s %s: two runs differ in %s", t.layer, t.shape, tensor->name);
        for (size_t b = 0; b < bytes; b++)
            if ((b < tensor->first[FIRST] || b >= tensor->end[FIRST]) && run[FIRST][b] != 0xff)
                fail_msg("%s %s: wrote outside %s", t.layer, t.shape, tensor->name);
        free(run[FIRST]);
        free(run[AGAIN]);
    }
    release();
}

/* Tests: start(state) first, finish() last. */

static void start(void **state) {
    if (device_count_gpus() == 0) {
        print_message("no GPU here: the CUDA layers are not held against the CPU's\n");
        skip();
    }
    release(); /* of a test that failed before this one */
    t.type = *(const DataType *)*state;
    t.worst_count = 0;
    t.shift = 0;
    t.key = 1;
    t.layers[REFERENCE] = layers_get(DEVICE_CPU, TYPE_F64);
    t.layers[FIRST] = t.layers[AGAIN] = layers_get(DEVICE_CUDA, t.type);
    FOR_SIDES(s) assert_non_null(t.layers[s]);
}

static void finish(void) {
    bool passed = true;
    for (int i = 0; i < t.worst_count; i++) {
        bool good = compare(t.worst[i].name, t.worst[i].error, t.worst[i].tolerance);
        if (!good) print_message("  at %s\n", t.worst[i].where);
        passed = passed && good;
    }
    assert_true(passed);
}

/* Tolerances. Float arithmetic on some thousand terms loses up to 1e-5 of the result, mostly less.
 * A tensor of bf16 adds one rounding, at most 2^-8 of each element and so of the norm. */
static const double ARITHMETIC = 1e-5;
static double rounded(void) { return (t.type == TYPE_BF16 ? 0x1p-8 : 0) + ARITHMETIC; }
/* Tensor cores truncate as they add, which costs more than rounding does. */
static double matmul(void) { return t.type == TYPE_BF16 ? 1e-4 : ARITHMETIC; }
static double matmul_rounded(void) { return (t.type == TYPE_BF16 ? 0x1p-8 : 0) + matmul(); }
/* GELU or its derivative may be applied to a product that was rounded to bf16 before. */
static double matmul_rounded_twice(void) { return (t.type == TYPE_BF16 ? 0x1p-7 : 0) + matmul(); }

static const size_t rows[] = {1, 17, 113, 257, 1023};
static const size_t widths[] = {1, 7, 48, 65, 384, 768, 1600};
static const Dropout no_dropout = {0, 0}, dropout_tenth = {0.1f, 0x123456789abcdefu};

/* Layernorm. */

static void layernorm_case(size_t N, size_t C, float mean_of_x) {
    begin("layernorm", "N=%zu C=%zu mean %g", N, C, mean_of_x);
    Tensor *x = normal("x", N * C, t.type, mean_of_x, 2), *out = output("out", N * C, t.type);
    Tensor *weight = normal("weight", C, t.type, 1, .3f), *bias = normal("bias", C, t.type, 0, .3f);
    Tensor *mean = output("mean", N, TYPE_F32), *rstd = output("rstd", N, TYPE_F32);
    FOR_SIDES(s)
        t.layers[s]->layernorm_forward(at(out, s), at(mean, s), at(rstd, s), at(x, s),
                                       at(weight, s), at(bias, s), N, C, 1e-5f, t.devices[s]);
    /* The mean is good to 2^-23 of itself, which becomes an error of x - mean. */
    double shift = fabs(mean_of_x) * 0x1p-23;
    check(out, rounded() + shift);
    check(mean, ARITHMETIC);
    check(rstd, ARITHMETIC);

    Tensor *dout = normal("dout", N * C, t.type, .1f, 1), *dx = output("dx", N * C, t.type);
    Tensor *dresidual = normal("dx on dresidual", N * C, t.type, 0, 1);
    Tensor *dweight = normal("dweight", C, TYPE_F32, 0, 1);
    Tensor *dbias = normal("dbias", C, TYPE_F32, 0, 1);
    adopt(mean);
    adopt(rstd);
    FOR_SIDES(s) {
        t.layers[s]->layernorm_backward(at(dx, s), at(dweight, s), at(dbias, s), at(dout, s), NULL,
                                        at(x, s), at(mean, s), at(rstd, s), at(weight, s), N, C,
                                        t.devices[s]);
        t.layers[s]->layernorm_backward(at(dresidual, s), at(dweight, s), at(dbias, s),
                                        at(dout, s), at(dresidual, s), at(x, s), at(mean, s),
                                        at(rstd, s), at(weight, s), N, C, t.devices[s]);
    }
    /* A row of one element has no variance: its exact gradient is 0, left by cancellation of terms
     * of size rstd = eps^-1/2. So dx is compared with 0 in absolute terms, N roundings of them. */
    double cancelled = C == 1 ? 0x1p-23 / sqrt(1e-5) : 0;
    check(dx, rounded() + cancelled * sqrt((double)N));
    check(dresidual, rounded() + cancelled);
    check(dweight, ARITHMETIC);
    check(dbias, ARITHMETIC);
    end();
}

typedef enum { RESIDUAL_APART, RESIDUAL_IS_X, RESIDUAL_IS_BRANCH } Alias;

static void residual_layernorm_case(size_t N, size_t C, Dropout dropout, Alias alias) {
    begin("residual_layernorm", "N=%zu C=%zu p=%g alias %d", N, C, dropout.probability, alias);
    const char *const on_x = alias == RESIDUAL_IS_X ? "residual on x" : "x";
    const char *const on_branch = alias == RESIDUAL_IS_BRANCH ? "residual on branch" : "branch";
    Tensor *x = normal(on_x, N * C, t.type, .5f, 2);
    Tensor *branch = normal(on_branch, N * C, t.type, 0, 1);
    Tensor *weight = normal("weight", C, t.type, 1, .3f), *bias = normal("bias", C, t.type, 0, .3f);
    Tensor *out = output("out", N * C, t.type);
    Tensor *residual = alias == RESIDUAL_IS_X        ? x
                       : alias == RESIDUAL_IS_BRANCH ? branch
                                                     : output("residual", N * C, t.type);
    Tensor *mean = output("mean", N, TYPE_F32), *rstd = output("rstd", N, TYPE_F32);
    FOR_SIDES(s)
        t.layers[s]->residual_layernorm_forward(
            at(out, s), at(residual, s), at(mean, s), at(rstd, s), at(x, s), at(branch, s),
            at(weight, s), at(bias, s), N, C, 1e-5f, dropout, t.devices[s]);
    check(residual, rounded());

    /* The rest is that of the residual as stored. */
    adopt(residual);
    const Layers *cpu = t.layers[REFERENCE];
    cpu->layernorm_forward(at(out, REFERENCE), at(mean, REFERENCE), at(rstd, REFERENCE),
                           at(residual, REFERENCE), at(weight, REFERENCE), at(bias, REFERENCE), N,
                           C, 1e-5f, t.devices[REFERENCE]);
    check(out, rounded());
    check(mean, ARITHMETIC);
    check(rstd, ARITHMETIC);
    end();
}

static void layernorm(void **state) {
    start(state);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(widths); j++) layernorm_case(rows[i], widths[j], .5f);
    layernorm_case(MAX_N, 768, .5f);
    layernorm_case(17, 1280, .5f);
    layernorm_case(17, 4096, .5f);
    layernorm_case(3, MAX_C, .5f); /* too wide for registers */
    layernorm_case(257, 768, 1000); /* a variance from Σx² would be all rounding */
    t.shift = 1; /* no 16-byte access is allowed */
    layernorm_case(17, 768, .5f);
    finish();
}

static void residual_layernorm(void **state) {
    start(state);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(widths); j++)
            residual_layernorm_case(rows[i], widths[j], dropout_tenth, RESIDUAL_APART);
    residual_layernorm_case(MAX_N, 768, no_dropout, RESIDUAL_IS_X);
    residual_layernorm_case(257, 384, dropout_tenth, RESIDUAL_IS_X);
    residual_layernorm_case(257, 384, dropout_tenth, RESIDUAL_IS_BRANCH);
    residual_layernorm_case(17, 65, dropout_tenth, RESIDUAL_IS_X);
    residual_layernorm_case(17, 65, dropout_tenth, RESIDUAL_IS_BRANCH);
    residual_layernorm_case(3, MAX_C, dropout_tenth, RESIDUAL_APART);
    t.shift = 1;
    residual_layernorm_case(17, 768, dropout_tenth, RESIDUAL_APART);
    finish();
}

/* Linear. */

static void linear_case(size_t N, size_t IC, size_t OC, WeightLayout layout) {
    begin("linear", "N=%zu IC=%zu OC=%zu %s", N, IC, OC,
          layout == WEIGHT_IN_OUT ? "in-out" : "out-in");
    const float scale = 1 / sqrtf((float)IC);
    Tensor *x = normal("x", N * IC, t.type, 0, 1), *bias = normal("bias", OC, t.type, 0, 1);
    Tensor *weight = normal("weight", IC * OC, t.type, 0, scale);
    Tensor *out = output("out", N * OC, t.type), *unbiased = output("out, no bias", N * OC, t.type);
    Tensor *pre_gelu = output("pre_gelu", N * OC, t.type);
    Tensor *activated = output("out, GELU", N * OC, t.type);
    FOR_SIDES(s) {
        LinearForward *forward = t.layers[s]->linear_forward;
        forward(at(out, s), NULL, at(x, s), at(weight, s), at(bias, s), N, IC, OC, layout,
                t.devices[s]);
        forward(at(unbiased, s), NULL, at(x, s), at(weight, s), NULL, N, IC, OC, layout,
                t.devices[s]);
        forward(at(activated, s), at(pre_gelu, s), at(x, s), at(weight, s), at(bias, s), N, IC, OC,
                layout, t.devices[s]);
    }
    check(out, matmul_rounded());
    check(unbiased, matmul_rounded());
    check(pre_gelu, matmul_rounded());
    check(activated, matmul_rounded_twice());

    Tensor *dout = normal("dout", N * OC, t.type, .1f, 1), *dx = output("dx", N * IC, t.type);
    Tensor *activation = normal("activation", N * IC, t.type, 0, 1);
    Tensor *dactivation = output("dx, GELU", N * IC, t.type);
    Tensor *dweight = normal("dweight", IC * OC, TYPE_F32, 0, 1);
    Tensor *dbias = normal("dbias", OC, TYPE_F32, 0, 1);
    FOR_SIDES(s) {
        LinearBackward *backward = t.layers[s]->linear_backward;
        backward(at(dx, s), at(dweight, s), at(dbias, s), at(dout, s), at(x, s), at(weight, s),
                 NULL, N, IC, OC, layout, t.devices[s]);
        backward(at(dactivation, s), at(dweight, s), at(dbias, s), at(dout, s), at(x, s),
                 at(weight, s), at(activation, s), N, IC, OC, layout, t.devices[s]);
        backward(NULL, at(dweight, s), NULL, at(dout, s), at(x, s), at(weight, s), NULL, N, IC, OC,
                 layout, t.devices[s]);
    }
    check(dx, matmul_rounded());
    check(dactivation, matmul_rounded_twice());
    check(dweight, matmul());
    check(dbias, ARITHMETIC);
    end();
}

static void linear(void **state) {
    start(state);
    static const size_t shapes[][2] = {{1, 1},   {7, 65},     {65, 7},    {48, 144},
                                       {128, 65}, {384, 1536}, {768, 2304}, {1600, 64}};
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(shapes); j++) {
            linear_case(rows[i], shapes[j][0], shapes[j][1], WEIGHT_IN_OUT);
            linear_case(rows[i], shapes[j][0], shapes[j][1], WEIGHT_OUT_IN);
        }
    linear_case(MAX_N, 384, 384, WEIGHT_IN_OUT);
    linear_case(17, 128, 50304, WEIGHT_OUT_IN);
    finish();
}

/* Elementwise. */

static void gelu_case(size_t n) {
    begin("gelu", "n=%zu", n);
    Tensor *x = normal("x", n, t.type, 0, 2), *out = output("out", n, t.type);
    Tensor *dout = normal("dx on dout", n, t.type, 0, 1), *dx = output("dx", n, t.type);
    FOR_SIDES(s) {
        t.layers[s]->gelu_forward(at(out, s), at(x, s), n, t.devices[s]);
        t.layers[s]->gelu_backward(at(dx, s), at(dout, s), at(x, s), n, t.devices[s]);
        t.layers[s]->gelu_backward(at(dout, s), at(dout, s), at(x, s), n, t.devices[s]);
    }
    check(out, rounded());
    check(dx, rounded());
    check(dout, rounded());
    end();
}

/* Where exponentials and cubes overflow, element by element: the largest would hide the rest. */
static void gelu_extremes(void) {
    begin("gelu extremes", "|x| up to 1e30");
    float x_values[] = {0, 1e-30f, -1e-30f, .1f, -.1f, -.75f, 3, -3, 5, -5, 9.9f, -9.9f, 10.1f,
                        -10.1f, 30, -30, 1e4f, -1e4f, 1e14f, -1e14f, 1e30f, -1e30f};
    const size_t n = COUNT(x_values);
    Tensor *x = given("x", n, t.type, x_values), *out = output("out", n, t.type);
    Tensor *dout = normal("dout", n, t.type, 3, .1f), *dx = output("dx", n, t.type);
    FOR_SIDES(s) {
        t.layers[s]->gelu_forward(at(out, s), at(x, s), n, t.devices[s]);
        t.layers[s]->gelu_backward(at(dx, s), at(dout, s), at(x, s), n, t.devices[s]);
    }
    check_each(out, rounded(), 1e-20); /* small values keep their relative accuracy */
    check_each(dx, rounded(), 1e-5);   /* gelu' cancels near its zero, x = -0.75 */
    end();
}

static void gelu(void **state) {
    start(state);
    static const size_t sizes[] = {1, 7, 48, 8191, 1023 * 65, (size_t)MAX_N * 384};
    for (size_t i = 0; i < COUNT(sizes); i++) gelu_case(sizes[i]);
    gelu_extremes();
    t.shift = 1;
    gelu_case(8191);
    finish();
}

/* Element by element, so the zeros must be the same ones. */
static void dropout_case(size_t n, Dropout dropout) {
    begin("dropout", "n=%zu p=%g", n, dropout.probability);
    Tensor *x = normal("out on x", n, t.type, 0, 1), *out = output("out", n, t.type);
    FOR_SIDES(s) {
        t.layers[s]->dropout_forward(at(out, s), at(x, s), n, dropout, t.devices[s]);
        t.layers[s]->dropout_forward(at(x, s), at(x, s), n, dropout, t.devices[s]);
    }
    check_each(out, rounded(), 0);
    check_each(x, rounded(), 0);
    end();
}

static void dropout(void **state) {
    start(state);
    static const size_t sizes[] = {1, 7, 15, 48, 8191, (size_t)MAX_N * 384};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        dropout_case(sizes[i], no_dropout);
        dropout_case(sizes[i], dropout_tenth);
        dropout_case(sizes[i], (Dropout){.5f, ~(uint64_t)0});
    }
    t.shift = 1;
    dropout_case(8191, dropout_tenth);
    finish();
}

/* Cross-entropy. */

/* (N,Vp) logits with `padding` in the columns from V on, and targets that include the last column
 * and rows to ignore. */
static Tensor *logits_and_targets(size_t N, size_t V, size_t Vp, float deviation, float padding,
                                  Tensor **targets) {
    float *values = malloc(N * Vp * sizeof(float));
    int32_t *target_values = malloc(N * sizeof(int32_t));
    random_normal(values, N * Vp, t.key++, deviation);
    for (size_t n = 0; n < N; n++) {
        for (size_t v = V; v < Vp; v++) values[n * Vp + v] = padding;
        target_values[n] = n % 5 == 3 ? -1 : n % 5 == 1 ? (int32_t)V - 1 : (int32_t)draw(V);
    }
    *targets = integers("targets", N, target_values);
    Tensor *logits = given("dlogits", N * Vp, t.type, values);
    free(values);
    free(target_values);
    return logits;
}

static void cross_entropy_case(size_t N, size_t V, size_t Vp, float deviation, float padding) {
    begin("cross_entropy", "N=%zu V=%zu Vp=%zu deviation %g padding %g", N, V, Vp, deviation,
          padding);
    Tensor *targets, *logits = logits_and_targets(N, V, Vp, deviation, padding, &targets);
    Tensor *losses = output("losses", N, TYPE_F32), *same = output("losses again", N, TYPE_F32);
    const float dloss = .37f;
    FOR_SIDES(s) {
        t.layers[s]->cross_entropy_forward(at(losses, s), at(logits, s), at(targets, s), N, V, Vp,
                                           t.devices[s]);
        t.layers[s]->cross_entropy_backward(at(same, s), at(logits, s), at(targets, s), dloss, N, V,
                                            Vp, t.devices[s]);
    }
    check(losses, ARITHMETIC);
    check(same, ARITHMETIC);
    /* Each element, for the targets' near -dloss would hide the rest; p - 1 cancels where p is near
     * 1, and a probability below the smallest float may be 0. */
    check_each(logits, rounded(), 1e-6);
    end();
}

/* A row with a logit that is not finite has a loss that is not: the run must notice. */
static void cross_entropy_of(float poison) {
    enum { V = 300, N = 3 };
    begin("cross_entropy", "with a logit of %g", poison);
    float values[N * V] = {0};
    values[1 * V + 77] = poison;
    Tensor *logits = given("poisoned logits", N * V, t.type, values);
    Tensor *targets = integers("targets", N, (const int32_t[N]){1, 2, 3});
    Tensor *losses = output("losses", N, TYPE_F32);
    FOR_SIDES(s)
        t.layers[s]->cross_entropy_backward(at(losses, s), at(logits, s), at(targets, s), 1, N, V,
                                            V, t.devices[s]);
    double *cuda = download(losses, FIRST);
    assert_true(isfinite(cuda[0]) && !isfinite(cuda[1]) && isfinite(cuda[2]));
    free(cuda);
    end();
}

static void cross_entropy(void **state) {
    start(state);
    cross_entropy_case(1, 1, 1, 3, NAN);
    cross_entropy_case(1, 7, 8, 3, NAN);
    cross_entropy_case(1023, 65, 128, 3, NAN);
    cross_entropy_case(257, 65, 65, 3, NAN); /* rows start anywhere */
    cross_entropy_case(113, 257, 320, 3, 3e38f);
    cross_entropy_case(17, 4097, 4104, 3, NAN); /* more threads than accesses of a batch */
    cross_entropy_case(6, 50257, 50304, 3, NAN);
    cross_entropy_case(6, 50257, 50304, 3, 3e38f);
    cross_entropy_case(6, 50304, 50304, 3, NAN);
    cross_entropy_case(6, 50257, 50257, 3, NAN);
    cross_entropy_case(17, 257, 320, 1000, NAN); /* exp(logit) would overflow */
    t.shift = 1;
    cross_entropy_case(17, 257, 320, 3, NAN);
    t.shift = 0;
    cross_entropy_of(NAN);
    cross_entropy_of(INFINITY);
    finish();
}

/* Embedding. */

typedef enum { TOKENS_RANDOM, TOKENS_ALL_EQUAL } Tokens;

static void embedding_case(size_t B, size_t T, size_t C, size_t V, Dropout dropout, Tokens kind) {
    begin("embedding", "B=%zu T=%zu C=%zu V=%zu p=%g %s", B, T, C, V, dropout.probability,
          kind == TOKENS_ALL_EQUAL ? "one token" : "random tokens");
    const size_t N = B * T;
    int32_t *values = malloc(N * sizeof(int32_t));
    for (size_t n = 0; n < N; n++)
        values[n] = (int32_t)(kind == TOKENS_ALL_EQUAL ? V / 2 : n == 0 ? V - 1 : draw(V));
    Tensor *tokens = integers("tokens", N, values);
    free(values);
    Tensor *wte = normal("wte", V * C, t.type, 0, 1), *wpe = normal("wpe", T * C, t.type, 0, 1);
    Tensor *out = output("out", N * C, t.type), *dout = normal("dout", N * C, t.type, .1f, 1);
    Tensor *dwte = normal("dwte", V * C, TYPE_F32, 0, 1);
    Tensor *dwpe = normal("dwpe", T * C, TYPE_F32, 0, 1);
    FOR_SIDES(s) {
        t.layers[s]->embedding_forward(at(out, s), at(tokens, s), at(wte, s), at(wpe, s), B, T, C,
                                       dropout, t.devices[s]);
        t.layers[s]->embedding_backward(at(dwte, s), at(dwpe, s), at(dout, s), at(tokens, s), B, T,
                                        C, V, dropout, t.devices[s]);
    }
    check_each(out, rounded(), 1e-6); /* zeros are dropped elements; a sum of two may cancel */
    check(dwte, ARITHMETIC);
    check(dwpe, ARITHMETIC);
    end();
}

static void embedding(void **state) {
    start(state);
    for (size_t i = 0; i < COUNT(rows); i++)
        for (size_t j = 0; j < COUNT(widths); j++)
            embedding_case(1, rows[i], widths[j], 65, dropout_tenth, TOKENS_RANDOM);
    embedding_case(5, 17, 48, 65, no_dropout, TOKENS_RANDOM);
    embedding_case(3, 257, 384, 65, dropout_tenth, TOKENS_RANDOM);
    embedding_case(4, 113, 768, 5003, no_dropout, TOKENS_RANDOM);
    embedding_case(MAX_N / 64, 64, 65, 257, dropout_tenth, TOKENS_ALL_EQUAL);
    embedding_case(MAX_N / 256, 256, 384, 65, no_dropout, TOKENS_ALL_EQUAL);
    embedding_case(MAX_N, 1, 48, 1, no_dropout, TOKENS_RANDOM);
    t.shift = 1;
    embedding_case(3, 17, 384, 65, dropout_tenth, TOKENS_RANDOM);
    finish();
}

/* AdamW and the sums. */

static void adamw_case(size_t chunks, AdamW adamw, float norm_value) {
    begin("adamw", "%zu chunks, step %d, norm %g, clip %g", chunks, (int)adamw.step, norm_value,
          adamw.clip);
    const size_t n = chunks * ADAMW_CHUNK;
    float *values = malloc(n * sizeof(float));
    Tensor *master = normal("master", n, TYPE_F32, 0, .1f), *params = output("params", n, t.type);
    Tensor *m = normal("m", n, TYPE_F32, 0, .01f), *grads = normal("grads", n, TYPE_F32, 0, .1f);
    random_normal(values, n, t.key++, .01f);
    for (size_t i = 0; i < n; i++) values[i] *= values[i];
    Tensor *v = given("v", n, TYPE_F32, values), *norm = given("norm", 1, TYPE_F32, &norm_value);
    free(values);
    int32_t *decay_values = calloc(chunks, sizeof(int32_t)); /* more bytes than used */
    for (size_t i = 0; i < chunks; i++) ((uint8_t *)decay_values)[i] = draw(2) == 1;
    Tensor *decay = integers("decay", chunks, decay_values);
    free(decay_values);
    FOR_SIDES(s) {
        bool separate = s != REFERENCE && t.type == TYPE_BF16;
        t.layers[s]->adamw_update(separate ? at(params, s) : at(master, s), at(master, s), at(m, s),
                                  at(v, s), at(grads, s), at(decay, s), at(norm, s), n, adamw,
                                  t.devices[s]);
    }
    check(master, ARITHMETIC);
    check(m, ARITHMETIC);
    check(v, ARITHMETIC);
    if (t.type == TYPE_BF16) {
        adopt(master);
        device_copy(t.devices[REFERENCE], at(params, REFERENCE), at(master, REFERENCE),
                    n * sizeof(double));
        check_each(params, 0x1p-8, 0); /* the master, rounded once */
    }
    end();
}

/* With a norm that is not finite nothing changes: the reference is what was there. */
static void adamw_keeps(float norm_value) {
    begin("adamw, bad step", "norm %g", norm_value);
    const size_t n = 2 * ADAMW_CHUNK;
    Tensor *master = normal("master", n, TYPE_F32, 0, 1), *m = normal("m", n, TYPE_F32, 0, 1);
    Tensor *params = normal("params", n, t.type, 0, 1), *v = normal("v", n, TYPE_F32, 2, .1f);
    Tensor *grads = normal("grads", n, TYPE_F32, NAN, 1);
    Tensor *norm = given("norm", 1, TYPE_F32, &norm_value);
    Tensor *decay = integers("decay", 1, (const int32_t[]){0x0101});
    const AdamW adamw = {
        .lr = .1f, .beta1 = .9f, .beta2 = .99f, .eps = 1e-8f, .clip = 1, .step = 3};
    for (Side s = FIRST; s <= AGAIN; s++)
        t.layers[s]->adamw_update(t.type == TYPE_BF16 ? at(params, s) : at(master, s),
                                  at(master, s), at(m, s), at(v, s), at(grads, s), at(decay, s),
                                  at(norm, s), n, adamw, t.devices[s]);
    check_each(params, 0, 0);
    check_each(master, 0, 0);
    check_each(m, 0, 0);
    check_each(v, 0, 0);
    end();
}

static void adamw(void **state) {
    start(state);
    /* lr is large so that the update, not the old weight, decides the comparison. */
    AdamW adamw = {.lr = .1f, .beta1 = .9f, .beta2 = .95f, .eps = 1e-8f, .weight_decay = .1f};
    static const uint64_t steps[] = {1, 2, 1000};
    for (size_t i = 0; i < COUNT(steps); i++) {
        adamw.step = steps[i];
        adamw.clip = 0;
        adamw_case(1, adamw, 12);
        adamw.clip = 1;
        adamw_case(37, adamw, 12); /* clips */
        adamw_case(5, adamw, .5f); /* does not */
    }
    adamw_keeps(NAN);
    adamw_keeps(INFINITY);
    finish();
}

static void sums_case(size_t n) {
    begin("sums", "n=%zu", n);
    Tensor *x = normal("x", n, TYPE_F32, 4, 1), *grads = normal("grads", n, TYPE_F32, 0, .01f);
    Tensor *sum = normal("sum", 1, TYPE_F32, 3, .1f), *norm = output("norm", 1, TYPE_F32);
    FOR_SIDES(s) {
        t.layers[s]->sum_forward(at(sum, s), at(x, s), 1 / (float)n, n, t.devices[s]);
        t.layers[s]->grad_norm(at(norm, s), at(grads, s), n, t.devices[s]);
    }
    check(sum, ARITHMETIC);
    check(norm, ARITHMETIC);
    end();
}

static void sums(void **state) {
    start(state);
    static const size_t sizes[] = {1, 7, 31, 1023, 4096, 65537, 3000001};
    for (size_t i = 0; i < COUNT(sizes); i++) sums_case(sizes[i]);

    begin("sums", "with a gradient that is not finite");
    Tensor *grads = given("grads", 3, TYPE_F32, (float[]){1, INFINITY, 2});
    Tensor *norm = output("norm", 1, TYPE_F32);
    FOR_SIDES(s) t.layers[s]->grad_norm(at(norm, s), at(grads, s), 3, t.devices[s]);
    double *cuda = download(norm, FIRST);
    assert_false(isfinite(cuda[0]));
    free(cuda);
    end();
    finish();
}

static int open_devices(void **state) {
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

static int close_devices(void **state) {
    (void)state;
    device_close(t.devices[REFERENCE]);
    device_close(t.devices[FIRST]);
    return 0;
}

int main(void) {
    static DataType fp32 = TYPE_F32, bf16 = TYPE_BF16;
#define IN_BOTH_TYPES(test)                            \
    {#test " on CUDA, fp32", test, NULL, NULL, &fp32}, \
        {#test " on CUDA, bf16", test, NULL, NULL, &bf16}
    const struct CMUnitTest tests[] = {
        IN_BOTH_TYPES(layernorm), IN_BOTH_TYPES(residual_layernorm), IN_BOTH_TYPES(linear),
        IN_BOTH_TYPES(gelu),      IN_BOTH_TYPES(dropout),            IN_BOTH_TYPES(cross_entropy),
        IN_BOTH_TYPES(embedding), IN_BOTH_TYPES(adamw),              IN_BOTH_TYPES(sums),
    };
    choose_tests();
    return cmocka_run_group_tests_name("layers on CUDA", tests, open_devices, close_devices);
}
