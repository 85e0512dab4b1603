/* Memory and time of a training step at T = 512, 1k, 2k, … with naive and with flash attention.
 *
 * Naive attention writes the scores, 2·B·NH·T² of them in the backward; flash attention keeps O and
 * LSE, NH + C numbers a token. So one runs out of memory and the other, in practice, only of time.
 * Each case holds what gpt_plan promises against what the system says was taken:
 *
 *   GPU   the least free memory during the case, against the free memory before it. Other programs
 *         on the same GPU would be counted too
 *   CPU   the peak of resident memory (VmHWM), against resident memory before. Cases grow, so the
 *         peak so far is this case's
 *
 * A family runs in a process of its own: it starts from clean memory, and the table goes on if the
 * system kills it. */
#include <malloc.h>
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dev/measure.h"
#include "runtime/flags.h"

#define MIB 1048576.0
#define FIRST_LENGTH 512
#define STEPS_MAX 5
#define FAMILIES_MAX 8

/* The agreement asked for, of cases large enough that what the process itself takes is below it. */
#define AGREEMENT 0.02
#define SMALL_PLAN ((size_t)64 << 20)

/* Heads of 32 channels, the narrowest that tensor cores take whole: the scores that naive stores
 * cost flash the least arithmetic. With 12 heads naive ends at T = 32k on a 139 GiB GPU whether it
 * stores a score in 2 or in 4 bytes; 16 times that is 1.5e15 operations a step, 15 s at 100
 * TFLOP/s. */
static int64_t layers = 2, heads = 12, width = 384, vocabulary = 256, max_length = (int64_t)1 << 24;
static double max_seconds;
static const char *device_flag = "auto", *families_flag = "naive,auto",
                  *output = "dev/results/memory.csv";

static Flag flags[] = {
    {"device", FLAG_CHOICE, &device_flag, 0, 0, "auto|cpu|cuda", "where to compute", false},
    {"layers", FLAG_INT, &layers, 1, 4096, NULL, "layers (L)", false},
    {"heads", FLAG_INT, &heads, 1, 4096, NULL, "heads (NH)", false},
    {"width", FLAG_INT, &width, 1, 1 << 20, NULL, "channels (C)", false},
    {"vocabulary", FLAG_INT, &vocabulary, 2, 1 << 24, NULL, "words (V)", false},
    {"max-length", FLAG_INT, &max_length, FIRST_LENGTH, 1 << 24, NULL, "longest T", false},
    {"max-seconds", FLAG_FLOAT, &max_seconds, 0, 1e6, NULL,
     "longest step; 0: 20 on a GPU, 10 on the CPU", false},
    {"families", FLAG_STRING, &families_flag, 0, 0, NULL,
     "of attention, separated by commas; auto: the one that the trainer takes", false},
    {"output", FLAG_STRING, &output, 0, 0, NULL, "the table as CSV", false},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};

typedef enum { TRAINED, OUT_OF_MEMORY, TOO_SLOW, REFUSED } Outcome;
static const char *const outcome_names[] = {"trained", "out_of_memory", "too_slow", "refused"};

/* One row, as a family's process sends it. */
typedef struct {
    Outcome outcome;
    AttentionFamily family;
    size_t T;
    GptPlan plan;
    size_t measured; /* bytes */
    double seconds, loss;
    DataType type;
    char device[128];
    size_t device_bytes;
    char message[1024]; /* why it did not train */
} Case;
_Static_assert(sizeof(Case) <= 4096, "a pipe passes on at most PIPE_BUF bytes whole");

/* --- One family, in its process ------------------------------------------------------------- */

static size_t resident(const char *field) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    size_t kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0 &&
            sscanf(line + strlen(field), ": %zu kB", &kib) == 1)
            break;
    if (file) fclose(file);
    return kib * 1024;
}

typedef enum { NOW, PEAK } When;

/* On a GPU nothing is freed before the model is, so the peak is now. */
static size_t memory_used(Device *device, When when) {
    if (device->type == DEVICE_CPU) return resident(when == PEAK ? "VmHWM" : "VmRSS");
    size_t available, total;
    device_memory(device, &available, &total);
    return total - available;
}

/* Trains the case's model from nothing to nothing and measures it. The first step counts for time
 * only when it is too slow to be repeated. False with error_message() if there is no memory. */
static bool train(Device *device, const GptConfig *config, const GptOptions *options, Case *c) {
    device_free(device, device->scratch);
    device->scratch = NULL;
    device->scratch_bytes = 0;
    malloc_trim(0); /* what the C library keeps of freed memory is resident too */
    const size_t before = memory_used(device, NOW);
    Gpt *model = gpt_create(config, options, device, NULL);
    if (!model) return false;
    gpt_init(model, 1);
    malloc_trim(0);
    /* Memory that was never touched is not resident, and touching it takes time. */
    device_zero(device, device->scratch, device->scratch_bytes);
    device_synchronize(device);

    int32_t *tokens = measure_tokens(1, c->T, config->V);
    double ignored, seconds[STEPS_MAX] = {measure_step(model, tokens, 1, c->T, 1, &c->loss)};
    double spent = seconds[0], slowest = seconds[0];
    size_t n = 0;
    while (n < STEPS_MAX && spent + slowest <= max_seconds / 2) {
        seconds[n] = measure_step(model, tokens, 1, c->T, n + 2, &ignored);
        spent += seconds[n++];
    }
    c->seconds = measure_median(seconds, n ? n : 1);
    c->measured = memory_used(device, PEAK) - before;
    free(tokens);
    gpt_free(model);
    return true;
}

/* Fills in the row of this T. last is the step's time at T/2, 0 if unknown. */
static void run_case(Device *device, AttentionFamily family, double last, Case *c) {
    const GptConfig config = {.L = (size_t)layers,
                              .NH = (size_t)heads,
                              .C = (size_t)width,
                              .T = c->T,
                              .V = (size_t)vocabulary,
                              .layernorm_eps = 1e-5f};
    const GptOptions options = {
        .B = 1, .T = c->T, .type = c->type, .use = GPT_TRAINING, .attention = family};
    c->outcome = REFUSED;
    if (gpt_plan(&config, &options, device, &c->plan)) {
        /* Kernels and libraries take memory at their first use. So the first case, and those small
         * enough for it to show, run once before. */
        bool warm_up = last == 0 || c->plan.total < (size_t)1 << 30;
        c->outcome = OUT_OF_MEMORY;
        if (4 * last > max_seconds) {
            c->outcome = TOO_SLOW;
            error_set(
                "the next step would take about %.0f s, four times the last; --max-seconds=%g",
                4 * last, max_seconds);
        } else if ((!warm_up || train(device, &config, &options, c)) &&
                   train(device, &config, &options, c)) {
            c->outcome = TRAINED;
            return;
        }
    }
    snprintf(c->message, sizeof c->message, "%s", error_message());
}

static void send_case(int pipe, const Case *c) {
    if (write(pipe, c, sizeof *c) != (ssize_t)sizeof *c)
        error_fatal(__FILE__, __LINE__, "the pipe to the parent process broke");
}

static void run_family(AttentionFamily asked, int pipe) {
    Case c = {.outcome = REFUSED, .family = asked, .T = FIRST_LENGTH};
    Device *device = measure_open(device_flag);
    if (!device) {
        snprintf(c.message, sizeof c.message, "%s", error_message());
        send_case(pipe, &c);
        return;
    }
    if (max_seconds == 0) max_seconds = device->type == DEVICE_CUDA ? 20 : 10;
    size_t available;
    device_memory(device, &available, &c.device_bytes);
    memcpy(c.device, device->name, sizeof c.device);
    c.type = measure_type(device);

    const Attention problem = {.device = device->type,
                               .type = c.type,
                               .B = 1,
                               .NH = (size_t)heads,
                               .TQ = FIRST_LENGTH,
                               .TK = FIRST_LENGTH,
                               .HS = (size_t)(width / heads),
                               .mask = ATTENTION_CAUSAL,
                               .family = asked};
    AttentionFamily runs = attention_choose(&problem);
    if (runs != ATTENTION_AUTO) c.family = runs;
    double last = 0;
    for (; c.T <= (size_t)max_length; c.T *= 2) {
        run_case(device, asked, last, &c);
        send_case(pipe, &c);
        if (c.outcome != TRAINED) break;
        last = c.seconds;
    }
    device_close(device);
}

/* --- The table ------------------------------------------------------------------------------ */

static double difference(const Case *c) {
    return ((double)c->measured - (double)c->plan.total) / (double)c->plan.total;
}

/* Whether the case took what its plan says. */
static bool agrees(const Case *c) {
    return c->plan.total <= SMALL_PLAN || fabs(difference(c)) <= AGREEMENT;
}

static void print_head(const Case *c) {
    printf("One training step on %s (%.1f GiB), %s: L=%lld NH=%lld C=%lld V=%lld B=1\n\n",
           c->device, (double)c->device_bytes / (1024 * MIB), type_name(c->type), (long long)layers,
           (long long)heads, (long long)width, (long long)vocabulary);
    printf("                        MiB: peak, planned and measured\n");
    printf("%-10s %8s %13s %10s %10s %8s %10s %10s\n", "attention", "T", "attention MiB", "planned",
           "measured", "off", "ms/step", "tokens/s");
}

static void print_case(const Case *c) {
    const char *note = "";
    if (!agrees(c))
        note = "  DISAGREES";
    else if (fabs(difference(c)) > AGREEMENT)
        note = "  process overhead";
    printf("%-10s %8zu %13.1f %10.1f %10.1f %+7.2f%% %10.2f %10.0f%s\n", attention_name(c->family),
           c->T, (double)c->plan.attention / MIB, (double)c->plan.total / MIB,
           (double)c->measured / MIB, 100 * difference(c), 1e3 * c->seconds,
           (double)c->T / c->seconds, note);
}

/* Why a family went no further: the library's message, which may be a table, under the row. */
static void print_end(const Case *c) {
    static const char *const words[] = {"", "out of memory", "too slow", "refused"};
    printf("%-10s %8zu %13.1f %10.1f %10s\n", attention_name(c->family), c->T,
           (double)c->plan.attention / MIB, (double)c->plan.total / MIB, words[c->outcome]);
    for (const char *line = c->message; *line; line += strcspn(line, "\n"), line += *line == '\n')
        printf("           | %.*s\n", (int)strcspn(line, "\n"), line);
}

static const char csv_head[] =
    "device,device_bytes,type,layers,heads,width,vocabulary,attention,T,outcome,attention_bytes,"
    "planned_bytes,measured_bytes,ms,tokens_per_second,loss\n";

/* The columns after planned_bytes are empty in a row that did not train. */
static void write_case(FILE *csv, const Case *c) {
    fprintf(csv, "\"%s\",%zu,%s,%lld,%lld,%lld,%lld,%s,%zu,%s,%zu,%zu,", c->device, c->device_bytes,
            type_name(c->type), (long long)layers, (long long)heads, (long long)width,
            (long long)vocabulary, attention_name(c->family), c->T, outcome_names[c->outcome],
            c->plan.attention, c->plan.total);
    if (c->outcome == TRAINED)
        fprintf(csv, "%zu,%.4f,%.1f,%.5f\n", c->measured, 1e3 * c->seconds,
                (double)c->T / c->seconds, c->loss);
    else
        fprintf(csv, ",,,\n");
    fflush(csv);
}

typedef struct {
    AttentionFamily family;
    size_t longest; /* T */
    bool good;
} Summary;

/* Runs one family in a process of its own and prints its rows as they come. */
static Summary report_family(AttentionFamily asked, bool head, FILE *csv) {
    int ends[2];
    fflush(NULL);
    if (pipe(ends) != 0) error_fatal(__FILE__, __LINE__, "pipe failed");
    pid_t child = fork();
    if (child < 0) error_fatal(__FILE__, __LINE__, "fork failed");
    if (child == 0) {
        close(ends[0]);
        run_family(asked, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    Summary summary = {asked, 0, true};
    Case c;
    while (read(ends[0], &c, sizeof c) == (ssize_t)sizeof c) {
        if (c.outcome == REFUSED && summary.longest == 0) {
            error_set("%s", c.message);
            measure_exit();
        }
        if (head) print_head(&c);
        head = false;
        write_case(csv, &c);
        if (c.outcome != TRAINED) {
            print_end(&c);
            continue;
        }
        print_case(&c);
        fflush(stdout);
        summary.family = c.family;
        summary.longest = c.T;
        summary.good = summary.good && agrees(&c) && isfinite(c.loss);
        if (!isfinite(c.loss)) printf("%10s the loss is %g\n", "", c.loss);
    }
    close(ends[0]);
    int status;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status))
        printf("%-10s died of signal %d after T=%zu; 9 is the system short of memory\n",
               attention_name(summary.family), WTERMSIG(status), summary.longest);
    else
        summary.good = summary.good && WEXITSTATUS(status) == 0;
    printf("\n");
    return summary;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        printf("memory: memory and time of a training step at growing T\n\n");
        flags_print_help(flags, stdout);
        return 0;
    }
    if (!flags_parse(flags, argc - 1, argv + 1)) measure_exit();
    FILE *csv = fopen(output, "w");
    if (!csv) {
        error_set("%s cannot be written; give another --output", output);
        measure_exit();
    }
    fputs(csv_head, csv);

    Summary families[FAMILIES_MAX];
    size_t n = 0;
    bool good = true;
    char names[256];
    snprintf(names, sizeof names, "%s", families_flag);
    for (char *name = strtok(names, ","); name && n < FAMILIES_MAX; name = strtok(NULL, ",")) {
        AttentionFamily asked = attention_by_name(name);
        if (asked == ATTENTION_FAMILIES) {
            error_set("--families: there is no attention family \"%s\"", name);
            measure_exit();
        }
        families[n] = report_family(asked, n == 0, csv);
        good = good && families[n++].good;
    }
    for (size_t i = 0; i < n; i++) {
        printf("longest T with %-10s %8zu", attention_name(families[i].family),
               families[i].longest);
        if (i > 0 && families[0].longest > 0)
            printf("  %g times %s's", (double)families[i].longest / (double)families[0].longest,
                   attention_name(families[0].family));
        printf("\n");
    }
    if (!good) printf("memory: a case is off by more than %g%%, or failed\n", 100 * AGREEMENT);
    if (fclose(csv) != 0) {
        error_set("%s could not be written", output);
        measure_exit();
    }
    printf("written to %s\n", output);
    return !good;
}
