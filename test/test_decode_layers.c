/* The layers of decoding, against plain sums in double, on the CPU and on CUDA: products of few
 * rows, attention over the cache, the embedding of one token each. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers/layers.h"
#include "runtime/convert.h"
#include "runtime/random.h"
#include "test/compare.h"
#include "test/devices.h"
#include "test/part.h"

/* --- Tensors on a device -------------------------------------------------------------------- */

typedef struct {
    Device *device;
    DataType type;
    const Layers *layers;
    uint64_t key; /* of the next random tensor */
} Place;

static Place place(Device *device, DataType type) {
    Place p = {device, type, layers_get(device->type, type), 1};
    assert_non_null(p.layers);
    return p;
}

/* What a product in this type may be off by, relative to its norm: a few units in the last place of
 * what is stored; sums are carried in float at least, or in double. */
static double tolerance(DataType type) {
    return type == TYPE_BF16 ? 4e-3 : type == TYPE_F32 ? 2e-6 : 1e-14;
}

/* Normals, rounded to the type; values receives them. */
static void *normal(Place *p, float *values, size_t n, float deviation) {
    void *stored = malloc(n * type_bytes(p->type));
    random_normal(values, n, p->key++, deviation);
    type_from_float(p->type, stored, values, n);
    type_to_float(p->type, values, stored, n);
    void *memory = put(p->device, stored, n * type_bytes(p->type));
    free(stored);
    return memory;
}

static void get(const Place *p, DataType type, const void *memory, double *values, size_t n) {
    void *stored = malloc(n * type_bytes(type));
    device_download(p->device, stored, memory, n * type_bytes(type));
    if (type == TYPE_F64) {
        memcpy(values, stored, n * sizeof *values);
    } else {
        float *floats = malloc(n * sizeof *floats);
        type_to_float(type, floats, stored, n);
        for (size_t i = 0; i < n; i++) values[i] = floats[i];
        free(floats);
    }
    free(stored);
}

/* The largest error of one quantity over several cases. */
typedef struct {
    const char *name;
    double error;
} Worst;

static void judge(Worst *worst, const double *x, const double *reference, size_t n) {
    double error = relative_error(x, reference, n);
    if (!(error <= worst->error)) worst->error = error;
}

static void conclude(const Worst *worst, const Place *p) {
    char name[80];
    snprintf(name, sizeof name, "%s, %s %s", worst->name,
             p->device->type == DEVICE_CPU ? "CPU" : "CUDA", type_name(p->type));
    assert_true(compare(name, worst->error, tolerance(p->type)));
}

/* --- Products of few rows ------------------------------------------------------------------- */

static void reference_norm(double *out, const float *x, const float *weight, const float *bias,
                           size_t C, float eps) {
    double mean = 0, variance = 0;
    for (size_t c = 0; c < C; c++) mean += x[c] / (double)C;
    for (size_t c = 0; c < C; c++) variance += (x[c] - mean) * (x[c] - mean) / (double)C;
    for (size_t c = 0; c < C; c++)
        out[c] = (x[c] - mean) / sqrt(variance + eps) * weight[c] + bias[c];
}

static double reference_gelu(double x) {
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static void check_gemv(Place p, Worst *worst, size_t N, size_t IC, size_t OC, bool normed,
                       GemvOutput output) {
    float *x = malloc(N * IC * sizeof *x), *w = malloc(IC * OC * sizeof *w);
    float *bias = malloc(OC * sizeof *bias), *before = malloc(N * OC * sizeof *before);
    float *norm_w = malloc(IC * sizeof *norm_w), *norm_b = malloc(IC * sizeof *norm_b);
    double *in = malloc(IC * sizeof *in), *out = malloc(N * OC * sizeof *out);
    double *expected = malloc(N * OC * sizeof *expected);
    p.key = random_mix(N * IC + OC, output);
    void *dx = normal(&p, x, N * IC, 1), *dw = normal(&p, w, IC * OC, 0.2f);
    void *dbias = normal(&p, bias, OC, 1), *dout = normal(&p, before, N * OC, 1);
    GemvNorm norm = {normal(&p, norm_w, IC, 1), normal(&p, norm_b, IC, 1), 1e-5f};
    for (size_t n = 0; n < N; n++) {
        for (size_t i = 0; i < IC; i++) in[i] = x[n * IC + i];
        if (normed) reference_norm(in, x + n * IC, norm_w, norm_b, IC, norm.eps);
        for (size_t o = 0; o < OC; o++) {
            double sum = bias[o];
            for (size_t i = 0; i < IC; i++) sum += in[i] * w[i * OC + o];
            if (output == GEMV_GELU) sum = reference_gelu(sum);
            if (output == GEMV_ADD) sum += before[n * OC + o];
            expected[n * OC + o] = sum;
        }
    }
    assert_true(
        device_reserve_scratch(p.device, layers_gemv_scratch_bytes(p.device, p.type, N, IC, OC)));
    p.layers->gemv_forward(dout, dx, normed ? &norm : NULL, dw, dbias, N, IC, OC, output, p.device);
    get(&p, p.type, dout, out, N * OC);
    judge(worst, out, expected, N * OC);
    void *const memory[] = {dx, dw, dbias, dout, (void *)norm.weight, (void *)norm.bias};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(p.device, memory[i]);
    free(x), free(w), free(bias), free(before), free(norm_w), free(norm_b);
    free(in), free(out), free(expected);
}

static void check_head(Place p, Worst *worst, size_t N, size_t C, size_t V) {
    float *x = malloc(N * C * sizeof *x), *w = malloc(V * C * sizeof *w);
    float *norm_w = malloc(C * sizeof *norm_w), *norm_b = malloc(C * sizeof *norm_b);
    double *in = malloc(C * sizeof *in), *out = malloc(N * V * sizeof *out);
    double *expected = calloc(N * V, sizeof *expected);
    DataType acc = type_accumulator(p.type);
    p.key = random_mix(N * C, V);
    void *dx = normal(&p, x, N * C, 1), *dw = normal(&p, w, V * C, 0.2f);
    void *logits = device_alloc(p.device, N * V * type_bytes(acc));
    GemvNorm norm = {normal(&p, norm_w, C, 1), normal(&p, norm_b, C, 1), 1e-5f};
    for (size_t n = 0; n < N; n++) {
        reference_norm(in, x + n * C, norm_w, norm_b, C, norm.eps);
        for (size_t v = 0; v < V; v++)
            for (size_t c = 0; c < C; c++) expected[n * V + v] += in[c] * w[v * C + c];
    }
    assert_true(
        device_reserve_scratch(p.device, layers_gemv_scratch_bytes(p.device, p.type, N, C, 0)));
    p.layers->gemv_head(logits, dx, &norm, dw, N, C, V, p.device);
    get(&p, acc, logits, out, N * V);
    judge(worst, out, expected, N * V);
    void *const memory[] = {dx, dw, logits, (void *)norm.weight, (void *)norm.bias};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(p.device, memory[i]);
    free(x), free(w), free(norm_w), free(norm_b), free(in), free(out), free(expected);
}

static void check_products(Device *device, DataType type) {
    /* One row, as many as one reading serves, and more; matrices of less than a block and of
     * several; odd ones, which no wide access can read; for one thread and for all. */
    static const size_t rows[] = {1, 2, 3, 8, 9, 17};
    static const size_t shapes[][2] = {{8, 8}, {48, 144}, {21, 63}, {512, 64}, {528, 144}, {7, 1}};
    Place p = place(device, type);
    Worst gemv = {"gemv", 0}, head = {"gemv head", 0};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
            size_t IC = shapes[s][0], OC = shapes[s][1];
            check_gemv(p, &gemv, rows[r], IC, OC, r % 2, (GemvOutput)((r + s) % 3));
            check_head(p, &head, rows[r], IC, OC);
        }
    conclude(&gemv, &p);
    conclude(&head, &p);
}

/* --- Attention over the cache --------------------------------------------------------------- */

static void check_cached_attention(Place p, Worst *worst, size_t T, size_t NH, size_t HS) {
    static const size_t lasts[] = {0, 255, 256, 599};
    enum { B = 4 };
    size_t C = NH * HS, rows = B * T;
    float *cache = malloc(rows * 2 * C * sizeof *cache), *qkv = malloc(B * 3 * C * sizeof *qkv);
    double *out = malloc(B * C * sizeof *out), *expected = calloc(B * C, sizeof *expected);
    double *stored = malloc(rows * 2 * C * sizeof *stored);
    double *scores = malloc(T * sizeof *scores);
    p.key = random_mix(T * NH, HS);
    void *dcache = normal(&p, cache, rows * 2 * C, 1), *dqkv = normal(&p, qkv, B * 3 * C, 2);
    void *dout = device_alloc(p.device, B * C * type_bytes(p.type));
    int32_t positions[B];
    for (size_t b = 0; b < B; b++) positions[b] = (int32_t)(lasts[b] < T ? lasts[b] : T - 1);
    int32_t *dpositions = put(p.device, positions, sizeof positions);
    size_t bytes = p.layers->cached_attention_workspace(B, T, NH, HS);
    void *workspace = device_alloc(p.device, bytes);
    device_zero(p.device, workspace, bytes);
    for (size_t b = 0; b < B; b++) {
        size_t last = (size_t)positions[b];
        float *sequence = cache + b * T * 2 * C;
        memcpy(sequence + last * 2 * C, qkv + b * 3 * C + C, 2 * C * sizeof *cache);
        for (size_t h = 0; h < NH; h++) {
            double sum = 0;
            for (size_t t = 0; t <= last; t++) {
                double dot = 0;
                for (size_t i = 0; i < HS; i++)
                    dot += (double)qkv[b * 3 * C + h * HS + i] * sequence[t * 2 * C + h * HS + i];
                sum += scores[t] = exp(dot / sqrt((double)HS));
            }
            for (size_t t = 0; t <= last; t++)
                for (size_t i = 0; i < HS; i++)
                    expected[b * C + h * HS + i] +=
                        scores[t] / sum * sequence[t * 2 * C + C + h * HS + i];
        }
    }
    /* Twice: the workspace must be left as it was found. */
    for (int again = 0; again < 2; again++) {
        p.layers->cached_attention_forward(dout, dcache, dqkv, dpositions, workspace, B, T, NH, HS,
                                           p.device);
        get(&p, p.type, dout, out, B * C);
        judge(worst, out, expected, B * C);
    }
    get(&p, p.type, dcache, stored, rows * 2 * C);
    for (size_t i = 0; i < rows * 2 * C; i++) assert_true(stored[i] == cache[i]);
    void *const memory[] = {dcache, dqkv, dout, dpositions, workspace};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(p.device, memory[i]);
    free(cache), free(qkv), free(out), free(expected), free(stored), free(scores);
}

/* Rows 0 … n - 1 of some sequences, and nothing else. */
static void check_store(Place p) {
    enum { B = 4, T = 9, C = 12, N = 7 };
    float cache[B][T][2][C], qkv[N][3][C];
    double stored[B][T][2][C];
    void *dcache = normal(&p, &cache[0][0][0][0], sizeof cache / sizeof(float), 1);
    void *dqkv = normal(&p, &qkv[0][0][0], sizeof qkv / sizeof(float), 1);
    p.layers->cache_store(dcache, dqkv, 1, 2, N, T, C, p.device);
    for (size_t b = 1; b < 3; b++)
        for (size_t t = 0; t < N; t++) memcpy(cache[b][t], qkv[t][1], sizeof cache[b][t]);
    get(&p, p.type, dcache, &stored[0][0][0][0], sizeof cache / sizeof(float));
    for (size_t i = 0; i < sizeof cache / sizeof(float); i++)
        assert_true((&stored[0][0][0][0])[i] == (&cache[0][0][0][0])[i]);
    device_free(p.device, dcache);
    device_free(p.device, dqkv);
}

static void check_attention(Device *device, DataType type) {
    static const size_t sizes[] = {1, 5, 16, 64, 80, 256};
    Place p = place(device, type);
    Worst worst = {"cached attention", 0};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_cached_attention(p, &worst, 600, 2, sizes[i]);
        check_cached_attention(p, &worst, 7, 3, sizes[i]);
    }
    conclude(&worst, &p);
    check_store(p);
}

/* --- The embedding of one token each -------------------------------------------------------- */

static void check_embedding(Device *device, DataType type) {
    enum { N = 3, C = 21, V = 7, T = 5 };
    Place p = place(device, type);
    static const int32_t tokens[N] = {6, 0, -1}, positions[N] = {4, 0, 2};
    float wte[V * C], wpe[T * C];
    double out[N * C], expected[N * C];
    void *dwte = normal(&p, wte, V * C, 1), *dwpe = normal(&p, wpe, T * C, 1);
    void *dout = device_alloc(device, N * C * type_bytes(type));
    void *dtokens = put(device, tokens, sizeof tokens);
    void *dpositions = put(device, positions, sizeof positions);
    for (size_t n = 0; n < N; n++)
        for (size_t c = 0; c < C; c++)
            expected[n * C + c] = (double)wte[(tokens[n] < 0 ? 0 : tokens[n]) * C + (int)c] +
                                  wpe[positions[n] * C + (int)c];
    p.layers->embedding_step(dout, dtokens, dpositions, dwte, dwpe, N, C, device);
    get(&p, type, dout, out, N * C);
    Worst worst = {"embedding step", 0};
    judge(&worst, out, expected, N * C);
    conclude(&worst, &p);
    void *const memory[] = {dwte, dwpe, dout, dtokens, dpositions};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(device, memory[i]);
}

static void layers_on_the_cpu(void **state) {
    (void)state;
    static const DataType types[] = {TYPE_F32, TYPE_F64};
    for (int i = 0; i < 2; i++) {
        check_products(cpu, types[i]);
        check_attention(cpu, types[i]);
        check_embedding(cpu, types[i]);
    }
}

static void layers_on_cuda(void **state) {
    (void)state;
    if (no_gpu()) skip();
    static const DataType types[] = {TYPE_F32, TYPE_BF16};
    for (int i = 0; i < 2; i++) {
        check_products(gpu, types[i]);
        check_attention(gpu, types[i]);
        check_embedding(gpu, types[i]);
    }
}

int main(void) {
    open_devices();
    struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_on_the_cpu),
        cmocka_unit_test(layers_on_cuda),
    };
    choose_tests(tests);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();
    return failed;
}
