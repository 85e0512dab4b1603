/* Memory and operations of attention: what is commonly said, what the equations say (io_model.h),
 * and what the kernels take of a GPU (launches.h).
 *
 *   io_report                          the report, on any machine; kernels where there is a GPU
 *   io_report --run=naive,flash_mma    only one forward and one backward of each: what io_report.py
 *                                      measures with ncu
 *
 * KiB and MiB are powers of two, MB is 10⁶ bytes. */
#include <math.h>

#include "dev/attention/io_model.h"
#include "dev/attention/launches.h"
#include "dev/attention/paragraph.h"
#include "dev/measure.h"
#include "runtime/convert.h"
#include "runtime/flags.h"
#ifdef TILEGPT_CUDA
#include <cuda_profiler_api.h>
#endif

#define KIB 1024.0
#define MB 1e6
#define TOKENS 16384 /* of all sequences together, unless --batch says otherwise */
#define WIDTH 2048   /* of all heads together, unless --heads says otherwise */

static int64_t length = 4096, head_size = 128, rows = 128, columns = 128, batch, heads;
static const char *mask_flag = "full", *type_flag = "bf16", *device_flag = "auto", *run_flag = "";

static Flag flags[] = {
    {"length", FLAG_INT, &length, 1, 1 << 24, NULL, "queries and keys of a sequence (T)", false},
    {"head-size", FLAG_INT, &head_size, 1, 256, NULL, "channels of a head (HS, the papers' d)",
     false},
    {"rows", FLAG_INT, &rows, 1, 1 << 16, NULL, "queries of a tile (Br)", false},
    {"columns", FLAG_INT, &columns, 1, 1 << 16, NULL, "keys of a tile (Bc)", false},
    {"mask", FLAG_CHOICE, &mask_flag, 0, 0, "full|causal", "the mask", false},
    {"type", FLAG_CHOICE, &type_flag, 0, 0, "bf16|fp32", "of Q, K, V, O", false},
    {"batch", FLAG_INT, &batch, 0, 1 << 24, NULL, "sequences (B); 0: 16384 tokens in all", false},
    {"heads", FLAG_INT, &heads, 0, 1 << 16, NULL, "heads (NH); 0: 2048 channels in all", false},
    {"device", FLAG_CHOICE, &device_flag, 0, 0, "auto|cpu|cuda", "whose kernels are shown", false},
    {"run", FLAG_STRING, &run_flag, 0, 0, NULL, "families: only run each pass of them, once",
     false},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};

static IoShape shape; /* one head */
static double all_heads;

#ifdef TILEGPT_CUDA
/* --- running a pass ------------------------------------------------------------------------- */

enum { Q, K, V, DO, INPUTS, O = INPUTS, DQ, DK, DV, LSE, TENSORS };

/* One problem with tensors (B,T,NH,HS) and a workspace for both passes. */
typedef struct {
    Device *device;
    Attention problem;
    void *memory[TENSORS], *workspace;
    AttentionTensors tensors;
    AttentionGradients gradients;
    bool backward;
} Pass;

static Attention describe(const Device *device) {
    const bool fp32 = strcmp(type_flag, "fp32") == 0 || device->type == DEVICE_CPU;
    return (Attention){.device = device->type,
                       .type = fp32 ? TYPE_F32 : TYPE_BF16,
                       .B = (size_t)batch,
                       .NH = (size_t)heads,
                       .TQ = shape.T,
                       .TK = shape.T,
                       .HS = shape.HS,
                       .mask = shape.mask};
}

static void *allocate(Device *device, size_t bytes) {
    void *memory = device_alloc(device, bytes);
    if (!memory) measure_exit();
    return memory;
}

static void pass_open(Pass *pass, Device *device, const Attention *problem) {
    enum { PIECE = 1 << 20 };
    const Pass empty = {.device = device, .problem = *problem};
    *pass = empty;
    const size_t n = problem->B * problem->NH * problem->TQ * problem->HS;
    const size_t element = type_bytes(problem->type);
    for (int i = 0; i < LSE; i++) pass->memory[i] = allocate(device, n * element);
    pass->memory[LSE] = allocate(device, n / problem->HS * sizeof(float));
    const size_t forward = attention_forward_workspace(problem);
    const size_t backward = attention_backward_workspace(problem);
    pass->workspace = allocate(device, forward > backward ? forward : backward);

    /* Traffic does not depend on the numbers: a million of them are repeated. */
    float *values = measure_alloc(PIECE * sizeof *values);
    void *stored = measure_alloc(PIECE * element);
    for (int i = 0; i < INPUTS; i++) {
        random_normal(values, PIECE, (uint64_t)i, 1);
        type_from_float(problem->type, stored, values, PIECE);
        for (size_t first = 0; first < n; first += PIECE)
            device_upload(device, (char *)pass->memory[i] + first * element, stored,
                          io_smaller(PIECE, n - first) * element);
    }
    free(values);
    free(stored);

    void **m = pass->memory;
    AttentionView view[TENSORS];
    for (int i = 0; i < LSE; i++)
        view[i] = attention_view(m[i], problem->TQ, problem->NH, problem->HS);
    pass->tensors = (AttentionTensors){view[Q], view[K], view[V], view[O], m[LSE]};
    pass->gradients = (AttentionGradients){view[DO], view[DQ], view[DK], view[DV]};
}

static void pass_close(Pass *pass) {
    for (int i = 0; i < TENSORS; i++) device_free(pass->device, pass->memory[i]);
    device_free(pass->device, pass->workspace);
}

static const char *pass_launch(void *argument, void *stream) {
    Pass *pass = argument;
    return pass->backward
               ? attention_backward(&pass->problem, &pass->tensors, &pass->gradients,
                                    pass->workspace, stream)
               : attention_forward(&pass->problem, &pass->tensors, pass->workspace, stream);
}

/* --- the kernels of a family ---------------------------------------------------------------- */

enum { LAUNCHES_MAX = 32 };

/* Queries, or keys, that a block keeps; 0 if the grid does not say: the blocks of a persistent
 * kernel are as many as fit the GPU, and take tile after tile. */
static size_t rows_of_block(const Launch *l, const Device *device) {
    const size_t sequences = (size_t)(batch * heads);
    if (l->blocks <= (unsigned)(device->processors * l->resident) || l->blocks % sequences != 0)
        return 0;
    const size_t tiles = l->blocks / sequences;
    return (shape.T + tiles - 1) / tiles;
}

static void print_launches(Pass *pass, const char *family) {
    Launch launches[LAUNCHES_MAX];
    const size_t n = launches_of(pass_launch, pass, launches, LAUNCHES_MAX);
    for (size_t i = 0; i < n && i < LAUNCHES_MAX; i++) {
        const Launch *l = &launches[i];
        printf("%-12s %-8s %-32.32s", family, pass->backward ? "backward" : "forward", l->name);
        if (!l->known) {
            printf("\n");
            continue;
        }
        const size_t kept = rows_of_block(l, pass->device);
        char kept_text[24] = "-";
        if (kept) snprintf(kept_text, sizeof kept_text, "%zu", kept);
        printf(" %8u %5s %7u %9.1f %9.1f %5d %6zu %6d\n", l->blocks * l->blocks_y, kept_text,
               l->threads, (double)l->static_shared / KIB, (double)l->dynamic_shared / KIB,
               l->registers, l->local, l->resident);
    }
}

static void print_kernels(Device *device) {
    int shared, processor_shared, registers, cache;
    CUDA_CHECK(
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device->ordinal));
    CUDA_CHECK(cudaDeviceGetAttribute(
        &processor_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device->ordinal));
    CUDA_CHECK(cudaDeviceGetAttribute(&registers, cudaDevAttrMaxRegistersPerMultiprocessor,
                                          device->ordinal));
    CUDA_CHECK(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device->ordinal));
    printf(
        "\nThe kernels on %s: shared memory %.0f KiB a block, %.0f KiB a multiprocessor;\n"
        "registers %.0f KiB a multiprocessor; L2 %.1f MB. B=%lld NH=%lld.\n\n",
        device->name, shared / KIB, processor_shared / KIB, registers * 4 / KIB, cache / MB,
        (long long)batch, (long long)heads);
    printf("%-12s %-8s %-32s %8s %5s %7s %9s %9s %5s %6s %6s\n", "family", "pass", "kernel",
           "blocks", "rows", "threads", "static", "dynamic", "regs", "local", "blocks");
    printf("%-54s %8s %5s %7s %9s %9s %5s %6s %6s\n", "", "", "kept", "", "KiB", "KiB", "", "bytes",
           "a SM");
    for (int f = ATTENTION_NAIVE + 1; f < ATTENTION_FAMILIES; f++) {
        Attention problem = describe(device);
        problem.family = (AttentionFamily)f;
        if (attention_choose(&problem) == ATTENTION_AUTO) continue;
        Pass pass;
        pass_open(&pass, device, &problem);
        for (int backward = 0; backward < 2; backward++) {
            pass.backward = backward;
            print_launches(&pass, attention_name(problem.family));
        }
        pass_close(&pass);
    }
    printf("\nrows kept: queries, or keys in a kernel of dK and dV; -: the grid does not tell\n");
}

/* --- one pass, for ncu ---------------------------------------------------------------------- */

/* With the tiles that the grids tell of, else the given ones. The kernels that count are those with
 * tiles, in more than a little shared memory; of two, the first keeps keys, for dK and dV, and the
 * second queries. */
static double algorithm_bytes(const Pass *pass, const Launch *launches, size_t n) {
    enum { SCRATCH_BYTES = 16 << 10 };
    IoShape s = shape;
    if (pass->problem.family == ATTENTION_NAIVE)
        return pass->backward ? io_backward_naive_here(&s) : io_forward_naive_here(&s);
    size_t kernels = 0, kept[LAUNCHES_MAX];
    for (size_t i = 0; i < n && i < LAUNCHES_MAX; i++)
        if (launches[i].static_shared + launches[i].dynamic_shared > SCRATCH_BYTES)
            kept[kernels++] = rows_of_block(&launches[i], pass->device);
    size_t *const tile[2] = {pass->backward ? &s.Bc : &s.Br, &s.Br};
    for (size_t i = 0; i < kernels && i < 2; i++)
        if (kept[i]) *tile[i] = kept[i];
    if (!pass->backward) return io_forward_tiled(&s);
    return kernels > 1 ? io_backward_two_kernels(&s) : io_backward_2023(&s);
}

/* Runs the pass between the marks that `ncu --profile-from-start off` waits for. Prints one line of
 * name=value: the kernels of this line are that many of those that ncu saw, in this order. */
static void measure_pass(Pass *pass) {
    Launch launches[LAUNCHES_MAX];
    const size_t n = launches_of(pass_launch, pass, launches, LAUNCHES_MAX);
    const double minimum =
        pass->backward ? io_backward_minimum(&shape) : io_forward_minimum(&shape);
    printf(
        "family=%s pass=%s kernels=%zu minimum_bytes=%.0f algorithm_bytes=%.0f operations=%.0f\n",
        attention_name(pass->problem.family), pass->backward ? "backward" : "forward", n,
        all_heads * minimum, all_heads * algorithm_bytes(pass, launches, n),
        all_heads * io_product_operations(&shape) * (pass->backward ? 5 : 2));
    device_synchronize(pass->device);
    CUDA_CHECK(cudaProfilerStart());
    if (pass_launch(pass, pass->device->stream)) measure_exit();
    device_synchronize(pass->device);
    CUDA_CHECK(cudaProfilerStop());
}

static void run_families(Device *device) {
    char names[256];
    snprintf(names, sizeof names, "%s", run_flag);
    printf("B=%lld NH=%lld type=%s device=%s\n", (long long)batch, (long long)heads,
           type_name(describe(device).type), device->name);
    for (char *name = strtok(names, ","); name; name = strtok(NULL, ",")) {
        Attention problem = describe(device);
        problem.family = attention_by_name(name);
        if (problem.family == ATTENTION_FAMILIES)
            error_set("--run: there is no attention family \"%s\"", name);
        else
            problem.family = attention_choose(&problem);
        if (problem.family == ATTENTION_AUTO || problem.family == ATTENTION_FAMILIES) {
            printf("family=%s refused=%s\n", name, error_message());
            continue;
        }
        Pass pass;
        pass_open(&pass, device, &problem);
        measure_pass(&pass);
        pass.backward = true;
        measure_pass(&pass);
        pass_close(&pass);
    }
}
#endif

/* --- tables --------------------------------------------------------------------------------- */

/* Shared memory that a block can be granted, in KiB (CUDA C++ Programming Guide, table of compute
 * capabilities). */
static const struct {
    const char *name;
    double kib;
} limits[] = {{"sm_75 (T4)", 64},
              {"sm_86, sm_89 (RTX 30, 40)", 99},
              {"sm_80 (A100)", 163},
              {"sm_90 (H100, H200)", 227}};
enum { LIMITS = sizeof limits / sizeof limits[0] };

static void print_place(const char *what, double elements, double bytes) {
    printf("%-56s %8.0f %9.1f  ", what, elements, bytes / KIB);
    int fits = 0;
    while (fits < LIMITS && bytes > limits[fits].kib * KIB) fits++;
    printf(fits == LIMITS ? "none of these\n" : "%s and up\n", limits[fits % LIMITS].name);
}

static void print_on_chip(void) {
    const double d = (double)shape.HS, Br = (double)shape.Br, Bc = (double)shape.Bc;
    const double e = (double)shape.bytes, all = (double)io_tile_elements(&shape);
    printf("On chip, for one tile of Br=%zu queries and Bc=%zu keys, d=%zu, %s\n\n", shape.Br,
           shape.Bc, shape.HS, type_flag);
    printf("%-56s %8s %9s  %s\n", "", "elements", "KiB", "fits a block's shared memory of");
    print_place("Q, K, V, S, O: (Br + 2 Bc) d + Br Bc + Br d", all, all * e);
    print_place("the same with S and O in float", all,
                (Br + 2 * Bc) * d * e + (Br * Bc + Br * d) * 4);
    print_place("without O: (Br + 2 Bc) d + Br Bc", all - Br * d, (all - Br * d) * e);
    print_place("S and O in registers: (Br + 2 Bc) d", (Br + 2 * Bc) * d, (Br + 2 * Bc) * d * e);
    print_place("and two stages of K and V: (Br + 4 Bc) d", (Br + 4 * Bc) * d,
                (Br + 4 * Bc) * d * e);
    printf("\nLimits: ");
    for (int i = 0; i < LIMITS; i++)
        printf("%s %.0f KiB%s", limits[i].name, limits[i].kib, i + 1 < LIMITS ? ", " : ".\n");
}

static void print_operations(void) {
    const double product = io_product_operations(&shape);
    const char *const names[] = {
        "forward: S = Q K^T, O = P V", "backward with P stored: dV, dP, dQ, dK",
        "backward that recomputes: and S", "backward in two kernels: and S, dP twice"};
    const int products[] = {2, 4, 5, 7};
    printf("\nOperations, one head%s\n\n%-48s %8s %12s %18s\n",
           shape.mask == ATTENTION_CAUSAL ? " (the causal half)" : "", "", "products", "GFLOP",
           "of the stored-P's");
    for (int i = 0; i < 4; i++) {
        printf("%-48s %8d %12.2f", names[i], products[i], products[i] * product / 1e9);
        printf(i > 0 ? " %17.0f%%\n" : "\n", 100.0 * products[i] / 4);
    }
    printf("Tiles of %zu x %zu compute %.3f times the scores that the mask leaves.\n", shape.Br,
           shape.Bc, io_scores_computed(&shape) / io_scores_needed(&shape));
}

static void print_bytes(const char *what, double bytes, double minimum) {
    printf("%-58s %10.1f %12.1f %9.1f\n", what, bytes / MB, all_heads * bytes / MB,
           bytes / minimum);
}

static void print_traffic(void) {
    const double forward = io_forward_minimum(&shape), backward = io_backward_minimum(&shape);
    printf("\nBytes moved, MB = 10^6\n\n%-58s %10s %12s %9s\n", "forward", "one head", "all heads",
           "minimum=1");
    print_bytes("minimum: Q, K, V read, O, LSE written", forward, forward);
    print_bytes("tiled, queries outside: K, V again for each query tile", io_forward_tiled(&shape),
                forward);
    print_bytes("tiled, keys outside (2022): Q, O, m, l again", io_forward_2022(&shape), forward);
    print_bytes("naive, S and P in the tensors' type, three kernels", io_forward_naive(&shape),
                forward);
    print_bytes("naive here: S in float", io_forward_naive_here(&shape), forward);
    printf("backward\n");
    print_bytes("minimum: Q, K, V, O, dO, LSE read, dQ, dK, dV written", backward, backward);
    print_bytes("tiled, keys outside, dQ summed in memory (2023)", io_backward_2023(&shape),
                backward);
    print_bytes("tiled, one kernel for dK, dV and one for dQ", io_backward_two_kernels(&shape),
                backward);
    print_bytes("naive with P stored, in the tensors' type", io_backward_naive(&shape), backward);
    print_bytes("naive here: S recomputed, S and dP in float", io_backward_naive_here(&shape),
                backward);
}

/* --- the claims ----------------------------------------------------------------------------- */

/* The longest T on a GPU of 80 GB that keeps this many bytes for each place of the T×T matrix. */
static double longest(double bytes) { return sqrt(80e9 / bytes); }

static void print_claims(void) {
    const double T = (double)shape.T, d = (double)shape.HS, e = (double)shape.bytes;
    const double Br = (double)shape.Br, Bc = (double)shape.Bc, square = T * T;
    const double tensor = io_tensor(&shape), minimum = io_forward_minimum(&shape);
    const double reads = io_forward_reads(&shape), tiled = io_forward_tiled(&shape);
    const double naive = io_forward_naive(&shape), elements = (double)io_tile_elements(&shape);

    printf("\nWhat is commonly said, for one head at T=%zu, d=%zu, %s, %s\n", shape.T, shape.HS,
           type_flag, mask_flag);

    printf("\n1. \"It reads 3 T d elements from memory, each of Q, K, V once.\"\n");
    paragraph(
        "   ",
        "Wrong of the algorithm. Q is read once, K and V again for each of the T/Br query tiles: "
        "T d (1 + 2 T/Br) without a mask. Here %.1f MB, against %.1f MB for 3 T d. DRAM comes "
        "near 3 T d only where a cache holds K and V between tiles, %.1f MB a head: measure DRAM "
        "and L2 apart (dev/attention/io_report.py).",
        reads / MB, 3 * tensor / MB, 2 * tensor / MB);

    printf("\n2. \"On chip it needs (Br + 2 Bc) d + Br Bc + Br d, about 132 KB at 128.\"\n");
    paragraph(
        "   ",
        "The formula at Br = Bc = d = 128 is 81,920 elements: 163,840 bytes, 160 KiB, in half "
        "precision; 131,072 is what it gives without its last term. Here %.0f elements, %.1f "
        "KiB. Nor do tensor-core kernels spend it so: S and O stay in registers, and shared memory "
        "holds Q "
        "and two or more stages of K and V (the kernels' own figures are above, where there is "
        "a GPU).",
        elements, elements * e / KIB);

    printf("\n3. \"Naive moves about 14 T^2 bytes: 940 MB at T=4096.\"\n");
    paragraph(
        "   ",
        "14 T^2 is %.0f MB here; 56 T^2, %.0f MB, is 14 passes over float matrices. By counting, "
        "in half precision: forward 8 T^2 (S written, read, P written, read), 16 T^2 with "
        "kernels of their own for scale and mask; backward 14 T^2. Here forward %.0f MB and "
        "backward %.0f MB in the tensors' type; as attention/naive.cu does it, with S in float, "
        "%.0f and %.0f MB.",
        14 * square / MB, 56 * square / MB, naive / MB, io_backward_naive(&shape) / MB,
        io_forward_naive_here(&shape) / MB, io_backward_naive_here(&shape) / MB);

    printf("\n4. \"235 times less traffic.\"\n");
    paragraph(
        "   ",
        "That divides float passes of one by half-precision bytes of the other (940 / 4.0). In "
        "one unit, forward: %.0f times less if every tensor moved once, %.1f times less with K "
        "and V read again as the algorithm does.",
        naive / minimum, naive / tiled);

    printf("\n5. \"Naive ends at T = 32K on 80 GB.\"\n");
    paragraph(
        "   ",
        "It depends on what is kept. The matrices alone, B=1, S in float and P in half, forward, "
        "one layer: %.0f with 12 heads, %.0f with 32. With P kept for the backward of 12 layers "
        "of 12 heads: %.0f. Here, where S and dP in float are one workspace for all layers: "
        "%.0f.",
        longest(12 * 6), longest(32 * 6), longest(12 * (12 * 2 + 4)), longest(12 * 8));

    printf("\n6. \"Recomputing makes the backward 25 to 33%% more work.\"\n");
    paragraph(
        "   ",
        "25%% is exact: five products for four. Nothing gives 33%%. Forward and backward "
        "together: seven for six, 17%%. In two kernels that share no sums (as in flash_v1): "
        "seven for four, 75%%, and nine for six together: the price of needing neither atomic "
        "sums nor an order among blocks.");

    printf("\n7. \"Memory is O(T).\"\n");
    paragraph(
        "   ",
        "True: the forward saves LSE, 4 bytes a query (%.1f KiB here), beside O. The backward "
        "adds D, 4 bytes a query, and, where dQ is summed in memory, a float dQ: 4 T d bytes, "
        "%.1f MB, %.0f times dQ itself. `make memory` measures it.",
        4 * T / KIB, 4 * T * d / MB, 4 / e);

    printf("\n8. \"It is 2 to 4 times faster.\"\n");
    paragraph(
        "   ",
        "Than what? Ratios in the papers' charts go from 0.8 (2022's kernel, d=128, no mask, on "
        "an H100) to 26 (2024's, causal, against a naive one that does not skip masked tiles). "
        "Say which kernels, T, d, mask and GPU: `make bench`, dev/compare_attention.py.");

    printf(
        "\n9. \"Blocks of Bc = M/(4d), Br = min(Bc, d) fill the on-chip memory of M elements.\"\n");
    paragraph(
        "   ",
        "They overfill it: K, V take M/2, Q, O up to M/2, and S up to M/4 more. The paper bounds "
        "the order of growth and drops such constants.");

    printf("\n10. \"Theta(T^2 d^2 / M) accesses.\"\n");
    paragraph(
        "   ",
        "As a bound. With Br = Bc = M/(4d) the constant is 8 with queries outside (2 T^2 d / Br) "
        "and 12 as in the paper, keys outside (3 T^2 d / Bc). Here, for Br=%zu, Bc=%zu: %.1f and "
        "%.1f MB a head. Below about M = d^2 it exceeds the naive T^2: tiles must be large "
        "against d.",
        shape.Br, shape.Bc, 2 * square * d / Br * e / MB, 3 * square * d / Bc * e / MB);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        printf("io_report: memory and operations of attention, as said, counted and launched\n\n");
        flags_print_help(flags, stdout);
        return 0;
    }
    if (!flags_parse(flags, argc - 1, argv + 1)) measure_exit();
    if (batch == 0) batch = length < TOKENS ? TOKENS / length : 1;
    if (heads == 0) heads = head_size < WIDTH ? WIDTH / head_size : 1;
    shape = (IoShape){.T = (size_t)length,
                      .HS = (size_t)head_size,
                      .Br = (size_t)rows,
                      .Bc = (size_t)columns,
                      .bytes = strcmp(type_flag, "fp32") == 0 ? 4 : 2,
                      .mask = strcmp(mask_flag, "causal") == 0 ? ATTENTION_CAUSAL : ATTENTION_FULL};
    all_heads = (double)batch * (double)heads;
    Device *device = measure_open(device_flag);
    if (!device) measure_exit();
    if (run_flag[0]) {
#ifdef TILEGPT_CUDA
        if (device->type == DEVICE_CUDA) {
            run_families(device);
            device_close(device);
            return 0;
        }
#endif
        error_set("--run is for a GPU, where ncu measures; here is only %s", device->name);
        measure_exit();
    }
    print_on_chip();
#ifdef TILEGPT_CUDA
    if (device->type == DEVICE_CUDA) print_kernels(device);
#endif
    if (device->type == DEVICE_CPU) printf("\nNo GPU: the kernels' own figures are not shown.\n");
    print_operations();
    print_traffic();
    print_claims();
    device_close(device);
    return 0;
}
