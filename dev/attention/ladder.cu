/* Runs the rungs of the ladder: checks each against float64, then times it.
 *
 *   ladder forward                        every rung at T=4096, HS=128, causal
 *   ladder backward --rung=6 --HS=64 --causal=false
 *   ladder forward --time=false --T=113   only the check
 *
 * Operations are counted as in FlashAttention's papers: the forward is two matrix products,
 * 4·B·NH·T²·HS, of which causality needs half; the backward is five, 2.5 times the forward. What a
 * rung wastes does not count. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dev/attention/harness.cuh"
#include "runtime/flags.h"

static const Rung *const forward_rungs[] = {
    &forward_01, &forward_02, &forward_03, &forward_04, &forward_05, &forward_06,
    &forward_07, &forward_08, &forward_09, &forward_10, &forward_11};
static const Rung *const backward_rungs[] = {&backward_01, &backward_02, &backward_03, &backward_04,
                                             &backward_05, &backward_06, &backward_07};

static const char *rung_flag = "all", *head_size_flag = "128", *output = "", *commit_flag = "";
static int64_t T_flag = 4096, B_flag, NH_flag;
static bool causal_flag = true, time_flag = true;

static Flag flags[] = {
    {"rung", FLAG_STRING, &rung_flag, 0, 0, NULL, "number of the rung, or all", false},
    {"T", FLAG_INT, &T_flag, 1, 1 << 16, NULL, "sequence length", false},
    {"HS", FLAG_CHOICE, &head_size_flag, 0, 0, "64|128", "head size", false},
    {"B", FLAG_INT, &B_flag, 0, 1 << 20, NULL, "batch; 0: 16384 tokens in all", false},
    {"NH", FLAG_INT, &NH_flag, 0, 1 << 12, NULL, "heads; 0: 2048 / HS", false},
    {"causal", FLAG_BOOL, &causal_flag, 0, 0, NULL, "query i sees keys j <= i", false},
    {"time", FLAG_BOOL, &time_flag, 0, 0, NULL, "time the rungs that pass the check", false},
    {"output", FLAG_STRING, &output, 0, 0, NULL, "file to append a JSON line for each rung to",
     false},
    {"commit", FLAG_STRING, &commit_flag, 0, 0, NULL, "to record; default: what git says", false},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};

[[noreturn]] static void stop() {
    fprintf(stderr, "%s\n", error_message());
    exit(2);
}

/* --- The device ----------------------------------------------------------------------------- */

/* Whether the code that runs on this GPU has wgmma: it is there for sm_90a alone. */
__global__ void probe_kernel(int *has_wgmma) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    *has_wgmma = 1;
#else
    *has_wgmma = 0;
#endif
}

static struct {
    cudaDeviceProp properties;
    int has_wgmma;
    char driver[64], commit[64];
} device;

/* The first line that a command prints; "" if it prints none. */
static void first_line(const char *command, char *text, size_t bytes) {
    FILE *pipe = popen(command, "r");
    if (!pipe || !fgets(text, (int)bytes, pipe))
        text[0] = '\0';
    if (pipe)
        pclose(pipe);
    text[strcspn(text, "\n")] = '\0';
}

static void open_device() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        error_set("the ladder needs a GPU, and there is none that CUDA can use");
        stop();
    }
    CUDA_CHECK(cudaGetDeviceProperties(&device.properties, 0));
    int *result;
    CUDA_CHECK(cudaMalloc(&result, sizeof *result));
    probe_kernel<<<1, 1>>>(result);
    if (cudaGetLastError() != cudaSuccess) {
        error_set("this program has no code for %s (sm_%d%d); build it on this machine",
                  device.properties.name, device.properties.major, device.properties.minor);
        stop();
    }
    CUDA_CHECK(cudaMemcpy(&device.has_wgmma, result, sizeof *result, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(result));
    first_line("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null",
               device.driver, sizeof device.driver);
    if (commit_flag[0])
        snprintf(device.commit, sizeof device.commit, "%s", commit_flag);
    else
        first_line("git --no-optional-locks describe --always --dirty 2>/dev/null", device.commit,
                   sizeof device.commit);
}

/* NULL, or why the rung does not run here. */
static const char *refusal(const Rung *rung) {
    if (rung->needs == NEEDS_MMA && device.properties.major < 8)
        return "needs bf16 tensor cores and cp.async: sm_80 or newer";
    if (rung->needs == NEEDS_WGMMA && device.properties.major != 9)
        return "needs wgmma: a Hopper GPU (sm_90)";
    if (rung->needs == NEEDS_WGMMA && !device.has_wgmma)
        return "needs code for sm_90a, which this program lacks; build it on this machine";
    return NULL;
}

/* NULL with error_message() if there is no memory. */
static void *allocate(size_t bytes) {
    void *memory;
    if (cudaMalloc(&memory, bytes) == cudaSuccess)
        return memory;
    cudaGetLastError();
    size_t available, total;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    error_set("not enough memory: %.1f GiB wanted, %.1f free", (double)bytes / 0x1p30,
              (double)available / 0x1p30);
    return NULL;
}

static void *allocate_or_stop(size_t bytes) {
    void *memory = allocate(bytes);
    if (!memory)
        stop();
    return memory;
}

/* --- The problem ---------------------------------------------------------------------------- */

/* Inputs and outputs several times, so that a launch finds none of its inputs in the L2: together
 * they exceed any L2. */
enum { SETS_MAX = 8 };
#define ROTATED_BYTES ((size_t)512 << 20)

static struct {
    bool backward;
    int sets;
    Problem set[SETS_MAX];
    Reference reference;
} bench;

static void open_problem() {
    Problem p = {};
    p.T = (int)T_flag, p.HS = atoi(head_size_flag), p.causal = causal_flag;
    p.B = B_flag ? (int)B_flag : std::max(1, 16384 / p.T);
    p.NH = NH_flag ? (int)NH_flag : 2048 / p.HS;
    p.scale = 1 / sqrtf((float)p.HS), p.scale_log2 = p.scale * 1.44269504f;
    if ((size_t)p.B * p.NH > 65535) {
        error_set("B·NH is %zu, and must not exceed 65535", (size_t)p.B * p.NH);
        stop();
    }
    const size_t n = p.elements(), bytes = n * sizeof(bf16);
    const size_t set_bytes = (bench.backward ? 8 : 4) * bytes;
    bench.sets = !time_flag ? 1 : (int)std::min<size_t>(SETS_MAX, 1 + ROTATED_BYTES / set_bytes);
    for (int s = 0; s < bench.sets; s++) {
        bf16 *inputs[4]; /* q, k, v, do */
        for (int i = 0; i < 3 + bench.backward; i++) {
            inputs[i] = (bf16 *)allocate_or_stop(bytes);
            fill_normal(inputs[i], n, i);
        }
        p.q = inputs[0], p.k = inputs[1], p.v = inputs[2];
        p.o = (bf16 *)allocate_or_stop(bytes);
        p.lse = (float *)allocate_or_stop(p.rows() * sizeof(float));
        if (bench.backward) {
            p.dout = inputs[3];
            for (bf16 **x : {&p.dq, &p.dk, &p.dv})
                *x = (bf16 *)allocate_or_stop(bytes);
        }
        bench.set[s] = p;
    }
    bench.reference.lse = (double *)allocate_or_stop(p.rows() * sizeof(double));
    bench.reference.o = (double *)allocate_or_stop(n * sizeof(double));
    if (bench.backward)
        for (double **x : {&bench.reference.dq, &bench.reference.dk, &bench.reference.dv})
            *x = (double *)allocate_or_stop(n * sizeof(double));
    reference_compute(bench.set[0], bench.reference);
    for (int s = 1; s < bench.sets; s++) {
        CUDA_CHECK(cudaMemcpy(bench.set[s].o, bench.set[0].o, bytes, cudaMemcpyDeviceToDevice));
        CUDA_CHECK(cudaMemcpy(bench.set[s].lse, bench.set[0].lse, p.rows() * sizeof(float),
                              cudaMemcpyDeviceToDevice));
    }
}

/* What no rung may leave: bf16 and float NaNs. */
static void poison(void *memory, size_t bytes) { CUDA_CHECK(cudaMemset(memory, 0xFF, bytes)); }

/* bf16 has 8 bits: P, dS and the results are each wrong by 2^-9 of themselves at most, by 1e-3 or
 * so in the mean, and over a sum of random signs that does not add up. It holds for nearly every
 * row; but D is computed from a rounded O, and where dS is far smaller than D, as where one key has
 * all the weight, a row of dQ may be wrong by a few percent of a usual one. A row made of wrong
 * elements is wrong by a fourth at least. LSE is float. */
static const double tolerance = 5e-3, row_tolerance = 0.1, lse_tolerance = 1e-4;

/* *error = that of the worst output. */
static bool check(const Rung *rung, cudaStream_t stream, double *error) {
    const Problem &p = bench.set[0];
    const size_t bytes = p.elements() * sizeof(bf16);
    for (bf16 *x : {bench.backward ? p.dq : p.o, p.dk, p.dv})
        if (x)
            poison(x, bytes);
    if (!bench.backward)
        poison(p.lse, p.rows() * sizeof(float));
    rung->run(p, stream);
    rung->run(p, stream); /* twice: what the first leaves behind must not show */
    CUDA_CHECK(cudaStreamSynchronize(stream));

    const Reference &r = bench.reference;
    bool good = true;
    *error = 0;
    auto compare = [&](const char *name, Error found, double allowed, double row_allowed) {
        *error = std::max(*error, found.all);
        if (found.all <= allowed && found.row <= row_allowed) /* false for NaN */
            return;
        good = false;
        printf("%-24s %s is wrong: error %.2e (at most %.0e), of a row %.2e (%.0e)  FAILED\n",
               rung->name, name, found.all, allowed, found.row, row_allowed);
    };
    auto compare_rows = [&](const char *name, const bf16 *x, const double *y) {
        compare(name, reference_error(x, y, p.rows(), p.HS), tolerance, row_tolerance);
    };
    if (bench.backward) {
        compare_rows("dQ", p.dq, r.dq);
        compare_rows("dK", p.dk, r.dk);
        compare_rows("dV", p.dv, r.dv);
    } else {
        compare_rows("O", p.o, r.o);
        compare("LSE", reference_error(p.lse, r.lse, p.rows(), 1), lse_tolerance, lse_tolerance);
    }
    return good;
}

static void append(const Rung *rung, double milliseconds, double tflops, double ceiling,
                   double error) {
    const Problem &p = bench.set[0];
    FILE *file = fopen(output, "a");
    if (!file || fprintf(file,
                         "{\"what\":\"ladder\",\"pass\":\"%s\",\"rung\":\"%s\",\"commit\":\"%s\","
                         "\"device\":\"%s\",\"driver\":\"%s\",\"mask\":\"%s\",\"B\":%d,\"NH\":%d,"
                         "\"T\":%d,\"HS\":%d,\"ms\":%.5g,\"tflops\":%.5g,\"ceiling_tflops\":%.5g,"
                         "\"error\":%.3g}\n",
                         bench.backward ? "backward" : "forward", rung->name, device.commit,
                         device.properties.name, device.driver, p.causal ? "causal" : "full", p.B,
                         p.NH, p.T, p.HS, milliseconds, tflops, ceiling, error) < 0 ||
        fclose(file) != 0) {
        error_set("%s cannot be written; give another --output", output);
        stop();
    }
}

/* False if a check fails. */
static bool climb(const Rung *rung, cudaStream_t stream, double ceiling) {
    const char *why = refusal(rung);
    const size_t bytes = rung->workspace ? rung->workspace(bench.set[0]) : 0;
    void *workspace = NULL;
    if (!why && bytes > 0 && !(workspace = allocate(bytes)))
        why = error_message();
    if (why) {
        printf("%-24s skipped: %s\n", rung->name, why);
        return true;
    }
    for (int s = 0; s < bench.sets; s++)
        bench.set[s].workspace = workspace;
    if (workspace)
        poison(workspace, bytes);
    if (rung->prepare)
        rung->prepare(bench.set[0], stream);
    double error;
    const bool good = check(rung, stream, &error);
    if (good && !time_flag)
        printf("%-24s %38s %9.1e\n", rung->name, "", error);
    if (good && time_flag) {
        const Problem &p = bench.set[0];
        const double seconds = median_seconds(stream, bench.sets, [&](int s) {
            rung->run(bench.set[s], stream);
        });
        const double operations = 4.0 * (double)p.scores() * p.HS / (p.causal ? 2 : 1) *
                                  (bench.backward ? 2.5 : 1);
        const double tflops = operations / seconds / 1e12;
        printf("%-24s %12.4f %12.4g %11.1f%% %9.1e\n", rung->name, 1e3 * seconds, tflops,
               100 * tflops / ceiling, error);
        if (output[0])
            append(rung, 1e3 * seconds, tflops, ceiling, error);
    }
    fflush(stdout);
    CUDA_CHECK(cudaFree(workspace));
    return good;
}

int main(int argc, char **argv) {
    const bool forward = argc > 1 && strcmp(argv[1], "forward") == 0;
    bench.backward = argc > 1 && strcmp(argv[1], "backward") == 0;
    if (!forward && !bench.backward) {
        printf("ladder forward|backward: checks and times the rungs of dev/attention\n\n");
        flags_print_help(flags, stdout);
        return argc > 1 && strcmp(argv[1], "--help") == 0 ? 0 : 2;
    }
    if (!flags_parse(flags, argc - 2, argv + 2))
        stop();
    const Rung *const *rungs = forward ? forward_rungs : backward_rungs;
    const int count = forward ? (int)(sizeof forward_rungs / sizeof *forward_rungs)
                              : (int)(sizeof backward_rungs / sizeof *backward_rungs);
    const bool all = strcmp(rung_flag, "all") == 0;
    const int only = atoi(rung_flag);
    if (!all && (only < 1 || only > count)) {
        error_set("--rung is \"%s\"; %s has rungs 1 to %d, or all", rung_flag, argv[1], count);
        stop();
    }

    open_device();
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    open_problem();
    const Problem &p = bench.set[0];
    printf("%s, bf16, %s, B=%d NH=%d T=%d HS=%d, %s\n", device.properties.name, argv[1], p.B, p.NH,
           p.T, p.HS, p.causal ? "causal" : "full");
    double ceiling = 0;
    if (time_flag) {
        ceiling = measure_ceiling(stream);
        printf("a matrix product of 8192³ by cuBLASLt: %.4g TFLOP/s, the ceiling\n", ceiling);
    }
    printf("\n%-24s %12s %12s %12s %9s\n", "", "ms", "TFLOP/s", "of ceiling", "error");
    bool good = true;
    for (int i = 0; i < count; i++)
        if (all || i == only - 1)
            good &= climb(rungs[i], stream, ceiling);
    return !good;
}
