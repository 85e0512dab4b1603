/* Speed of attention, of a training step and of sampling. Each result is checked, printed, and appended as one
 * JSON line to dev/results/bench.jsonl, whose fields dev/results/README.md explains.
 *
 * Operations are counted as in FlashAttention's papers: the forward is two matrix products,
 * 4·B·NH·T²·HS, of which causality needs half; the backward is five, 2.5 times the forward, the
 * recomputation of the scores being one of them. What a kernel wastes does not count. */
#include <cjson/cJSON.h>
#include <math.h>

#include "dev/measure.h"
#include "gpt/decode.h"
#include "runtime/convert.h"
#include "runtime/flags.h"
#include "test/compare.h"

static const char *what = "all", *device_flag = "auto", *attention_flag = "auto",
                  *preset = "gpt2-124M", *commit_flag = "", *output = "dev/results/bench.jsonl";
static int64_t batch, sequence, max_length;

static Flag flags[] = {
    {"what", FLAG_CHOICE, &what, 0, 0, "all|attention|step|sample", "what to time", false},
    {"device", FLAG_CHOICE, &device_flag, 0, 0, "auto|cpu|cuda", "where to compute", false},
    {"attention", FLAG_CHOICE, &attention_flag, 0, 0, "auto|naive|flash_v1|flash_mma|flash_hopper",
     "kernels; auto: every family, and in the step the one that the trainer takes", false},
    {"max-length", FLAG_INT, &max_length, 0, 1 << 24, NULL,
     "longest T of attention; 0: 4096 on a GPU, 2048 on the CPU", false},
    {"preset", FLAG_STRING, &preset, 0, 0, NULL, "model of the step and of sampling", false},
    {"batch", FLAG_INT, &batch, 0, 1 << 24, NULL,
     "B of the step, 0: 64 on a GPU, 4 on the CPU; texts at once of sampling, 0: 1", false},
    {"sequence", FLAG_INT, &sequence, 0, 1 << 24, NULL,
     "T of the step; 0: 1024 on a GPU, 64 on the CPU, but no more than the preset's", false},
    {"output", FLAG_STRING, &output, 0, 0, NULL, "file that the results are appended to", false},
    {"commit", FLAG_STRING, &commit_flag, 0, 0, NULL, "to record; default: what git says", false},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};

/* --- Results -------------------------------------------------------------------------------- */

/* The first line that a command prints; NULL if it prints none. */
static const char *first_line(const char *command, char *text, size_t bytes) {
    FILE *pipe = popen(command, "r");
    bool got = pipe && fgets(text, (int)bytes, pipe);
    if (pipe) pclose(pipe);
    if (!got) return NULL;
    text[strcspn(text, "\n")] = '\0';
    return text[0] ? text : NULL;
}

static void add_text(cJSON *line, const char *name, const char *text) {
    cJSON_AddItemToObject(line, name, text ? cJSON_CreateString(text) : cJSON_CreateNull());
}

static void add_count(cJSON *line, const char *name, size_t count) {
    cJSON_AddNumberToObject(line, name, (double)count);
}

/* Five digits: more would be noise. */
static void add_figure(cJSON *line, const char *name, double value) {
    char text[32];
    snprintf(text, sizeof text, "%.5g", value);
    cJSON_AddNumberToObject(line, name, strtod(text, NULL));
}

/* What every line begins with. */
static cJSON *result_begin(const char *measured, const Device *device, DataType type) {
    static char commit_text[128], driver_text[128];
    static const char *commit, *driver;
    static bool asked;
    if (!asked) {
        commit = commit_flag[0]
                     ? commit_flag
                     : first_line("git --no-optional-locks describe --always --dirty 2>/dev/null",
                                  commit_text, sizeof commit_text);
        if (device->type == DEVICE_CUDA)
            driver = first_line(
                "nvidia-smi --query-gpu=driver_version --format=csv,noheader "
                "2>/dev/null",
                driver_text, sizeof driver_text);
        asked = true;
    }
    cJSON *line = cJSON_CreateObject();
    add_text(line, "what", measured);
    add_text(line, "commit", commit);
    add_text(line, "device", device->name);
    add_text(line, "driver", driver);
    add_count(line, "processors", (size_t)device->processors);
    add_text(line, "type", type_name(type));
    return line;
}

static void result_end(cJSON *line) {
    char *text = cJSON_PrintUnformatted(line);
    FILE *file = fopen(output, "a");
    bool written = file && text && fprintf(file, "%s\n", text) > 0;
    if (file && fclose(file) != 0) written = false;
    cJSON_free(text);
    cJSON_Delete(line);
    if (written) return;
    error_set("%s cannot be written; give another --output", output);
    measure_exit();
}

/* --- Attention ------------------------------------------------------------------------------ */

enum { HEADS = 12, HEAD_SIZE = 64, FIRST_LENGTH = 256 };
enum { QKV, DO, O, LSE, DQKV, TENSORS };
enum { SETS_MAX = 8, REPEATS = 7 };

/* Fresh inputs must not be in the cache: together the sets exceed any GPU's L2 several times. */
#define ROTATED_BYTES ((size_t)512 << 20)

/* One problem with inputs and outputs for it, packed as in the model: (B,T,3,NH,HS). */
typedef struct {
    Device *device;
    Attention problem;
    size_t elements[TENSORS];
    size_t sets;
    void *memory[SETS_MAX][TENSORS], *workspace;
    AttentionTensors tensors[SETS_MAX];
    AttentionGradients gradients[SETS_MAX];
} Bench;

static DataType tensor_type(const Bench *bench, int tensor) {
    return tensor == LSE ? type_accumulator(bench->problem.type) : bench->problem.type;
}

static void *device_alloc_or_exit(Device *device, size_t bytes) {
    void *memory = device_alloc(device, bytes);
    if (!memory) measure_exit();
    return memory;
}

/* values[QKV] and values[DO] are the inputs of every set: for speed only addresses matter. */
static void bench_open(Bench *bench, Device *device, const Attention *problem, size_t sets,
                       float *const values[TENSORS]) {
    const size_t T = problem->TQ, NH = problem->NH, HS = problem->HS, n = problem->B * T * NH * HS;
    const Bench empty = {.device = device,
                         .problem = *problem,
                         .elements = {3 * n, n, n, n / HS, 3 * n},
                         .sets = sets};
    *bench = empty;
    const DataType type = problem->type;
    void *staging = measure_alloc(3 * n * type_bytes(type));
    for (size_t s = 0; s < sets; s++) {
        void **m = bench->memory[s];
        for (int i = 0; i < TENSORS; i++)
            m[i] = device_alloc_or_exit(device,
                                        bench->elements[i] * type_bytes(tensor_type(bench, i)));
        for (int i = QKV; i <= DO; i++) {
            type_from_float(type, staging, values[i], bench->elements[i]);
            device_upload(device, m[i], staging, bench->elements[i] * type_bytes(type));
        }
        bench->tensors[s] = (AttentionTensors){attention_packed_view(m[QKV], type, 0, T, NH, HS),
                                               attention_packed_view(m[QKV], type, 1, T, NH, HS),
                                               attention_packed_view(m[QKV], type, 2, T, NH, HS),
                                               attention_view(m[O], T, NH, HS), m[LSE]};
        bench->gradients[s] = (AttentionGradients){
            attention_view(m[DO], T, NH, HS), attention_packed_view(m[DQKV], type, 0, T, NH, HS),
            attention_packed_view(m[DQKV], type, 1, T, NH, HS),
            attention_packed_view(m[DQKV], type, 2, T, NH, HS)};
    }
    free(staging);
    size_t bytes = attention_forward_workspace(problem);
    if (attention_backward_workspace(problem) > bytes)
        bytes = attention_backward_workspace(problem);
    bench->workspace = device_alloc_or_exit(device, bytes);
}

static void bench_close(Bench *bench) {
    for (size_t s = 0; s < bench->sets; s++)
        for (int i = 0; i < TENSORS; i++) device_free(bench->device, bench->memory[s][i]);
    device_free(bench->device, bench->workspace);
}

typedef enum { FORWARD, BACKWARD } Pass;

static void launch(Bench *bench, Pass pass, size_t set) {
    const AttentionTensors *tensors = &bench->tensors[set];
    void *stream = bench->device->stream;
    const char *wrong = pass == FORWARD
                            ? attention_forward(&bench->problem, tensors, bench->workspace, stream)
                            : attention_backward(&bench->problem, tensors, &bench->gradients[set],
                                                 bench->workspace, stream);
    if (wrong) measure_exit();
}

/* Seconds of one pass when `launches` follow each other, over the sets in turn. */
static double time_launches(Bench *bench, Pass pass, size_t launches) {
    double start = log_seconds();
    for (size_t i = 0; i < launches; i++) launch(bench, pass, i % bench->sets);
    device_synchronize(bench->device);
    return (log_seconds() - start) / (double)launches;
}

/* The median of several repeats, each long enough that starting and waiting do not show. Fewer
 * repeats where one takes seconds. */
static double time_pass(Bench *bench, Pass pass) {
    for (size_t s = 0; s < bench->sets; s++) launch(bench, pass, s);
    device_synchronize(bench->device);
    double once = time_launches(bench, pass, bench->sets), seconds[REPEATS];
    size_t launches = (size_t)ceil(0.02 / (once + 1e-9)), n = 0;
    double begin = log_seconds();
    while (n < REPEATS && (n < 3 || log_seconds() - begin < 5))
        seconds[n++] = time_launches(bench, pass, launches);
    return measure_median(seconds, n);
}

/* results[i] = the first set's outputs as floats, to be freed. */
static void compute(Bench *bench, float *results[TENSORS]) {
    launch(bench, FORWARD, 0);
    launch(bench, BACKWARD, 0);
    for (int i = O; i < TENSORS; i++) {
        const DataType type = tensor_type(bench, i);
        const size_t n = bench->elements[i];
        void *staging = measure_alloc(n * type_bytes(type));
        device_download(bench->device, staging, bench->memory[0][i], n * type_bytes(type));
        results[i] = measure_alloc(n * sizeof(float));
        type_to_float(type, results[i], staging, n);
        free(staging);
    }
}

static void free_results(float *results[TENSORS]) {
    for (int i = O; i < TENSORS; i++) free(results[i]);
}

/* Against naive attention in fp32 on the same, already rounded inputs. fp32 sums of thousands lose
 * about two digits of 6e-8, and the GPU's exponentials a few bits more; in bf16 P, dS and the
 * results are rounded to 4e-3, which does not add up over a sum of random signs. */
static bool verify(Bench *bench, float *const expected[TENSORS]) {
    const char *const names[TENSORS] = {[O] = "o", [LSE] = "lse", [DQKV] = "dq, dk, dv"};
    const double tolerance = bench->problem.type == TYPE_BF16     ? 1e-2
                             : bench->device->type == DEVICE_CUDA ? 1e-4
                                                                  : 1e-5;
    bool pass = true;
    float *results[TENSORS];
    compute(bench, results);
    for (int i = O; i < TENSORS; i++) {
        double error = relative_error_float(results[i], expected[i], bench->elements[i]);
        if (error <= tolerance) continue;
        char name[64];
        snprintf(name, sizeof name, "%s T=%zu %s", attention_name(bench->problem.family),
                 bench->problem.TQ, names[i]);
        pass &= compare(name, error, tolerance);
    }
    free_results(results);
    return pass;
}

static void report_attention(const Bench *bench, double forward, double backward) {
    const Attention *p = &bench->problem;
    const double operations =
        4.0 * (double)p->B * (double)p->NH * (double)p->TQ * (double)p->TK * (double)p->HS / 2;
    const double forward_tflops = operations / forward / 1e12,
                 backward_tflops = 2.5 * operations / backward / 1e12;
    printf("%-10s %6zu %4zu %12.4f %8.3g %12.4f %8.3g\n", attention_name(p->family), p->TQ, p->B,
           1e3 * forward, forward_tflops, 1e3 * backward, backward_tflops);
    fflush(stdout);
    cJSON *line = result_begin("attention", bench->device, p->type);
    add_text(line, "attention", attention_name(p->family));
    add_text(line, "mask", "causal");
    add_count(line, "B", p->B);
    add_count(line, "NH", p->NH);
    add_count(line, "T", p->TQ);
    add_count(line, "HS", p->HS);
    add_figure(line, "forward_ms", 1e3 * forward);
    add_figure(line, "forward_tflops", forward_tflops);
    add_figure(line, "backward_ms", 1e3 * backward);
    add_figure(line, "backward_tflops", backward_tflops);
    result_end(line);
}

/* Every family at one length; the order of the table is that of attention.h. */
static bool bench_length(Device *device, DataType type, size_t B, size_t T) {
    Attention problem = {.device = device->type,
                         .type = type,
                         .B = B,
                         .NH = HEADS,
                         .TQ = T,
                         .TK = T,
                         .HS = HEAD_SIZE,
                         .mask = ATTENTION_CAUSAL};
    const size_t n = B * T * HEADS * HEAD_SIZE;
    const AttentionFamily asked = attention_by_name(attention_flag);
    float *values[TENSORS] = {
        [QKV] = measure_alloc(3 * n * sizeof(float)), [DO] = measure_alloc(n * sizeof(float))};
    void *rounded = measure_alloc(3 * n * type_bytes(type));
    for (int i = QKV; i <= DO; i++) {
        const size_t elements = i == QKV ? 3 * n : n;
        random_normal(values[i], elements, (uint64_t)i, 1);
        type_from_float(type, rounded, values[i], elements);
        type_to_float(type, values[i], rounded, elements);
    }
    free(rounded);

    Bench bench;
    Attention reference = problem;
    reference.type = TYPE_F32;
    reference.family = ATTENTION_NAIVE;
    bench_open(&bench, device, &reference, 1, values);
    compute(&bench, values);
    bench_close(&bench);

    bool good = true, any = false;
    size_t sets = 1 + ROTATED_BYTES / (8 * n * type_bytes(type));
    if (sets > SETS_MAX) sets = SETS_MAX;
    for (int family = ATTENTION_AUTO + 1; family < ATTENTION_FAMILIES; family++) {
        problem.family = (AttentionFamily)family;
        if (asked != ATTENTION_AUTO && asked != problem.family) continue;
        if (attention_choose(&problem) == ATTENTION_AUTO) continue;
        any = true;
        bench_open(&bench, device, &problem, device->type == DEVICE_CUDA ? sets : 1, values);
        if (verify(&bench, values)) {
            double forward = time_pass(&bench, FORWARD);
            report_attention(&bench, forward, time_pass(&bench, BACKWARD));
        } else
            good = false;
        bench_close(&bench);
    }
    free(values[QKV]);
    free(values[DO]);
    free_results(values);
    if (any) return good;
    measure_exit();
}

static bool bench_attention(Device *device, DataType type) {
    const bool cuda = device->type == DEVICE_CUDA;
    const size_t tokens = cuda ? 16384 : 2048;
    const size_t longest = max_length ? (size_t)max_length : cuda ? 4096 : 2048;
    bool good = true;
    printf("attention, causal, NH=%d HS=%d, about %zu tokens\n", HEADS, HEAD_SIZE, tokens);
    printf("%-10s %6s %4s %12s %8s %12s %8s\n", "", "T", "B", "forward ms", "TFLOP/s",
           "backward ms", "TFLOP/s");
    for (size_t T = FIRST_LENGTH; T <= longest; T *= 2)
        good &= bench_length(device, type, T < tokens ? tokens / T : 1, T);
    printf("\n");
    return good;
}

/* --- A training step ------------------------------------------------------------------------ */

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

enum { STEPS_MAX = 20, WARM_UP = 2 };

static bool bench_step(Device *device, DataType type) {
    const bool cuda = device->type == DEVICE_CUDA;
    GptConfig config;
    if (!gpt_preset(preset, &config)) measure_exit();
    config.embedding_dropout = config.residual_dropout = config.attention_dropout = 0;
    const size_t B = batch ? (size_t)batch : cuda ? 64 : 4;
    const size_t T = sequence ? (size_t)sequence : smaller(config.T, cuda ? 1024 : 64);
    if (T > config.T) config.T = T; /* the preset with a longer context */
    GptOptions options = {.B = B,
                          .T = T,
                          .type = type,
                          .use = GPT_TRAINING,
                          .attention = attention_by_name(attention_flag)};
    Gpt *model = gpt_create(&config, &options, device, NULL);
    if (!model) measure_exit();
    gpt_init(model, 1);
    int32_t *tokens = measure_tokens(B, T, config.V);

    double first_loss = 0, loss = 0, seconds[STEPS_MAX];
    uint64_t step = 0;
    while (step < WARM_UP) {
        measure_step(model, tokens, B, T, ++step, &loss);
        if (step == 1) first_loss = loss;
    }
    size_t n = 0;
    double begin = log_seconds();
    while (n < STEPS_MAX && (n < 3 || log_seconds() - begin < 5))
        seconds[n++] = measure_step(model, tokens, B, T, ++step, &loss);
    const double median = measure_median(seconds, n), speed = (double)(B * T) / median;
    const double peak = type == TYPE_BF16 ? log_peak_flops(device) : 0;
    const double mfu = peak > 0 ? gpt_flops_per_token(&config, T) * speed / peak : 0;
    const GptPlan *plan = gpt_planned(model);
    const char *attention = attention_name(gpt_attention(model));

    /* The same batch again and again: a step that trains lowers its loss. */
    bool good = loss < first_loss;
    char mfu_text[32] = "unknown";
    if (peak > 0) snprintf(mfu_text, sizeof mfu_text, "%.1f%%", 100 * mfu);
    printf("training step of %s, B=%zu T=%zu, %s, attention %s\n", preset, B, T, type_name(type),
           attention);
    printf(
        "%.2f ms  %.0f tokens/s  mfu %s  activations %.1f MiB of %.1f MiB  loss %.4f to %.4f in "
        "%llu steps%s\n\n",
        1e3 * median, speed, mfu_text, (double)plan->activations / 1048576,
        (double)plan->total / 1048576, first_loss, loss, (unsigned long long)step,
        good ? "" : "  FAILED: the loss does not fall");
    if (good) {
        cJSON *line = result_begin("step", device, type);
        add_text(line, "attention", attention);
        add_text(line, "preset", preset);
        add_count(line, "B", B);
        add_count(line, "T", T);
        add_figure(line, "ms", 1e3 * median);
        add_figure(line, "tokens_per_second", speed);
        if (peak > 0)
            add_figure(line, "mfu", mfu);
        else
            cJSON_AddNullToObject(line, "mfu");
        add_count(line, "activation_bytes", plan->activations);
        add_count(line, "planned_bytes", plan->total);
        result_end(line);
    }
    free(tokens);
    gpt_free(model);
    return good;
}

/* --- Sampling ------------------------------------------------------------------------------- */

enum { PROMPT = 16, DRAWS = 512, SAMPLE_SECONDS = 10 };

/* Draws until DRAWS tokens or the time are over; returns the seconds a token of each text, and the
 * tokens of the first. */
static double draw_tokens(GptDecoder *decoder, int32_t *drawn, size_t B, int32_t *text, size_t *n) {
    static const int32_t prompt[PROMPT];
    const size_t most = *n;
    gpt_decoder_start(decoder, prompt, PROMPT);
    for (int i = 0; i < 3; i++) gpt_decoder_next(decoder, drawn); /* to warm up, and to record */
    const double begin = log_seconds();
    for (*n = 0; *n < most && log_seconds() - begin < SAMPLE_SECONDS; ++*n) {
        gpt_decoder_next(decoder, drawn);
        text[*n] = drawn[0];
        for (size_t b = 0; b < B; b++)
            if (drawn[b] < 0) text[*n] = -1;
    }
    return (log_seconds() - begin) / (double)*n;
}

/* What reading so many bytes takes: the norm of that many floats. */
static double reading_seconds(Device *device, size_t bytes) {
    const Layers *layers = layers_get(device->type, TYPE_F32);
    float *values = device_alloc(device, bytes), *norm = device_alloc(device, sizeof *norm);
    double seconds[9];
    if (!values || !norm) measure_exit();
    device_zero(device, values, bytes);
    for (int i = 0; i < 9; i++) {
        device_synchronize(device);
        double begin = log_seconds();
        layers->grad_norm(norm, values, bytes / sizeof *values, device);
        device_synchronize(device);
        seconds[i] = log_seconds() - begin;
    }
    device_free(device, values);
    device_free(device, norm);
    return measure_median(seconds, 9);
}

static bool bench_sample(Device *device, DataType type) {
    GptConfig config;
    if (!gpt_preset(preset, &config)) measure_exit();
    const size_t B = batch ? (size_t)batch : 1;
    GptOptions options = {.B = 1, .T = config.T, .type = type, .use = GPT_INFERENCE};
    const Sampling sampling = {0.8f, 1, 200, 1};
    Gpt *model = gpt_create(&config, &options, device, NULL);
    if (!model) measure_exit();
    gpt_init(model, 1);
    GptDecoder *decoder = gpt_decoder_create(model, B, &sampling);
    if (!decoder) measure_exit();
    int32_t *drawn = measure_alloc(B * sizeof *drawn), text[2][DRAWS];
    size_t n = DRAWS;
    draw_tokens(decoder, drawn, B, text[0], &n);
    const double seconds = draw_tokens(decoder, drawn, B, text[1], &n);
    const double reading = reading_seconds(device, gpt_planned(model)->parameters);

    /* The same seed gives the same text, of numbers that are tokens. */
    bool good = memcmp(text[0], text[1], n * sizeof text[0][0]) == 0;
    for (size_t i = 0; i < n; i++) good &= text[1][i] >= 0;
    printf("sampling from %s, %zu at once, %s\n", preset, B, type_name(type));
    printf("%.3f ms a token of each  %.0f tokens/s  reading the weights alone %.3f ms%s\n\n",
           1e3 * seconds, (double)B / seconds, 1e3 * reading, good ? "" : "  FAILED");
    if (good) {
        cJSON *line = result_begin("sample", device, type);
        add_text(line, "preset", preset);
        add_count(line, "B", B);
        add_figure(line, "ms", 1e3 * seconds);
        add_figure(line, "tokens_per_second", (double)B / seconds);
        add_figure(line, "reading_ms", 1e3 * reading);
        result_end(line);
    }
    free(drawn);
    gpt_decoder_free(decoder);
    gpt_free(model);
    return good;
}

static bool wanted(const char *part) { return strcmp(what, "all") == 0 || strcmp(what, part) == 0; }

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        printf("bench: speed of attention, of a training step and of sampling\n\n");
        flags_print_help(flags, stdout);
        return 0;
    }
    if (!flags_parse(flags, argc - 1, argv + 1)) measure_exit();
    Device *device = measure_open(device_flag);
    if (!device) measure_exit();
    const DataType type = measure_type(device);
    printf("%s, %s\n\n", device->name, type_name(type));
    bool good = true;
    if (wanted("attention")) good &= bench_attention(device, type);
    if (wanted("step")) good &= bench_step(device, type);
    if (wanted("sample")) good &= bench_sample(device, type);
    printf(good ? "appended to %s\n" : "bench: a check failed; %s has the results that passed\n",
           output);
    device_close(device);
    return !good;
}
