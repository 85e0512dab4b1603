#include "test/attention_case.h"

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
#include "runtime/random.h"
#include "test/compare.h"

static const char *const output_names[OUTPUTS] = {"o", "lse", "dq", "dk", "dv"};

const Case cases[] = {
    {1, 1, 1, 1, 1, 64, ATTENTION_FULL, 0, PACKED},
    {2, 3, 3, 1, 1, 5, ATTENTION_CAUSAL, 0, PACKED},
    {2, 3, 3, 17, 17, 16, ATTENTION_CAUSAL, 0, PACKED},
    {3, 2, 2, 64, 64, 64, ATTENTION_CAUSAL, 0, PACKED},
    {1, 2, 2, 65, 65, 1, ATTENTION_CAUSAL, 0, PACKED},
    {2, 2, 2, 113, 113, 40, ATTENTION_CAUSAL, 0, PACKED},
    {1, 2, 2, 113, 113, 48, ATTENTION_FULL, 0, SEPARATE},
    {1, 2, 2, 130, 130, 80, ATTENTION_CAUSAL, 0, HEADS_FIRST},
    {1, 1, 1, 130, 130, 96, ATTENTION_CAUSAL, 0, PACKED},
    {1, 2, 2, 257, 257, 128, ATTENTION_CAUSAL, 0, PACKED},
    {1, 1, 1, 130, 130, 160, ATTENTION_FULL, 0, SEPARATE},
    {1, 2, 2, 113, 113, 256, ATTENTION_CAUSAL, 0, PACKED},
    {1, 2, 2, 66, 66, 255, ATTENTION_CAUSAL, 0, GAPS},
    {1, 2, 2, 257, 257, 64, ATTENTION_FULL, 0, PACKED},
    {1, 1, 1, 1023, 1023, 64, ATTENTION_CAUSAL, 0, PACKED},
    {2, 2, 2, 37, 130, 64, ATTENTION_CAUSAL, 0, SEPARATE},
    {2, 2, 2, 130, 37, 64, ATTENTION_CAUSAL, 0, SEPARATE}, /* 93 queries see no key */
    {1, 2, 2, 300, 5, 32, ATTENTION_CAUSAL, 0, GAPS},
    {1, 2, 2, 1, 200, 64, ATTENTION_CAUSAL, 0, HEADS_FIRST},
    {1, 2, 2, 200, 1, 64, ATTENTION_FULL, 0, HEADS_FIRST},
    {1, 2, 2, 37, 130, 64, ATTENTION_FULL, 0, GAPS},
    {2, 4, 2, 70, 70, 64, ATTENTION_CAUSAL, 0, SEPARATE},
    {1, 6, 1, 70, 133, 40, ATTENTION_CAUSAL, 0, GAPS},
    {2, 3, 3, 100, 100, 64, ATTENTION_CAUSAL, 0.1f, PACKED},
    {1, 2, 2, 150, 150, 32, ATTENTION_FULL, 0.5f, HEADS_FIRST},
    {1, 4, 2, 37, 201, 128, ATTENTION_CAUSAL, 0.2f, GAPS},
    {1, 2, 1, 131, 70, 40, ATTENTION_CAUSAL, 0.2f, SEPARATE},
    {2, 4, 2, 70, 133, 64, ATTENTION_CAUSAL, 0, EXPANDED},
    {2, 2, 2, 150, 150, 128, ATTENTION_FULL, 0.1f, EXPANDED},
};
const size_t case_count = sizeof cases / sizeof cases[0];

double *doubles(size_t n) {
    double *values = calloc(n, sizeof *values);
    assert_non_null(values);
    return values;
}

Run new_run(const Case *c) {
    Run r = {.layout = c->layout,
             .problem = {.device = DEVICE_CPU,
                         .type = TYPE_F64,
                         .B = c->B,
                         .NH = c->NH,
                         .NKV = c->NKV,
                         .TQ = c->TQ,
                         .TK = c->TK,
                         .HS = c->HS,
                         .mask = c->mask,
                         .dropout = {c->dropout, 0x123456789abcdefu},
                         .family = ATTENTION_NAIVE}};
    const size_t queries = c->B * c->TQ * c->NH * c->HS, keys = c->B * c->TK * c->NKV * c->HS;
    const size_t in[INPUTS] = {queries, keys, keys, queries};
    const size_t out[OUTPUTS] = {queries, c->B * c->NH * c->TQ, queries, keys, keys};
    for (int i = 0; i < INPUTS; i++) {
        r.in[i] = doubles(r.in_size[i] = in[i]);
        for (size_t j = 0; j < in[i]; j++) {
            const bool expanded = c->layout == EXPANDED && (i == K || i == V);
            const size_t t = j / c->HS / c->NKV % c->TK;
            const size_t same = expanded ? t * c->HS + j % c->HS : j;
            r.in[i][j] = (philox(7, (uint32_t)same, (uint32_t)i, 0, 2).word[0] % 256 - 128.0) / 64;
        }
    }
    for (int i = 0; i < OUTPUTS; i++) r.out[i] = doubles(r.out_size[i] = out[i]);
    return r;
}

void free_run(Run *r) {
    for (int i = 0; i < INPUTS; i++) free(r->in[i]);
    for (int i = 0; i < OUTPUTS; i++) free(r->out[i]);
}

static size_t tensor_heads(const Attention *p, int which) {
    return which == Q || which == DOUT ? p->NH : p->NKV;
}
static size_t tensor_tokens(const Attention *p, int which) {
    return which == Q || which == DOUT ? p->TQ : p->TK;
}

/* Where tensor `which` lies in a buffer that holds all four in this layout, as the strides of its
 * view and the element that it begins at; *end is one past the last. data is left NULL. */
static AttentionView place(const Attention *p, Layout layout, int which, size_t *first,
                           size_t *end) {
    const size_t HS = p->HS;
    AttentionView view = {0};
    *first = *end = 0;
    for (int i = 0; i <= which; i++) {
        const size_t T = tensor_tokens(p, i), heads = tensor_heads(p, i);
        *first = *end;
        switch (layout) {
        case PACKED:
            if (i != DOUT) {
                view = attention_packed_view(NULL, p->type, 0, T, heads, HS);
                *first = (size_t)i * heads * HS;
                *end = i == V ? p->B * view.batch : 0;
                break;
            }
            /* fall through */
        case SEPARATE:
        case EXPANDED: view = attention_view(NULL, T, heads, HS); break;
        case HEADS_FIRST:
            view = (AttentionView){.batch = heads * T * HS, .token = HS, .head = T * HS};
            break;
        default:
            view.head = HS + 3;
            view.token = heads * view.head + 5;
            view.batch = T * view.token + 7;
            *first += 1;
        }
        if (layout != PACKED || i == DOUT) *end = *first + p->B * view.batch;
    }
    return view;
}

static void store(DataType type, void *buffer, size_t i, double value) {
    float single = (float)value;
    if (type == TYPE_F64)
        ((double *)buffer)[i] = value;
    else
        type_from_float(type, (char *)buffer + i * type_bytes(type), &single, 1);
}

static double load(DataType type, const void *buffer, size_t i) {
    float single;
    if (type == TYPE_F64) return ((const double *)buffer)[i];
    type_to_float(type, &single, (const char *)buffer + i * type_bytes(type), 1);
    return single;
}

/* Copies tensor `which` between its contiguous doubles and its place in the buffer. Reading leaves
 * NaN in the place, so that in the end all of an output buffer must be NaN. */
typedef enum { INTO_BUFFER, OUT_OF_BUFFER } Direction;
static void transfer(const Run *r, int which, void *buffer, double *values, Direction direction) {
    const Attention *p = &r->problem;
    const size_t T = tensor_tokens(p, which), heads = tensor_heads(p, which);
    size_t first, end, n = 0;
    const AttentionView view = place(p, r->layout, which, &first, &end);
    for (size_t b = 0; b < p->B; b++)
        for (size_t t = 0; t < T; t++)
            for (size_t h = 0; h < heads; h++)
                for (size_t c = 0; c < p->HS; c++, n++) {
                    size_t i = first + b * view.batch + t * view.token + h * view.head + c;
                    if (direction == INTO_BUFFER) {
                        store(p->type, buffer, i, values[n]);
                    } else {
                        values[n] = load(p->type, buffer, i);
                        memset((char *)buffer + i * type_bytes(p->type), 0xff, type_bytes(p->type));
                    }
                }
}

bool all_bytes(const void *memory, int value, size_t n) {
    const unsigned char *bytes = memory;
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != value) return false;
    return true;
}

/* Device memory of these bytes, all 0xff (a NaN in every type) unless given. */
static void *device_filled(Device *device, const void *bytes, size_t n) {
    void *host = malloc(n);
    assert_non_null(host);
    memset(host, 0xff, n);
    void *memory = put(device, bytes ? bytes : host, n);
    free(host);
    return memory;
}

static void *take_back(Device *device, void *memory, size_t n) {
    void *host = malloc(n);
    assert_non_null(host);
    device_download(device, host, memory, n);
    device_free(device, memory);
    return host;
}

enum { GUARD = 256 }; /* bytes behind the workspace and around lse */

void run(Run *r, Passes passes) {
    const Attention *p = &r->problem;
    Device *device = p->device == DEVICE_CPU ? cpu : gpu;
    const size_t element = type_bytes(p->type), lse_element = type_bytes(type_accumulator(p->type));
    const size_t lse_bytes = r->out_size[LSE] * lse_element;
    size_t first[INPUTS], elements;
    AttentionView views[INPUTS];
    for (int i = 0; i < INPUTS; i++) views[i] = place(p, r->layout, i, &first[i], &elements);

    const size_t bytes = (elements + 16) * element;
    void *staging = calloc(1, bytes);
    assert_non_null(staging);
    for (int i = 0; i < INPUTS; i++) transfer(r, i, staging, r->in[i], INTO_BUFFER);
    const bool reference = p->family == ATTENTION_NAIVE && p->type == TYPE_F64;
    const bool expanded = r->layout == EXPANDED && !reference;
    for (int i = K; expanded && i <= V; i++) { /* all but the first sequence's first head */
        const size_t HS = p->HS, all = p->B * views[i].batch;
        char *place = (char *)staging + first[i] * element;
        for (size_t row = 0; row < all / HS; row++)
            if (row % p->NKV > 0 || row >= p->TK * p->NKV)
                memset(place + row * HS * element, 0xff, HS * element);
    }
    char *in = device_filled(device, staging, bytes), *out = device_filled(device, NULL, bytes);
    char *lse = device_filled(device, NULL, lse_bytes + 2 * GUARD);

#define VIEW(memory, i) \
    ((AttentionView){memory + first[i] * element, views[i].batch, views[i].token, views[i].head})
    AttentionTensors tensors = {VIEW(in, Q), VIEW(in, K), VIEW(in, V), VIEW(out, DOUT),
                                lse + GUARD};
    if (expanded)
        tensors.k.batch = tensors.k.head = tensors.v.batch = tensors.v.head = 0;
    AttentionGradients gradients = {VIEW(in, DOUT), VIEW(out, Q), VIEW(out, K), VIEW(out, V)};
#undef VIEW
    for (int pass = FORWARD; pass <= (int)passes; pass++) {
        size_t n =
            pass == FORWARD ? attention_forward_workspace(p) : attention_backward_workspace(p);
        char *workspace = device_filled(device, NULL, n + GUARD);
        const char *wrong =
            pass == FORWARD
                ? attention_forward(p, &tensors, workspace, device->stream)
                : attention_backward(p, &tensors, &gradients, workspace, device->stream);
        if (wrong) fail_msg("%s", wrong);
        workspace = take_back(device, workspace, n + GUARD);
        assert_true(all_bytes(workspace + n, 0xff, GUARD));
        free(workspace);
    }

    in = take_back(device, in, bytes);
    assert_memory_equal(in, staging, bytes); /* inputs are inputs */
    out = take_back(device, out, bytes);
    lse = take_back(device, lse, lse_bytes + 2 * GUARD);
    transfer(r, DOUT, out, r->out[O], OUT_OF_BUFFER);
    if (passes == FORWARD_AND_BACKWARD) {
        transfer(r, Q, out, r->out[DQ], OUT_OF_BUFFER);
        transfer(r, K, out, r->out[DK], OUT_OF_BUFFER);
        transfer(r, V, out, r->out[DV], OUT_OF_BUFFER);
    }
    assert_true(all_bytes(out, 0xff, bytes));
    for (size_t i = 0; i < r->out_size[LSE]; i++)
        r->out[LSE][i] = load(type_accumulator(p->type), lse + GUARD, i);
    assert_true(all_bytes(lse, 0xff, GUARD) && all_bytes(lse + GUARD + lse_bytes, 0xff, GUARD));
    free(in);
    free(out);
    free(lse);
    free(staging);
}

Run run_like(const Run *r, DeviceType device, DataType type, AttentionFamily family) {
    Run other = *r;
    for (int i = 0; i < INPUTS; i++)
        memcpy(other.in[i] = doubles(r->in_size[i]), r->in[i], r->in_size[i] * sizeof(double));
    for (int i = 0; i < OUTPUTS; i++) other.out[i] = doubles(r->out_size[i]);
    other.problem.device = device;
    other.problem.type = type;
    other.problem.family = family;
    run(&other, FORWARD_AND_BACKWARD);
    return other;
}

Run run_repeatedly(const Run *r, DeviceType device, DataType type, AttentionFamily family,
                   int repeats) {
    Run first = run_like(r, device, type, family);
    for (int n = 0; n < repeats; n++) {
        Run again = run_like(r, device, type, family);
        assert_same_bits(&first, &again);
        free_run(&again);
    }
    return first;
}

Run large_scores(void) {
    Case c = {1, 2, 2, 130, 130, 64, ATTENTION_CAUSAL, 0, PACKED};
    Run r = new_run(&c);
    for (int input = Q; input <= K; input++)
        for (size_t i = 0; i < r.in_size[input]; i++) r.in[input][i] *= 30;
    run(&r, FORWARD_AND_BACKWARD);
    return r;
}

/* --- comparing --- */

double error_of(const Run *x, const Run *reference, int output) {
    double difference = 0, norm = 0;
    const size_t n = reference->out_size[output];
    for (size_t i = 0; i < n; i++) {
        double a = x->out[output][i], b = reference->out[output][i];
        if (b == -INFINITY && a == b) continue;
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    return sqrt(difference) / fmax(sqrt(norm), 1e-3 * sqrt((double)n));
}

void assert_error(const Run *x, int output, double e, double tolerance) {
    const Attention *p = &x->problem;
    char name[256];
    if (e <= tolerance) return;
    snprintf(name, sizeof name, "%s %s %s B=%zu NH=%zu NKV=%zu TQ=%zu TK=%zu HS=%zu%s drop=%g: %s",
             attention_name(p->family), p->device == DEVICE_CPU ? "CPU" : "CUDA",
             type_name(p->type), p->B, p->NH, p->NKV, p->TQ, p->TK, p->HS,
             p->mask == ATTENTION_CAUSAL ? " causal" : "", (double)p->dropout.probability,
             output_names[output]);
    compare(name, e, tolerance);
    fail();
}

void assert_close(const Run *x, const Run *reference, double tolerance) {
    for (int i = 0; i < OUTPUTS; i++) assert_error(x, i, error_of(x, reference, i), tolerance);
}

void assert_same_bits(const Run *x, const Run *y) {
    for (int i = 0; i < OUTPUTS; i++)
        assert_memory_equal(x->out[i], y->out[i], x->out_size[i] * sizeof(double));
}

void assert_no_keys(const Run *r, size_t rows) {
    const Attention *p = &r->problem;
    for (size_t i = 0; i < r->out_size[LSE]; i++)
        assert_true((r->out[LSE][i] == -INFINITY) == (i % p->TQ < rows));
    for (size_t i = 0; i < r->out_size[O]; i++)
        if (i / p->HS / p->NH % p->TQ < rows) assert_true(r->out[O][i] == 0 && r->out[DQ][i] == 0);
}
