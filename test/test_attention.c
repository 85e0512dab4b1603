/* Attention: every family, on every device and type, against the definition.
 *
 * The chain of proof: central differences in double prove the CPU's backward against its forward;
 * the two CPU families prove each other; the double naive family on the CPU is the reference of
 * everything in less precision. Inputs are multiples of 1/64 in [-2, 2), exact in bf16, so that all
 * types compute the same problem.
 *
 * Every run fills outputs, the gaps between them and the workspace with NaN first: what is not
 * written fails its comparison, what is written outside fails the check of the gaps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "runtime/convert.h"
#include "runtime/error.h"
#include "test/compare.h"
#include "test/part.h"

enum { Q, K, V, DOUT, INPUTS };
enum { O, LSE, DQ, DK, DV, OUTPUTS };
static const char *const output_names[OUTPUTS] = {"o", "lse", "dq", "dk", "dv"};

typedef enum { PACKED, SEPARATE, HEADS_FIRST, GAPS, LAYOUTS } Layout;

typedef struct {
    size_t B, NH, NKV, TQ, TK, HS;
    AttentionMask mask;
    float dropout;
    Layout layout;
} Case;

/* What all families are run on: every head size class, lengths around the tiles, fewer and more
 * keys than queries, shared keys, dropout, every layout. */
static const Case cases[] = {
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
};
enum { CASES = sizeof cases / sizeof cases[0] };

static Device *cpu, *gpu;

/* --- running one problem --- */

/* The tensors of a case in double, (B,T,NH or NKV,HS) contiguous; lse (B,NH,TQ). */
typedef struct {
    Attention problem;
    Layout layout;
    size_t in_size[INPUTS], out_size[OUTPUTS];
    double *in[INPUTS], *out[OUTPUTS];
} Run;

static double *doubles(size_t n) {
    double *values = calloc(n, sizeof *values);
    assert_non_null(values);
    return values;
}

static Run new_run(const Case *c) {
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
        for (size_t j = 0; j < in[i]; j++)
            r.in[i][j] = (philox(7, (uint32_t)j, (uint32_t)i, 0, 2).word[0] % 256 - 128.0) / 64;
    }
    for (int i = 0; i < OUTPUTS; i++) r.out[i] = doubles(r.out_size[i] = out[i]);
    return r;
}

static void free_run(Run *r) {
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
        case SEPARATE: view = attention_view(NULL, T, heads, HS); break;
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

static bool all_bytes(const void *memory, int value, size_t n) {
    const unsigned char *bytes = memory;
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != value) return false;
    return true;
}

/* Device memory of these bytes, all 0xff (a NaN in every type) unless given. */
static void *device_filled(Device *device, const void *bytes, size_t n) {
    void *host = malloc(n), *memory = device_alloc(device, n);
    if (!host || !memory) fail_msg("%s", error_message());
    memset(host, 0xff, n);
    device_upload(device, memory, bytes ? bytes : host, n);
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

typedef enum { FORWARD, FORWARD_AND_BACKWARD } Passes;

/* Fills r->out from r->in with the problem's device, type and family. */
static void run(Run *r, Passes passes) {
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
    char *in = device_filled(device, staging, bytes), *out = device_filled(device, NULL, bytes);
    char *lse = device_filled(device, NULL, lse_bytes + 2 * GUARD);

#define VIEW(memory, i) \
    ((AttentionView){memory + first[i] * element, views[i].batch, views[i].token, views[i].head})
    AttentionTensors tensors = {VIEW(in, Q), VIEW(in, K), VIEW(in, V), VIEW(out, DOUT),
                                lse + GUARD};
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

/* The same inputs as r, to be run otherwise. */
static Run run_like(const Run *r, DeviceType device, DataType type, AttentionFamily family) {
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

/* --- comparing --- */

/* ‖x − ref‖ / ‖ref‖, with ‖ref‖ at least that of elements of size 1e-3: some results are 0 but for
 * rounding, such as dq when there is one key, and have no relative error. -inf must meet -inf. */
static double error(const Run *x, const Run *reference, int output) {
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

static void assert_error(const Run *x, int output, double e, double tolerance) {
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

static void assert_close(const Run *x, const Run *reference, double tolerance) {
    for (int i = 0; i < OUTPUTS; i++) assert_error(x, i, error(x, reference, i), tolerance);
}

static void assert_same_bits(const Run *x, const Run *y) {
    for (int i = 0; i < OUTPUTS; i++)
        assert_memory_equal(x->out[i], y->out[i], x->out_size[i] * sizeof(double));
}

/* Between two ways to compute in double: 1e-16 for each rounding, some hundreds in a row. */
static const double double_tolerance = 1e-12;
/* fp32 against double: 6e-8 for each rounding, and differences dP - D lose a digit. */
static const double float_tolerance = 1e-5;

/* --- the CPU --- */

static void check_gradients(const Case *c, AttentionFamily family) {
    Run r = new_run(c);
    r.problem.family = family;
    run(&r, FORWARD_AND_BACKWARD);
    Run analytic = r;
    for (int i = 0; i < OUTPUTS; i++) r.out[i] = doubles(r.out_size[i]);

    /* loss = Σ dout ∘ o. The difference's error is of order h² ≈ 1e-10 by truncation and 1e-16 / h
     * ≈ 1e-11 by rounding, of gradients of order 1. */
    const double h = 1e-5;
    for (int input = Q; input <= V; input++) {
        double *numeric = doubles(r.in_size[input]);
        for (size_t i = 0; i < r.in_size[input]; i++) {
            const double x = r.in[input][i];
            for (int side = -1; side <= 1; side += 2) {
                r.in[input][i] = x + side * h;
                run(&r, FORWARD);
                for (size_t j = 0; j < r.out_size[O]; j++)
                    numeric[i] += side * r.in[DOUT][j] * r.out[O][j] / (2 * h);
            }
            r.in[input][i] = x;
        }
        assert_error(&r, DQ + input,
                     relative_error(analytic.out[DQ + input], numeric, r.in_size[input]), 1e-6);
        free(numeric);
    }
    for (int i = 0; i < OUTPUTS; i++) free(analytic.out[i]);
    free_run(&r);
}

static void test_gradients(void **state) {
    (void)state;
    static const Case small[] = {
        {2, 2, 2, 6, 6, 4, ATTENTION_CAUSAL, 0, PACKED},
        {1, 2, 2, 5, 7, 3, ATTENTION_FULL, 0, GAPS},
        {1, 4, 2, 4, 9, 3, ATTENTION_CAUSAL, 0, SEPARATE},
        {1, 2, 1, 9, 4, 3, ATTENTION_CAUSAL, 0, HEADS_FIRST},
        {1, 2, 1, 7, 8, 3, ATTENTION_CAUSAL, 0.4f, SEPARATE},
        {1, 1, 1, 67, 67, 2, ATTENTION_CAUSAL, 0.2f, PACKED}, /* two tiles each way */
        {1, 1, 1, 65, 130, 1, ATTENTION_FULL, 0, SEPARATE},
    };
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++) {
        check_gradients(&small[i], ATTENTION_NAIVE);
        check_gradients(&small[i], ATTENTION_FLASH_V1);
    }
}

static void test_cpu_families_agree(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++) {
        Run reference = new_run(&cases[i]);
        run(&reference, FORWARD_AND_BACKWARD);
        Run flash = run_like(&reference, DEVICE_CPU, TYPE_F64, ATTENTION_FLASH_V1);
        Run flash_float = run_like(&reference, DEVICE_CPU, TYPE_F32, ATTENTION_FLASH_V1);
        Run naive_float = run_like(&reference, DEVICE_CPU, TYPE_F32, ATTENTION_NAIVE);
        assert_close(&flash, &reference, double_tolerance);
        assert_close(&flash_float, &reference, float_tolerance);
        assert_close(&naive_float, &reference, float_tolerance);
        free_run(&reference);
        free_run(&flash);
        free_run(&flash_float);
        free_run(&naive_float);
    }
}

static void test_every_length(void **state) {
    (void)state;
    for (int mask = ATTENTION_FULL; mask <= ATTENTION_CAUSAL; mask++)
        for (size_t i = 1; i <= 73; i++) {
            const size_t longer[] = {113, 257, 1023}, T = i <= 70 ? i : longer[i - 71];
            Case c = {1, 2, 2, T, T, 16, (AttentionMask)mask, 0, PACKED};
            Run reference = new_run(&c);
            run(&reference, FORWARD_AND_BACKWARD);
            Run flash = run_like(&reference, DEVICE_CPU, TYPE_F64, ATTENTION_FLASH_V1);
            assert_close(&flash, &reference, double_tolerance);
            free_run(&reference);
            free_run(&flash);
        }
}

static void test_layouts_agree(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        Case c = {2, 3, 3, 75, 75, 20, ATTENTION_CAUSAL, 0.1f, PACKED};
        Run packed = new_run(&c);
        packed.problem.family = (AttentionFamily)family;
        run(&packed, FORWARD_AND_BACKWARD);
        for (int layout = SEPARATE; layout < LAYOUTS; layout++) {
            Run other = packed;
            other.layout = (Layout)layout;
            Run result = run_like(&other, DEVICE_CPU, TYPE_F64, (AttentionFamily)family);
            if (family == ATTENTION_NAIVE) /* a BLAS may order its sums by alignment */
                assert_close(&result, &packed, double_tolerance);
            else
                assert_same_bits(&result, &packed);
            free_run(&result);
        }
        free_run(&packed);
    }
}

/* O = P ∘ Z when V is the identity: each factor is seen, at its place of runtime/random.h. */
static void test_dropout_mask(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        const size_t TQ = 70, TK = 200;
        Case c = {2, 2, 2, TQ, TK, 200, ATTENTION_FULL, 0.3f, SEPARATE};
        Run r = new_run(&c);
        r.problem.family = (AttentionFamily)family;
        for (size_t i = 0; i < r.in_size[V]; i++) /* (B,TK,NH,HS) */
            r.in[V][i] = i % c.HS == i / c.HS / c.NH % TK;
        run(&r, FORWARD);
        Run plain = r;
        plain.problem.dropout.probability = 0;
        Run kept = run_like(&plain, DEVICE_CPU, TYPE_F64, (AttentionFamily)family);
        size_t dropped = 0, i = 0;
        for (uint32_t b = 0; b < c.B; b++)
            for (uint32_t t = 0; t < TQ; t++)
                for (uint32_t h = 0; h < c.NH; h++)
                    for (uint32_t j = 0; j < TK; j++, i++) {
                        Philox draw = philox(r.problem.dropout.key, 4 * (j / 64) + j % 8 / 2, t,
                                             b * (uint32_t)c.NH + h, 1);
                        unsigned byte = philox_byte(&draw, (int)(2 * (j / 8 % 8) + j % 2));
                        /* 0.3 is 77/256. */
                        double factor = byte < 77 ? 0 : 256.0 / (256 - 77);
                        dropped += byte < 77;
                        /* The factor is a float: 6e-8. */
                        assert_true(fabs(r.out[O][i] - factor * kept.out[O][i]) <=
                                    1e-7 * kept.out[O][i]);
                    }
        /* Five deviations of the count. */
        assert_true(fabs((double)dropped / (double)i - 77 / 256.0) <= 5 * sqrt(0.21 / (double)i));
        free_run(&r);
        free_run(&kept);
    }
}

/* With equal keys every key that is seen gets the same probability. */
static void test_equal_logits(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        Case c = {1, 1, 1, 100, 130, 8, ATTENTION_CAUSAL, 0, SEPARATE};
        Run r = new_run(&c);
        r.problem.family = (AttentionFamily)family;
        for (size_t i = 0; i < r.in_size[K]; i++) r.in[K][i] = 1;
        run(&r, FORWARD);
        for (size_t i = 0; i < c.TQ; i++) {
            const size_t seen = i + 1 + c.TK - c.TQ;
            double score = 0;
            for (size_t d = 0; d < c.HS; d++) {
                double mean = 0;
                for (size_t j = 0; j < seen; j++) mean += r.in[V][j * c.HS + d] / (double)seen;
                assert_true(fabs(r.out[O][i * c.HS + d] - mean) <= double_tolerance);
                score += r.in[Q][i * c.HS + d] / sqrt((double)c.HS);
            }
            /* The default scale is a float: 6e-8 of a score up to 6. */
            assert_true(fabs(r.out[LSE][i] - score - log((double)seen)) <= 1e-6);
        }
        free_run(&r);
    }
}

static void assert_no_keys(const Run *r, size_t rows) {
    const Attention *p = &r->problem;
    for (size_t i = 0; i < r->out_size[LSE]; i++)
        assert_true((r->out[LSE][i] == -INFINITY) == (i % p->TQ < rows));
    for (size_t i = 0; i < r->out_size[O]; i++)
        if (i / p->HS / p->NH % p->TQ < rows) assert_true(r->out[O][i] == 0 && r->out[DQ][i] == 0);
}

static void test_queries_without_keys(void **state) {
    (void)state;
    Case c = {2, 2, 1, 140, 70, 8, ATTENTION_CAUSAL, 0, SEPARATE};
    Run naive = new_run(&c);
    run(&naive, FORWARD_AND_BACKWARD);
    Run flash = run_like(&naive, DEVICE_CPU, TYPE_F32, ATTENTION_FLASH_V1);
    assert_no_keys(&naive, 70);
    assert_no_keys(&flash, 70);
    free_run(&naive);
    free_run(&flash);
}

/* Scores of some thousands: exp must never see one that is not reduced by the maximum. */
static Run large_scores(void) {
    Case c = {1, 2, 2, 130, 130, 64, ATTENTION_CAUSAL, 0, PACKED};
    Run r = new_run(&c);
    for (int input = Q; input <= K; input++)
        for (size_t i = 0; i < r.in_size[input]; i++) r.in[input][i] *= 30;
    run(&r, FORWARD_AND_BACKWARD);
    return r;
}

/* Scores of 1e4 have an error of 1e-3 in fp32, which is the relative error of exp; where two keys
 * are close it moves P by as much. */
static const double large_score_tolerance = 1e-2;

static void test_large_scores(void **state) {
    (void)state;
    Run naive = large_scores();
    for (int i = 0; i < OUTPUTS; i++)
        for (size_t j = 0; j < naive.out_size[i]; j++) assert_true(isfinite(naive.out[i][j]));
    Run flash = run_like(&naive, DEVICE_CPU, TYPE_F64, ATTENTION_FLASH_V1);
    Run single = run_like(&naive, DEVICE_CPU, TYPE_F32, ATTENTION_FLASH_V1);
    assert_close(&flash, &naive, 1e-9); /* scores of 1e4 times 1e-16, and what follows */
    assert_close(&single, &naive, large_score_tolerance);
    free_run(&naive);
    free_run(&flash);
    free_run(&single);
}

static void test_workspace(void **state) {
    (void)state;
    size_t forward[2], backward[2];
    for (int i = 0; i < 2; i++) {
        Attention p = {.type = TYPE_F32, .B = 2, .NH = 3, .HS = 64, .family = ATTENTION_FLASH_V1};
        p.TQ = p.TK = i ? (size_t)1 << 18 : (size_t)1 << 14;
        forward[i] = attention_forward_workspace(&p);
        backward[i] = attention_backward_workspace(&p);
        p.family = ATTENTION_NAIVE;
        assert_true(attention_forward_workspace(&p) == p.B * p.NH * p.TQ * p.TK * sizeof(float));
    }
    assert_true(forward[0] > 0 && forward[1] == forward[0]);
    assert_true(backward[0] > 0 && backward[1] <= 16 * backward[0]);
}

static void test_repeats(void **state) {
    (void)state;
    for (int family = ATTENTION_NAIVE; family <= ATTENTION_FLASH_V1; family++) {
        Case c = {1, 2, 1, 300, 300, 40, ATTENTION_CAUSAL, 0.1f, SEPARATE};
        Run first = new_run(&c);
        first.problem.deterministic = 1;
        Run x = run_like(&first, DEVICE_CPU, TYPE_F32, (AttentionFamily)family);
        Run y = run_like(&first, DEVICE_CPU, TYPE_F32, (AttentionFamily)family);
        assert_same_bits(&x, &y);
        free_run(&first);
        free_run(&x);
        free_run(&y);
    }
}

/* --- the interface --- */

static void test_names(void **state) {
    (void)state;
    for (int family = 0; family < ATTENTION_FAMILIES; family++)
        assert_int_equal(attention_by_name(attention_name((AttentionFamily)family)), family);
    assert_int_equal(attention_by_name("flash"), ATTENTION_FAMILIES);
    assert_int_equal(attention_by_name(""), ATTENTION_FAMILIES);
}

static void test_choice(void **state) {
    (void)state;
    Attention p = {.type = TYPE_F32, .B = 1, .NH = 2, .TQ = 8, .TK = 8, .HS = 64};
    assert_int_equal(attention_choose(&p), ATTENTION_FLASH_V1);
    p.family = ATTENTION_NAIVE;
    assert_int_equal(attention_choose(&p), ATTENTION_NAIVE);
    p.family = ATTENTION_FLASH_MMA;
    assert_int_equal(attention_choose(&p), ATTENTION_AUTO);
    assert_non_null(strstr(error_message(), "flash_mma does not run on the CPU"));
    if (!gpu) return;
    p.device = DEVICE_CUDA;
    p.family = ATTENTION_AUTO;
    assert_int_equal(attention_choose(&p), ATTENTION_FLASH_V1);
    p.type = TYPE_BF16;
    AttentionFamily mma = gpu->architecture >= 80 ? ATTENTION_FLASH_MMA : ATTENTION_FLASH_V1;
    assert_int_equal(attention_choose(&p),
                     gpu->architecture == 90 ? ATTENTION_FLASH_HOPPER : mma);
    p.HS = 60;
    assert_int_equal(attention_choose(&p), mma);
    p.family = ATTENTION_FLASH_HOPPER;
    assert_int_equal(attention_choose(&p), ATTENTION_AUTO);
    assert_non_null(strstr(error_message(), "flash_hopper needs a Hopper GPU"));
}

/* A valid problem with its tensors; the tests of errors break one thing at a time. */
typedef struct {
    Attention problem;
    AttentionTensors tensors;
    AttentionGradients gradients;
    void *workspace;
} Call;

static float call_memory[9][2 * 4 * 2 * 8];
static _Alignas(256) char call_workspace[1 << 20];

static Call valid_call(void) {
    Call c = {.problem = {.type = TYPE_F32,
                          .B = 2,
                          .NH = 2,
                          .TQ = 4,
                          .TK = 4,
                          .HS = 8,
                          .family = ATTENTION_NAIVE},
              .workspace = call_workspace};
    memset(call_memory, 0xff, sizeof call_memory);
    AttentionView views[9];
    for (int i = 0; i < 9; i++) views[i] = attention_view(call_memory[i], 4, 2, 8);
    c.tensors = (AttentionTensors){views[0], views[1], views[2], views[3], call_memory[8]};
    c.gradients = (AttentionGradients){views[4], views[5], views[6], views[7]};
    return c;
}

/* The backward must refuse the call with these words, and so must the forward if the fault `begins`
 * there; nothing is written. */
static void refused(Call c, const char *words, Passes begins) {
    const char *wrong = attention_backward(&c.problem, &c.tensors, &c.gradients, c.workspace, NULL);
    if (!wrong || !strstr(wrong, words)) fail_msg("\"%s\" lacks \"%s\"", wrong ? wrong : "", words);
    if (begins == FORWARD) {
        wrong = attention_forward(&c.problem, &c.tensors, c.workspace, NULL);
        if (!wrong || !strstr(wrong, words))
            fail_msg("\"%s\" lacks \"%s\"", wrong ? wrong : "", words);
    }
    assert_true(all_bytes(call_memory, 0xff, sizeof call_memory));
}

static void test_errors(void **state) {
    (void)state;
    Call c = valid_call();
    assert_null(attention_forward(&c.problem, &c.tensors, c.workspace, NULL));
    assert_null(attention_backward(&c.problem, &c.tensors, &c.gradients, c.workspace, NULL));

#define REFUSED(change, words)      \
    do {                            \
        c = valid_call();           \
        change;                     \
        refused(c, words, FORWARD); \
    } while (0)
    REFUSED(c.problem.B = 0, "B=0");
    REFUSED(c.problem.NH = 0, "NH=0");
    REFUSED(c.problem.TQ = 0, "TQ=0");
    REFUSED(c.problem.TK = 0, "TK=0");
    REFUSED(c.problem.HS = 0, "HS=0");
    REFUSED(c.problem.HS = 257, "HS=257");
    REFUSED(c.problem.TK = (size_t)1 << 31, "2^31");
    REFUSED((c.problem.B = (size_t)1 << 62, c.problem.NH = 4), "2^31");
    REFUSED((c.problem.TQ = 1 << 30, c.problem.B = 1 << 10), "B·NH·TQ must be at most 2^40");
    REFUSED(c.problem.TQ = c.problem.TK = 1 << 30, "naive stores every score");
    REFUSED((c.problem.NH = 6, c.problem.NKV = 4), "NKV=4 does not divide NH=6");
    REFUSED(c.problem.NKV = 4, "NKV=4 does not divide NH=2");
    REFUSED(c.problem.mask = (AttentionMask)2, "mask 2");
    REFUSED(c.problem.device = (DeviceType)7, "device 7");
    REFUSED(c.problem.family = ATTENTION_FAMILIES, "no family");
    REFUSED(c.problem.family = ATTENTION_FLASH_MMA, "flash_mma does not run on the CPU");
    REFUSED(c.problem.type = TYPE_BF16, "no kernels for bf16");
    REFUSED(c.problem.type = TYPE_I32, "no kernels for int32");
    REFUSED(c.problem.type = (DataType)99, "no type 99");
    REFUSED(c.problem.scale = -1, "scale is -1");
    REFUSED(c.problem.scale = NAN, "scale is");
    REFUSED(c.problem.dropout.probability = 1, "dropout probability is 1");
    REFUSED(c.problem.dropout.probability = -0.1f, "dropout probability is -0.1");
    REFUSED(c.problem.dropout.probability = NAN, "dropout probability is");
    REFUSED(c.problem.dropout.probability = 0.999f, "drops everything");
    REFUSED(c.tensors.q.data = NULL, "q is NULL");
    REFUSED(c.tensors.o.data = NULL, "o is NULL");
    REFUSED(c.tensors.lse = NULL, "lse is NULL");
    REFUSED(c.tensors.k.token = 7, "token stride of k is 7");
    REFUSED(c.workspace = NULL, "workspace is NULL");
    REFUSED(c.workspace = call_workspace + 4, "aligned");
#ifndef TILEGPT_CUDA
    REFUSED(c.problem.device = DEVICE_CUDA, "built without CUDA");
#endif
#undef REFUSED
    c = valid_call();
    c.gradients.dk.data = NULL;
    refused(c, "dk is NULL", FORWARD_AND_BACKWARD);
    c = valid_call();
    c.gradients.dq.head = 0;
    refused(c, "dq is written", FORWARD_AND_BACKWARD);
    /* Heads fill the gaps between tokens, or come whole; a head may not begin at the next token. */
    c = valid_call();
    c.gradients.dv.token = c.gradients.dv.head = 8;
    refused(c, "dv is written", FORWARD_AND_BACKWARD);
    c.gradients.dv.head = 4 * 8;
    assert_null(attention_backward(&c.problem, &c.tensors, &c.gradients, c.workspace, NULL));
    c = valid_call();
    c.gradients.dv.batch = 4 * 2 * 8 - 1;
    refused(c, "its batch stride is 63, but HS=8 and the smaller strides span 64",
            FORWARD_AND_BACKWARD);
    c = valid_call();
    c.tensors.o.batch = 0;
    const char *wrong = attention_forward(&c.problem, &c.tensors, c.workspace, NULL);
    assert_true(wrong && strstr(wrong, "o is written"));
    assert_non_null(attention_forward(NULL, &c.tensors, c.workspace, NULL));
    assert_non_null(attention_forward(&c.problem, NULL, c.workspace, NULL));
    c = valid_call();
    assert_non_null(attention_backward(&c.problem, &c.tensors, NULL, c.workspace, NULL));
}

/* A test of the tests: a NaN is never close, and neither is a wrong -inf. */
static void test_comparison_fails_on_nan(void **state) {
    (void)state;
    Case c = {1, 1, 1, 2, 2, 2, ATTENTION_FULL, 0, PACKED};
    Run r = new_run(&c), s = new_run(&c);
    assert_true(error(&r, &s, O) <= 0);
    r.out[O][1] = NAN;
    r.out[LSE][1] = -INFINITY;
    assert_false(error(&r, &s, O) <= 1e30);
    assert_false(error(&r, &s, LSE) <= 1e30);
    assert_false(error(&s, &r, LSE) <= 1e30);
    free_run(&r);
    free_run(&s);
}

/* --- CUDA against the CPU --- */

/* The skip of every test here; false if there is a GPU. */
static bool no_gpu(void) {
    if (!gpu) print_message("no GPU here, or a build without CUDA\n");
    return !gpu;
}

/* bf16: P, dS and the results are rounded to 2^-9, in the naive family too. A tiled family has
 * other partial sums: it may err twice as much as naive forward and three times backward, or by
 * 2^-9, the rounding of the result, where naive happens to be exact. LSE is a float in all. */
static void assert_close_to_naive(const Run *x, const Run *naive, const Run *reference) {
    for (int i = 0; i < OUTPUTS; i++) {
        double factor = i == O || i == LSE ? 2 : 3, floor = i == LSE ? float_tolerance : 1.0 / 512;
        assert_error(x, i, error(x, reference, i), factor * error(naive, reference, i) + floor);
    }
}

static const AttentionFamily flash_families[] = {ATTENTION_FLASH_V1, ATTENTION_FLASH_MMA,
                                                 ATTENTION_FLASH_HOPPER};

/* Whether this family takes the problem on the GPU in this type. */
static bool available(const Run *r, DataType type, AttentionFamily family) {
    Attention p = r->problem;
    p.device = DEVICE_CUDA;
    p.type = type;
    p.family = family;
    return attention_choose(&p) == family;
}

/* naive's own bf16 error: P and dS rounded to 2^-9 and averaged over keys; dP - D loses a digit. */
static const double naive_bf16_tolerance = 5e-2;

/* Every flash family in bf16, held against naive's error on the same inputs; those on tensor cores
 * have another backward where the order of additions is fixed. */
static void assert_flash_close(const Run *naive, const Run *reference) {
    for (size_t f = 0; f < sizeof flash_families / sizeof flash_families[0]; f++)
        for (int fixed = 0; fixed <= (flash_families[f] != ATTENTION_FLASH_V1); fixed++) {
            Run asked = *reference;
            asked.problem.deterministic = fixed;
            if (!available(&asked, TYPE_BF16, flash_families[f])) continue;
            Run flash = run_like(&asked, DEVICE_CUDA, TYPE_BF16, flash_families[f]);
            assert_close_to_naive(&flash, naive, reference);
            free_run(&flash);
        }
}

static void check_flash_on_cuda(const Case *c) {
    Run reference = new_run(c);
    run(&reference, FORWARD_AND_BACKWARD);
    Run naive = run_like(&reference, DEVICE_CUDA, TYPE_BF16, ATTENTION_NAIVE);
    assert_flash_close(&naive, &reference);
    free_run(&reference);
    free_run(&naive);
}

static void test_cuda_cases(void **state) {
    (void)state;
    if (no_gpu()) skip();
    for (size_t i = 0; i < CASES; i += stride()) {
        Run reference = new_run(&cases[i]);
        run(&reference, FORWARD_AND_BACKWARD);
        Run naive_float = run_like(&reference, DEVICE_CUDA, TYPE_F32, ATTENTION_NAIVE);
        Run flash_float = run_like(&reference, DEVICE_CUDA, TYPE_F32, ATTENTION_FLASH_V1);
        Run naive = run_like(&reference, DEVICE_CUDA, TYPE_BF16, ATTENTION_NAIVE);
        assert_close(&naive_float, &reference, float_tolerance);
        assert_close(&flash_float, &reference, float_tolerance);
        assert_close(&naive, &reference, naive_bf16_tolerance);
        assert_flash_close(&naive, &reference);
        free_run(&reference);
        free_run(&naive_float);
        free_run(&flash_float);
        free_run(&naive);
    }
}

static void test_cuda_every_length(void **state) {
    (void)state;
    if (no_gpu()) skip();
    for (int mask = ATTENTION_FULL; mask <= ATTENTION_CAUSAL; mask++)
        for (size_t T = 1; T <= 300; T += stride()) {
            Case narrow = {1, 2, 2, T, T, 64, (AttentionMask)mask, 0, PACKED};
            Case wide = {1, 1, 1, T, T, 128, (AttentionMask)mask, 0, PACKED};
            check_flash_on_cuda(&narrow);
            check_flash_on_cuda(&wide);
        }
}

static void test_cuda_every_head_size(void **state) {
    (void)state;
    if (no_gpu()) skip();
    for (size_t HS = 256; HS >= 1; HS -= HS < stride() ? HS : stride()) {
        Case c = {1, 1, 1, 70, 70, HS, ATTENTION_CAUSAL, 0, HS % 2 ? SEPARATE : PACKED};
        check_flash_on_cuda(&c);
    }
}

static void test_cuda_repeats_and_no_keys(void **state) {
    (void)state;
    if (no_gpu()) skip();
    static const Case repeated[] = {
        {2, 3, 3, 500, 500, 64, ATTENTION_CAUSAL, 0.1f, PACKED},
        {1, 4, 2, 300, 200, 128, ATTENTION_CAUSAL, 0, SEPARATE},
    };
    const DataType types[] = {TYPE_F32, TYPE_BF16};
    for (int i = 0; i < 2; i++)
        for (int t = 0; t < 2; t++)
            for (int family = ATTENTION_NAIVE; family < ATTENTION_FAMILIES; family++) {
                Run r = new_run(&repeated[i]);
                r.problem.deterministic = 1;
                if (available(&r, types[t], (AttentionFamily)family)) {
                    /* Then flash_hopper alone adds from several blocks, in turns. */
                    int repeats = family == ATTENTION_FLASH_HOPPER ? 50 : 1;
                    Run x = run_like(&r, DEVICE_CUDA, types[t], (AttentionFamily)family);
                    for (int n = 0; n < repeats; n++) {
                        Run y = run_like(&r, DEVICE_CUDA, types[t], (AttentionFamily)family);
                        assert_same_bits(&x, &y);
                        free_run(&y);
                    }
                    if (r.problem.TQ > r.problem.TK)
                        assert_no_keys(&x, r.problem.TQ - r.problem.TK);
                    free_run(&x);
                }
                free_run(&r);
            }
}

/* More work than a GPU has multiprocessors, so that blocks which stay take a second item and a third:
 * both passes, both widths of a tile, shared keys, queries that see no key. */
static void test_cuda_many_items(void **state) {
    (void)state;
    if (no_gpu()) skip();
    static const Case many[] = {
        {6, 12, 12, 400, 400, 64, ATTENTION_CAUSAL, 0, PACKED},
        {6, 12, 12, 400, 400, 128, ATTENTION_CAUSAL, 0, PACKED},
        {8, 12, 6, 500, 333, 128, ATTENTION_CAUSAL, 0.1f, SEPARATE},
        {9, 12, 4, 257, 500, 64, ATTENTION_FULL, 0, SEPARATE},
    };
    for (size_t i = 0; i < sizeof many / sizeof many[0]; i += stride()) {
        check_flash_on_cuda(&many[i]);
        Run r = new_run(&many[i]);
        r.problem.deterministic = 1;
        if (available(&r, TYPE_BF16, ATTENTION_FLASH_HOPPER)) {
            Run x = run_like(&r, DEVICE_CUDA, TYPE_BF16, ATTENTION_FLASH_HOPPER);
            Run y = run_like(&r, DEVICE_CUDA, TYPE_BF16, ATTENTION_FLASH_HOPPER);
            assert_same_bits(&x, &y);
            free_run(&x);
            free_run(&y);
        }
        free_run(&r);
    }
}

static void test_cuda_large_scores(void **state) {
    (void)state;
    if (no_gpu()) skip();
    /* Multiples of 30/64 are not exact in bf16, which is only held to be finite. */
    Run reference = large_scores();
    for (int family = ATTENTION_NAIVE; family < ATTENTION_FAMILIES; family++) {
        if (available(&reference, TYPE_F32, (AttentionFamily)family)) {
            Run x = run_like(&reference, DEVICE_CUDA, TYPE_F32, (AttentionFamily)family);
            assert_close(&x, &reference, large_score_tolerance);
            free_run(&x);
        }
        if (available(&reference, TYPE_BF16, (AttentionFamily)family)) {
            Run x = run_like(&reference, DEVICE_CUDA, TYPE_BF16, (AttentionFamily)family);
            for (int i = 0; i < OUTPUTS; i++)
                for (size_t j = 0; j < x.out_size[i]; j++) assert_true(isfinite(x.out[i][j]));
            free_run(&x);
        }
    }
    free_run(&reference);
}

int main(void) {
    cpu = device_open(DEVICE_CPU, 0);
    if (device_count_gpus() > 0) gpu = device_open(DEVICE_CUDA, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_cpu_families_agree),
        cmocka_unit_test(test_every_length),
        cmocka_unit_test(test_layouts_agree),
        cmocka_unit_test(test_dropout_mask),
        cmocka_unit_test(test_equal_logits),
        cmocka_unit_test(test_queries_without_keys),
        cmocka_unit_test(test_large_scores),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_comparison_fails_on_nan),
        cmocka_unit_test(test_cuda_cases),
        cmocka_unit_test(test_cuda_every_length),
        cmocka_unit_test(test_cuda_every_head_size),
        cmocka_unit_test(test_cuda_repeats_and_no_keys),
        cmocka_unit_test(test_cuda_many_items),
        cmocka_unit_test(test_cuda_large_scores),
    };
    choose_tests();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    device_close(gpu);
    device_close(cpu);
    return failures;
}
