/* Generating text: its layers against plain sums in double, on the CPU and on CUDA, CUDA's draws
 * against the CPU's, cached decoding against whole forwards, and how text reaches a file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"
#include "gpt/decode.h"
#include "gpt/sample.h"
#include "gpt/text_stream.h"
#include "runtime/convert.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "test/compare.h"
#include "test/model.h"
#include "test/part.h"
#include "test/said.h"

static Device *cpu, *gpu; /* gpu is NULL where there is none */

#define NEEDS_GPU()                                          \
    if (!gpu) {                                              \
        printf("skipped: this machine has no usable GPU\n"); \
        skip();                                              \
    }

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

static void *put(Device *device, const void *values, size_t bytes) {
    void *memory = device_alloc(device, bytes);
    if (!memory) fail_msg("%s", error_message());
    device_upload(device, memory, values, bytes);
    return memory;
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
    NEEDS_GPU();
    static const DataType types[] = {TYPE_F32, TYPE_BF16};
    for (int i = 0; i < 2; i++) {
        check_products(gpu, types[i]);
        check_attention(gpu, types[i]);
        check_embedding(gpu, types[i]);
    }
}

/* --- Draws ---------------------------------------------------------------------------------- */

/* One draw for each of N rows of logits; draw number `first` of the first sequence, and so on. */
static void draw(Device *device, const float *logits, size_t N, size_t V, Sampling sampling,
                 uint64_t first, int32_t *tokens) {
    int32_t *positions = calloc(N, sizeof *positions);
    uint64_t *draws = malloc(N * sizeof *draws);
    for (size_t n = 0; n < N; n++) positions[n] = (int32_t)n, draws[n] = first;
    int32_t *dpositions = put(device, positions, N * sizeof *positions);
    int32_t *dtokens = put(device, positions, N * sizeof *positions);
    uint64_t *ddraws = put(device, draws, N * sizeof *draws);
    uint32_t *weights = device_alloc(device, N * V * sizeof *weights);
    float *dlogits = put(device, logits, N * V * sizeof *logits);
    layers_get(device->type, TYPE_F32)
        ->sample_forward(dtokens, dpositions, ddraws, weights, dlogits, N, V, sampling, device);
    device_download(device, tokens, dtokens, N * sizeof *tokens);
    device_download(device, positions, dpositions, N * sizeof *positions);
    device_download(device, draws, ddraws, N * sizeof *draws);
    for (size_t n = 0; n < N; n++) {
        assert_int_equal(positions[n], n + 1);
        assert_int_equal(draws[n], first + 1);
    }
    void *const memory[] = {dpositions, dtokens, ddraws, weights, dlogits};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(device, memory[i]);
    free(positions);
    free(draws);
}

/* Draws many times from one row and holds the counts against these probabilities. */
static void check_frequencies(Device *device, const float *logits, size_t V, Sampling sampling,
                              const double *expected) {
    enum { N = 10000, ROUNDS = 2 };
    float *rows = malloc(N * V * sizeof *rows);
    size_t *counts = calloc(V, sizeof *counts);
    int32_t tokens[N];
    for (size_t n = 0; n < N; n++) memcpy(rows + n * V, logits, V * sizeof *logits);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        draw(device, rows, N, V, sampling, round, tokens);
        for (size_t n = 0; n < N; n++) counts[tokens[n]]++;
    }
    for (size_t v = 0; v < V; v++) {
        /* Five deviations of a binomial; the seeds are fixed, so this holds always or never. */
        double mean = expected[v] * N * ROUNDS;
        double bound = 5 * sqrt(mean * (1 - expected[v]));
        if (!(fabs((double)counts[v] - mean) <= bound))
            fail_msg("token %zu: drawn %zu times, expected %.1f", v, counts[v], mean);
    }
    free(rows);
    free(counts);
}

static void check_draws(Device *device) {
    static const float logits[] = {1, 3, 2, 2, -5, 0, -INFINITY};
    enum { V = sizeof logits / sizeof logits[0] };
    double w[V], sum = 0, p[V];
    for (size_t v = 0; v < V; v++) sum += w[v] = exp((double)logits[v] / 0.7);
    for (size_t v = 0; v < V; v++) p[v] = w[v] / sum;
    check_frequencies(device, logits, V, (Sampling){0.7f, 1, 0, 3}, p);
    /* The two largest, and the one that is equal to the second; as a share: 0.64 + 2 · 0.15. */
    double kept = w[1] + w[2] + w[3];
    for (size_t v = 0; v < V; v++) p[v] = v >= 1 && v <= 3 ? w[v] / kept : 0;
    check_frequencies(device, logits, V, (Sampling){0.7f, 1, 2, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0.7f, 1, 3, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0.7f, 0.7f, 0, 3}, p);
    /* A share of what top_k has kept, not of all. */
    for (size_t v = 0; v < V; v++) p[v] = v == 1;
    check_frequencies(device, logits, V, (Sampling){0.7f, 0.6f, 3, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0.7f, 0, 0, 3}, p);
    check_frequencies(device, logits, V, (Sampling){0, 1, 0, 3}, p);
    check_frequencies(device, logits, V, (Sampling){1e-42f, 1, 0, 3}, p);

    float bad[][3] = {
        {0, NAN, 1}, {0, -NAN, 1}, {0, INFINITY, 1}, {-INFINITY, -INFINITY, -INFINITY}, {5, 5, 5}};
    int32_t tokens[5];
    draw(device, bad[0], 5, 3, (Sampling){0, 1, 0, 0}, 0, tokens);
    for (size_t n = 0; n < 4; n++) assert_int_equal(tokens[n], -1);
    assert_int_equal(tokens[4], 0);
    draw(device, bad[0], 5, 3, (Sampling){1, 0.5f, 2, 0}, 0, tokens);
    for (size_t n = 0; n < 4; n++) assert_int_equal(tokens[n], -1);
}

static void draws_on_the_cpu(void **state) {
    (void)state;
    check_draws(cpu);
}

static void draws_on_cuda(void **state) {
    (void)state;
    NEEDS_GPU();
    check_draws(gpu);
}

/* Lists that hold all, and lists that overflow; vocabularies below, at and above a block. */
static void cuda_draws_what_the_cpu_draws(void **state) {
    (void)state;
    NEEDS_GPU();
    static const size_t sizes[] = {2, 31, 1000, 1024, 1025, 5000, 50257};
    static const Sampling rules[] = {{0, 1, 0, 1},         {1, 1, 0, 2},        {0.8f, 1, 200, 3},
                                     {0.8f, 0.9f, 200, 4}, {0.8f, 0.9f, 0, 5},  {3, 0.99f, 0, 6},
                                     {1, 1, 1, 7},         {1, 1, 1024, 8},     {1, 1, 1025, 9},
                                     {2, 0.95f, 4500, 10}, {0.01f, 0.5f, 3, 11}};
    enum { N = 16 };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        size_t V = sizes[s];
        float *logits = malloc(N * V * sizeof *logits);
        random_normal(logits, N * V, V, 3);
        /* Half of the rows have many equal values. */
        for (size_t i = 0; i < N / 2 * V; i++) logits[i] = roundf(2 * logits[i]) / 2;
        for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
            int32_t expected[N], drawn[N];
            for (uint64_t round = 0; round < 4; round++) {
                draw(cpu, logits, N, V, rules[r], round, expected);
                draw(gpu, logits, N, V, rules[r], round, drawn);
                assert_memory_equal(drawn, expected, sizeof drawn);
            }
        }
        free(logits);
    }
}

/* --- Decoding ------------------------------------------------------------------------------- */

/* Sizes that share no factor, a head size that is no power of two; and ones for wide accesses. */
static const GptConfig odd = {.L = 2, .NH = 3, .C = 21, .T = 12, .V = 11, .layernorm_eps = 1e-5f};
static const GptConfig even = {.L = 3, .NH = 4, .C = 64, .T = 70, .V = 130, .layernorm_eps = 1e-5f};

static Gpt *make(Device *device, GptConfig config, size_t B, DataType type, GptUse use) {
    GptOptions options = {
        .B = B, .T = config.T, .type = type, .use = use, .recompute = RECOMPUTE_BLOCK};
    Gpt *model = create_model(&config, &options, device);
    randomize(model);
    return model;
}

static GptDecoder *decoder_of(Gpt *model, size_t B, Sampling sampling) {
    GptDecoder *decoder = gpt_decoder_create(model, B, &sampling);
    if (!decoder) fail_msg("%s", error_message());
    return decoder;
}

/* Draw number `number` after tokens[0..n), by a forward of them all. */
static int32_t next_token(Gpt *model, const int32_t *tokens, size_t n, Sampling sampling,
                          uint64_t number) {
    size_t V = gpt_config(model)->V;
    int32_t token;
    float *logits = malloc(V * sizeof *logits);
    gpt_forward(model, tokens, NULL, 1, n, GPT_EVALUATE);
    gpt_logits(model, n - 1, 1, logits);
    draw(cpu, logits, 1, V, sampling, number, &token);
    free(logits);
    return token;
}

/* From this many tokens to several windows, with the window's rule: when T are full, the last T/2
 * are kept. */
static void check_text(Gpt *model, size_t start, Sampling sampling) {
    size_t T = gpt_config(model)->T, total = start + 2 * T + 3, begin = start > T ? start - T : 0;
    int32_t *text = malloc((total + 1) * sizeof *text), token;
    for (size_t i = 0; i < start; i++) text[i] = (int32_t)(i * 5 % gpt_config(model)->V);
    GptDecoder *decoder = decoder_of(model, 1, sampling);
    gpt_decoder_start(decoder, text, start);
    for (size_t n = start; n < total; n++) {
        if (n - begin > T) begin = n - T / 2;
        text[n] = next_token(model, text + begin, n - begin, sampling, n);
        gpt_decoder_next(decoder, &token);
        if (token != text[n])
            fail_msg("token %zu of a text that starts with %zu is %d, not %d", n, start, token,
                     text[n]);
    }
    gpt_decoder_free(decoder);
    free(text);
}

static void check_decoder(Device *device, DataType type) {
    static const GptConfig *const configs[] = {&odd, &even};
    for (int i = 0; i < 2; i++) {
        size_t T = configs[i]->T;
        Gpt *model = make(device, *configs[i], 1, type, GPT_INFERENCE);
        Sampling greedy = {.temperature = 0}, likely = {1, 0.9f, 5, 17};
        check_text(model, 1, greedy);
        check_text(model, 7, likely);
        check_text(model, T, greedy);
        check_text(model, T + 5, likely);
        gpt_free(model);
    }
    Gpt *model = make(device, odd, 2, type, GPT_TRAINING);
    check_text(model, 3, (Sampling){.temperature = 0});
    gpt_free(model);
}

static void text_is_that_of_whole_forwards(void **state) {
    (void)state;
    check_decoder(cpu, TYPE_F32);
    check_decoder(cpu, TYPE_F64);
}

static void text_is_that_of_whole_forwards_on_cuda(void **state) {
    (void)state;
    NEEDS_GPU();
    check_decoder(gpu, TYPE_F32);
}

/* Equal seeds give equal texts, however often the window slides and however many texts there are;
 * texts drawn together differ. */
static void check_seeds(Device *device, DataType type) {
    enum { B = 9, N = 60 };
    Gpt *model = make(device, odd, 1, type, GPT_INFERENCE);
    static const int32_t prompt[3] = {3, 1, 4};
    int32_t text[3][N][B], single[N];
    Sampling rule = {1.5f, 0.95f, 8, 42};
    for (int run = 0; run < 3; run++) {
        rule.seed = run == 2 ? 43 : 42;
        GptDecoder *decoder = decoder_of(model, B, rule);
        if (run == 1) { /* what was drawn before is no matter */
            gpt_decoder_start(decoder, prompt, 1);
            for (int n = 0; n < 5; n++) gpt_decoder_next(decoder, text[run][0]);
        }
        gpt_decoder_start(decoder, prompt, 3);
        for (int n = 0; n < N; n++) {
            gpt_decoder_next(decoder, text[run][n]);
            for (int b = 0; b < B; b++) assert_in_range(text[run][n][b], 0, odd.V - 1);
        }
        gpt_decoder_free(decoder);
    }
    assert_memory_equal(text[0], text[1], sizeof text[0]);
    assert_memory_not_equal(text[0], text[2], sizeof text[0]);
    rule.seed = 42;
    GptDecoder *decoder = decoder_of(model, 1, rule);
    gpt_decoder_start(decoder, prompt, 3);
    size_t other = 0;
    for (int n = 0; n < N; n++) {
        gpt_decoder_next(decoder, &single[n]);
        assert_int_equal(single[n], text[0][n][0]);
        other += text[0][n][1] != single[n];
    }
    assert_true(other > 0);
    gpt_decoder_free(decoder);
    gpt_free(model);
}

static void seeds_decide_the_texts(void **state) {
    (void)state;
    check_seeds(cpu, TYPE_F32);
}

static void seeds_decide_the_texts_on_cuda(void **state) {
    (void)state;
    NEEDS_GPU();
    check_seeds(gpu, TYPE_F32);
    check_seeds(gpu, TYPE_BF16);
}

static void too_many_texts_are_refused(void **state) {
    (void)state;
    Gpt *model = make(cpu, odd, 1, TYPE_F32, GPT_INFERENCE);
    assert_null(gpt_decoder_create(model, GPT_DECODER_SEQUENCES + 1, &(Sampling){0}));
    assert_said("1 to 1024");
    gpt_free(model);
}

/* --- Text ----------------------------------------------------------------------------------- */

static void characters_are_written_whole(void **state) {
    (void)state;
    static char *out; /* static: the compiler takes the stream for what keeps their addresses */
    static size_t bytes;
    FILE *file = open_memstream(&out, &bytes);
    TextStream stream = {.file = file, .until = "STOP"};
    static const struct {
        const char *piece, *written;
    } steps[] = {{"a", "a"},
                 {"\xc3", "a"},
                 {"\xa9", "a\xc3\xa9"},
                 {"\xf0\x9f", "a\xc3\xa9"},
                 {"\x98\x80", "a\xc3\xa9\xf0\x9f\x98\x80"},
                 {"\xff\x80", "a\xc3\xa9\xf0\x9f\x98\x80"}, /* no character, but may begin one */
                 {"xS", "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80x"},
                 {"TO", "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80x"},
                 {"ST", "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80xSTO"}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        assert_true(text_stream_add(&stream, steps[i].piece, strlen(steps[i].piece)));
        fflush(file);
        assert_string_equal(out, steps[i].written);
    }
    assert_false(text_stream_add(&stream, "OP and more", 11));
    text_stream_end(&stream);
    fflush(file);
    assert_string_equal(out, "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80xSTO");
    fclose(file);
    free(out);

    file = open_memstream(&out, &bytes);
    stream = (TextStream){.file = file, .until = ""};
    assert_true(text_stream_add(&stream, "b\xe2\x82", 3));
    text_stream_end(&stream); /* what never became a character is written in the end */
    fclose(file);
    assert_string_equal(out, "b\xe2\x82");
    free(out);
}

/* What gpt_write_text writes, to be freed. */
static char *written(Gpt *model, const Tokenizer *tokenizer, const char *prompt, size_t samples,
                     const char *until) {
    char *out;
    size_t bytes;
    FILE *file = open_memstream(&out, &bytes);
    TextOptions options = {.sampling = {1, 1, 0, 5},
                           .tokens = 20,
                           .samples = samples,
                           .echo = true,
                           .until = until,
                           .file = file};
    assert_true(gpt_write_text(model, tokenizer, prompt, &options));
    fclose(file);
    return out;
}

static void texts_are_written(void **state) {
    (void)state;
    Tokenizer *tokenizer = tokenizer_characters("abcdefghij\n", 11);
    assert_non_null(tokenizer);
    Gpt *model = make(cpu, odd, 1, TYPE_F32, GPT_INFERENCE);
    char *text = written(model, tokenizer, "abc", 1, "");
    assert_int_equal(strlen(text), 3 + 20 + 1);
    assert_memory_equal(text, "abc", 3);

    char until[3] = {text[8], text[9]};
    char *cut = written(model, tokenizer, "abc", 1, until);
    size_t expected = (size_t)(strstr(text + 3, until) - text);
    assert_int_equal(strlen(cut), expected + 1);
    assert_memory_equal(cut, text, expected);
    free(cut);

    /* The first of several is the one that comes alone. */
    char *both = written(model, tokenizer, "abc", 2, NULL);
    const char *first = "--- sample 1 of 2 ---\n", *second = "--- sample 2 of 2 ---\nabc";
    assert_memory_equal(both, first, strlen(first));
    assert_memory_equal(both + strlen(first), text, strlen(text));
    assert_memory_equal(both + strlen(first) + strlen(text), second, strlen(second));
    assert_int_equal(strlen(both), strlen(first) + strlen(second) + strlen(text) + 21);
    free(both);
    free(text);

    TextOptions options = {.sampling = {1, 1, 0, 5}, .tokens = 3, .samples = 1, .echo = true};
    options.file = open_memstream(&text, &expected);
    assert_false(gpt_write_text(model, tokenizer, "xyz", &options));
    fclose(options.file);
    assert_string_equal(text, ""); /* the prompt is refused before anything is written */
    free(text);
    assert_said("vocabulary");
    gpt_free(model);
    tokenizer_free(tokenizer);
}

/* --- The device's part ---------------------------------------------------------------------- */

typedef struct {
    Device *device;
    const Layers *layers;
    int32_t *tokens, *positions;
    uint64_t *draws;
    uint32_t *weights;
    float *logits;
    int runs;
} Repeated;

static void repeated(void *argument) {
    Repeated *r = argument;
    r->layers->sample_forward(r->tokens, r->positions, r->draws, r->weights, r->logits, 1, 2,
                              (Sampling){0}, r->device);
    r->runs++;
}

/* Results come in the order of the work, and replayed work is done each time. */
static void check_repeat(Device *device, int given) {
    static const float logits[2] = {1, 2};
    uint64_t zero = 0;
    Repeated r = {device,
                  layers_get(device->type, TYPE_F32),
                  put(device, &zero, 4),
                  put(device, &zero, 4),
                  put(device, &zero, 8),
                  put(device, logits, 8),
                  put(device, logits, 8),
                  0};
    DeviceGraph *graph = NULL;
    for (int round = 0, done = 0; round < 5; round++) {
        for (int i = 0; i < DEVICE_FETCHES; i++) {
            device_repeat(device, &graph, repeated, &r);
            device_fetch(device, r.positions, 4);
        }
        for (int i = 0; i < DEVICE_FETCHES; i++) {
            int32_t position;
            device_receive(device, &position, sizeof position);
            assert_int_equal(position, ++done);
        }
    }
    assert_int_equal(r.runs, given);
    device_graph_free(device, graph);
    void *const memory[] = {r.tokens, r.positions, r.draws, r.weights, r.logits};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(device, memory[i]);
}

static void work_is_repeated(void **state) {
    (void)state;
    check_repeat(cpu, 5 * DEVICE_FETCHES);
}

static void cuda_replays_work(void **state) {
    (void)state;
    NEEDS_GPU();
    check_repeat(gpu, 2);
}

int main(void) {
    cpu = device_open(DEVICE_CPU, 0);
    if (device_count_gpus() > 0) gpu = device_open(DEVICE_CUDA, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_on_the_cpu),
        cmocka_unit_test(layers_on_cuda),
        cmocka_unit_test(draws_on_the_cpu),
        cmocka_unit_test(draws_on_cuda),
        cmocka_unit_test(cuda_draws_what_the_cpu_draws),
        cmocka_unit_test(text_is_that_of_whole_forwards),
        cmocka_unit_test(text_is_that_of_whole_forwards_on_cuda),
        cmocka_unit_test(seeds_decide_the_texts),
        cmocka_unit_test(seeds_decide_the_texts_on_cuda),
        cmocka_unit_test(too_many_texts_are_refused),
        cmocka_unit_test(characters_are_written_whole),
        cmocka_unit_test(texts_are_written),
        cmocka_unit_test(work_is_repeated),
        cmocka_unit_test(cuda_replays_work),
    };
    choose_tests();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    device_close(gpu);
    device_close(cpu);
    return failed;
}
