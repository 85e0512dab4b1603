/* check_attention FILE [--device=…] [--precision=…] [--attention=…]: attention against a file of
 * expected values.
 *
 * FILE is a safetensors file of cases, each with CASE.q k v do o dq dk dv of shape (B,NH,T,HS) and
 * CASE.lse (B,NH,T), computed in float64; causal where CASE starts with "causal". Without
 * --attention every family that runs here is checked. Prints a line for each quantity; exits with 1
 * if any is off.
 *
 * Tolerances. fp32 rounds each value to 6e-8 and sums of a few hundred lose about two digits: 1e-5
 * on the CPU, 1e-4 on CUDA, whose exponentials are approximate to a few ulp of scores that
 * reach 80. bf16 rounds P and dS to 4e-3, and differences of such numbers lose a digit: 5e-2;
 * beyond that a flash family may err twice as much as the naive one on the same case, plus 4e-3 for
 * the rounding of the result, which chance can make exact in the naive family. */
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "runtime/convert.h"
#include "runtime/error.h"
#include "runtime/flags.h"
#include "runtime/safetensors.h"
#include "test/compare.h"

static const char *device_flag = "cpu", *precision_flag = "fp32", *attention_flag = "auto";
static Flag flags[] = {
    {"device", FLAG_CHOICE, &device_flag, 0, 0, "cpu|cuda", "where to compute", false},
    {"precision", FLAG_CHOICE, &precision_flag, 0, 0, "fp32|bf16", "type of tensors", false},
    {"attention", FLAG_CHOICE, &attention_flag, 0, 0, "auto|naive|flash_v1|flash_mma|flash_hopper",
     "kernels; auto: each family in turn", false},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};

static const char *const input_names[] = {"q", "k", "v", "do"};
static const char *const output_names[] = {"o", "lse", "dq", "dk", "dv"};
enum { INPUTS = 4 };
enum { O, LSE, DQ, DK, DV, OUTPUTS };

/* One case of the file, in float, and its problem. */
typedef struct {
    const char *name;
    Attention problem;
    size_t elements[OUTPUTS];
    float *inputs[INPUTS], *expected[OUTPUTS];
} Case;

static void die(const char *message) {
    fprintf(stderr, "check_attention: %s\n", message);
    exit(2);
}

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) die("out of memory");
    return memory;
}

static float *read_tensor(const Safetensors *file, const char *name, const char *part,
                          const size_t *shape, int rank) {
    char full[256];
    snprintf(full, sizeof full, "%s.%s", name, part);
    const SafetensorsTensor *tensor = safetensors_find(file, full);
    if (!tensor || tensor->rank != rank ||
        memcmp(tensor->shape, shape, (size_t)rank * sizeof shape[0]) != 0) {
        error_set("%s is missing, or its shape is not that of %s.q", full, name);
        die(error_message());
    }
    float *values = allocate(tensor->elements * sizeof *values);
    if (!safetensors_read_float(file, tensor, 0, tensor->elements, values)) die(error_message());
    return values;
}

static Case read_case(const Safetensors *file, const char *name, const size_t shape[4]) {
    Case c = {
        .name = name,
        .problem = {.B = shape[0],
                    .NH = shape[1],
                    .TQ = shape[2],
                    .TK = shape[2],
                    .HS = shape[3],
                    .mask = strncmp(name, "causal", 6) == 0 ? ATTENTION_CAUSAL : ATTENTION_FULL}};
    const size_t rows = shape[0] * shape[1] * shape[2];
    for (int i = 0; i < INPUTS; i++)
        c.inputs[i] = read_tensor(file, name, input_names[i], shape, 4);
    for (int i = 0; i < OUTPUTS; i++) {
        c.elements[i] = i == LSE ? rows : rows * shape[3];
        c.expected[i] = read_tensor(file, name, output_names[i], shape, i == LSE ? 3 : 4);
    }
    return c;
}

static void free_case(Case *c) {
    for (int i = 0; i < INPUTS; i++) free(c->inputs[i]);
    for (int i = 0; i < OUTPUTS; i++) free(c->expected[i]);
}

static void *device_memory_or_die(Device *device, size_t bytes) {
    void *memory = device_alloc(device, bytes);
    if (!memory) die(error_message());
    return memory;
}

/* errors[i] = relative error of output i as this family computes it. */
static void measure(Device *device, const Case *c, const Attention *problem, double *errors) {
    const size_t element = type_bytes(problem->type), n = c->elements[O];
    void *staging = allocate(n * sizeof(float)), *in[INPUTS], *out[OUTPUTS];
    float *result = allocate(n * sizeof *result);

    for (int i = 0; i < INPUTS; i++) {
        in[i] = device_memory_or_die(device, n * element);
        type_from_float(problem->type, staging, c->inputs[i], n);
        device_upload(device, in[i], staging, n * element);
    }
    for (int i = 0; i < OUTPUTS; i++) out[i] = device_memory_or_die(device, n * sizeof(float));
    size_t bytes = attention_forward_workspace(problem);
    if (attention_backward_workspace(problem) > bytes)
        bytes = attention_backward_workspace(problem);
    void *workspace = device_memory_or_die(device, bytes);

    /* (B,NH,T,HS), read in place. */
    AttentionView view = {.batch = problem->NH * problem->TQ * problem->HS,
                          .token = problem->HS,
                          .head = problem->TQ * problem->HS};
#define VIEW(memory) ((AttentionView){memory, view.batch, view.token, view.head})
    AttentionTensors tensors = {VIEW(in[0]), VIEW(in[1]), VIEW(in[2]), VIEW(out[O]), out[LSE]};
    AttentionGradients gradients = {VIEW(in[3]), VIEW(out[DQ]), VIEW(out[DK]), VIEW(out[DV])};
#undef VIEW
    const char *wrong = attention_forward(problem, &tensors, workspace, device->stream);
    if (!wrong)
        wrong = attention_backward(problem, &tensors, &gradients, workspace, device->stream);
    if (wrong) die(wrong);

    for (int i = 0; i < OUTPUTS; i++) {
        DataType type = i == LSE ? type_accumulator(problem->type) : problem->type;
        device_download(device, staging, out[i], c->elements[i] * type_bytes(type));
        type_to_float(type, result, staging, c->elements[i]);
        errors[i] = relative_error_float(result, c->expected[i], c->elements[i]);
    }
    for (int i = 0; i < INPUTS; i++) device_free(device, in[i]);
    for (int i = 0; i < OUTPUTS; i++) device_free(device, out[i]);
    device_free(device, workspace);
    free(staging);
    free(result);
}

/* Judges one family on one case; false if a quantity is off. */
static bool check(Device *device, const Case *c, AttentionFamily family, double tolerance) {
    Attention problem = c->problem;
    double errors[OUTPUTS], naive[OUTPUTS];
    bool bounded = problem.type == TYPE_BF16 && family != ATTENTION_NAIVE, pass = true;
    problem.family = family;
    measure(device, c, &problem, errors);
    if (bounded) {
        problem.family = ATTENTION_NAIVE;
        measure(device, c, &problem, naive);
    }
    for (int i = 0; i < OUTPUTS; i++) {
        char name[320];
        double limit = tolerance;
        if (bounded && 2 * naive[i] + 4e-3 < limit) limit = 2 * naive[i] + 4e-3;
        snprintf(name, sizeof name, "%s %s.%s", attention_name(family), c->name, output_names[i]);
        pass &= compare(name, errors[i], limit);
    }
    return pass;
}

int main(int argc, char **argv) {
    if (argc < 2 || argv[1][0] == '-')
        die("usage: check_attention FILE [--device=cpu|cuda] [--precision=fp32|bf16] "
            "[--attention=NAME]");
    if (!flags_parse(flags, argc - 2, argv + 2)) die(error_message());
    const bool cuda = strcmp(device_flag, "cuda") == 0, bf16 = strcmp(precision_flag, "bf16") == 0;
    const AttentionFamily asked = attention_by_name(attention_flag);
    const double tolerance = bf16 ? 5e-2 : cuda ? 1e-4 : 1e-5;
    Device *device = device_open(cuda ? DEVICE_CUDA : DEVICE_CPU, 0);
    Safetensors *file = device ? safetensors_open(argv[1]) : NULL;
    if (!file) die(error_message());

    bool pass = true;
    size_t cases = 0, checked = 0;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const SafetensorsTensor *q = safetensors_at(file, i);
        char name[256];
        size_t length = strlen(q->name);
        if (length < 3 || length >= sizeof name || strcmp(q->name + length - 2, ".q") != 0)
            continue;
        if (q->rank != 4) die("a tensor CASE.q is not of shape (B,NH,T,HS)");
        snprintf(name, sizeof name, "%.*s", (int)length - 2, q->name);
        Case c = read_case(file, name, q->shape);
        cases++;
        c.problem.device = device->type;
        c.problem.type = bf16 ? TYPE_BF16 : TYPE_F32;
        for (int family = ATTENTION_AUTO + 1; family < ATTENTION_FAMILIES; family++) {
            if (asked != ATTENTION_AUTO && asked != (AttentionFamily)family) continue;
            c.problem.family = (AttentionFamily)family;
            if (attention_choose(&c.problem) == ATTENTION_AUTO) continue;
            pass &= check(device, &c, (AttentionFamily)family, tolerance);
            checked++;
        }
        free_case(&c);
    }
    if (checked == 0) die(cases ? error_message() : "the file has no cases: no tensor CASE.q");
    printf("%s: %zu cases and families, %s\n", argv[1], checked,
           pass ? "all within tolerance" : "FAILED");
    safetensors_close(file);
    device_close(device);
    return !pass;
}
