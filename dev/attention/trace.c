/* One block of queries against each block of keys, in plain numbers: what happens to (m, ℓ, O) in
 * the tiled forward of attention/, and that the end is the exact softmax.
 *
 * The update is the project's own (attention/online_softmax.h, in double); the exact result is that
 * of naive attention. The case is small and its numbers have one decimal, so that a reader can redo
 * any line by hand. Exits with 1 if the two disagree. */
#define REAL_F64
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/mask.h"
#include "attention/online_softmax.h"
#include "dev/attention/paragraph.h"
#include "runtime/error.h"
#include "runtime/flags.h"
#include "runtime/random.h"

#define RULE "----------------------------------------------------------------------"

enum { T_MAX = 64, HS_MAX = 16, LANES = SOFTMAX_QUERIES };

/* Doubles, a few dozen sums and exponentials each: errors of some 1e-15, of numbers about 1. */
#define TOLERANCE 1e-13

static int64_t T = 6, HS = 2, rows = 2, columns = 2, block = -1, seed = 1;
static bool causal;

static Flag flags[] = {
    {"length", FLAG_INT, &T, 1, T_MAX, NULL, "queries and keys (T)", false},
    {"head-size", FLAG_INT, &HS, 1, HS_MAX, NULL, "channels (HS)", false},
    {"rows", FLAG_INT, &rows, 1, LANES, NULL, "queries in a block (Br)", false},
    {"columns", FLAG_INT, &columns, 1, T_MAX, NULL, "keys in a block (Bc)", false},
    {"block", FLAG_INT, &block, -1, T_MAX - 1, NULL, "which block of queries, from 0; -1: the last",
     false},
    {"causal", FLAG_BOOL, &causal, 0, 0, NULL, "query i sees keys 0 … i only", false},
    {"seed", FLAG_INT, &seed, 0, 1e9, NULL, "of the numbers", false},
    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};

/* (T,HS) each, rows HS_MAX apart. */
static double Q[T_MAX][HS_MAX], K[T_MAX][HS_MAX], V[T_MAX][HS_MAX], exact_O[T_MAX][HS_MAX],
    exact_lse[T_MAX];

/* What is known of the queries of the block. O2022 is divided by ℓ at every step, O2023 is not. */
static OnlineSoftmax state;
static double O2022[LANES][HS_MAX], O2023[LANES][HS_MAX];
static size_t corrections, idle_corrections; /* of rows that had a maximum before; with c = 1 */

static void __attribute__((noreturn)) leave(void) {
    fprintf(stderr, "%s\n", error_message());
    exit(2);
}

static size_t minimum(size_t a, size_t b) { return a < b ? a : b; }

/* Normal numbers with one decimal. */
static void fill(double x[T_MAX][HS_MAX], uint64_t use) {
    float values[T_MAX * HS_MAX];
    random_normal(values, (size_t)(T * HS), random_mix((uint64_t)seed, use), 1);
    for (int64_t i = 0; i < T * HS; i++) x[i / HS][i % HS] = rint(10 * (double)values[i]) / 10;
}

static void print_numbers(const double *x, size_t n) {
    for (size_t i = 0; i < n; i++) printf(" %8.4f", x[i]);
}

static double score(size_t i, size_t j, double scale) {
    double sum = 0;
    for (int64_t c = 0; c < HS; c++) sum += Q[i][c] * K[j][c];
    return scale * sum;
}

/* O and LSE of all queries by naive attention. */
static void compute_exact(const Attention *problem) {
    AttentionTensors tensors = {.lse = exact_lse};
    AttentionView *views[] = {&tensors.q, &tensors.k, &tensors.v, &tensors.o};
    void *data[] = {Q, K, V, exact_O};
    for (int i = 0; i < 4; i++)
        *views[i] = (AttentionView){data[i], T_MAX * HS_MAX, HS_MAX, HS_MAX};
    size_t bytes = (attention_forward_workspace(problem) + 255) / 256 * 256;
    void *workspace = aligned_alloc(256, bytes);
    if (!workspace || attention_forward(problem, &tensors, workspace, NULL)) leave();
    free(workspace);
}

/* One block of keys. Prints it, and moves (m, ℓ, O) on. */
static void step(AttentionMask mask, double scale, size_t i0, size_t queries, size_t j0,
                 size_t keys) {
    const size_t HSn = (size_t)HS;
    double S[LANES][T_MAX], tile[T_MAX * LANES] = {0}; /* Q Kᵀ, keys by queries */
    printf("\n--- keys %zu … %zu " RULE "\n\n", j0, j0 + keys - 1);
    for (size_t j = 0; j < keys; j++) {
        printf("key %-2zu      K", j0 + j);
        print_numbers(K[j0 + j], HSn);
        printf("     V");
        print_numbers(V[j0 + j], HSn);
        printf("\n");
    }
    for (size_t i = 0; i < queries; i++)
        for (size_t j = 0; j < keys; j++) {
            const bool seen = j0 + j < keys_seen(mask, i0 + i, (size_t)T, (size_t)T);
            tile[j * LANES + i] = seen ? score(i0 + i, j0 + j, 1) : -INFINITY;
            S[i][j] = tile[j * LANES + i] * scale;
        }

    const OnlineSoftmax before = state;
    online_softmax_update(&state, tile, keys, scale); /* leaves P / ℓ' in the tile */

    for (size_t i = 0; i < queries; i++) {
        const double c = before.max[i] == -INFINITY ? 0 : exp(before.max[i] - state.max[i]);
        double P[T_MAX], old2022[HS_MAX], old2023[HS_MAX];
        corrections += before.max[i] != -INFINITY;
        idle_corrections += before.max[i] != -INFINITY && c == 1;
        memcpy(old2022, O2022[i], sizeof old2022);
        memcpy(old2023, O2023[i], sizeof old2023);
        for (size_t j = 0; j < keys; j++) P[j] = tile[j * LANES + i] * state.sum[i];
        for (size_t d = 0; d < HSn; d++) {
            O2022[i][d] *= state.correction[i]; /* c ℓ / ℓ' */
            O2023[i][d] *= c;
            for (size_t j = 0; j < keys; j++) {
                O2022[i][d] += tile[j * LANES + i] * V[j0 + j][d];
                O2023[i][d] += P[j] * V[j0 + j][d];
            }
        }
        printf("\nquery %-2zu    S", i0 + i);
        print_numbers(S[i], keys);
        printf("\n            m %8.4f -> %8.4f     c = exp(m - m') = %.4f\n", before.max[i],
               state.max[i], c);
        printf("            P");
        print_numbers(P, keys);
        printf("     exp(S - m')\n");
        printf("            l %8.4f -> %8.4f     c l + sum P\n", before.sum[i], state.sum[i]);
        printf("            O");
        print_numbers(old2023, HSn);
        printf(" ->");
        print_numbers(O2023[i], HSn);
        printf("     c O + P V\n          O/l");
        print_numbers(old2022, HSn);
        printf(" ->");
        print_numbers(O2022[i], HSn);
        printf("     (c l / l') O/l + (P / l') V\n");
    }
}

/* The largest differences to the exact result, of O, LSE and of the probabilities that a backward
 * recomputes from LSE. */
typedef struct {
    double o, between, lse, p; /* between: the two ways of summing O */
} Differences;

static double larger(double a, double b) { return b <= a ? a : b; /* NaN is larger */ }

static Differences compare_with_exact(AttentionMask mask, double scale, size_t i0, size_t queries) {
    Differences most = {0, 0, 0, 0};
    printf("\n--- the end " RULE "\n");
    for (size_t i = 0; i < queries; i++) {
        const size_t seen = keys_seen(mask, i0 + i, (size_t)T, (size_t)T);
        const double lse = online_softmax_lse(&state, i);
        double P[T_MAX], sum = 0, highest = -INFINITY;
        for (size_t j = 0; j < seen; j++) highest = fmax(highest, score(i0 + i, j, scale));
        for (size_t j = 0; j < seen; j++) sum += P[j] = exp(score(i0 + i, j, scale) - highest);
        for (size_t j = 0; j < seen; j++) {
            P[j] /= sum;
            most.p = larger(most.p, fabs(exp(score(i0 + i, j, scale) - lse) - P[j]));
        }
        for (int64_t d = 0; d < HS; d++) {
            O2023[i][d] /= state.sum[i];
            most.o = larger(most.o, fabs(O2022[i][d] - exact_O[i0 + i][d]));
            most.o = larger(most.o, fabs(O2023[i][d] - exact_O[i0 + i][d]));
            most.between = larger(most.between, fabs(O2022[i][d] - O2023[i][d]));
        }
        most.lse = larger(most.lse, fabs(lse - exact_lse[i0 + i]));
        printf("\nquery %-2zu  O/l", i0 + i);
        print_numbers(O2023[i], (size_t)HS);
        printf("     LSE = m + log l = %.4f\n    exact   O", lse);
        print_numbers(exact_O[i0 + i], (size_t)HS);
        printf("     LSE             = %.4f\n    exact   P", exact_lse[i0 + i]);
        print_numbers(P, seen);
        printf("\n");
    }
    return most;
}

static void print_notes(Differences most, size_t i0, size_t queries, size_t steps) {
    const size_t blocks = ((size_t)T + (size_t)rows - 1) / (size_t)rows;
    printf("\nWhere the common description is loose\n");
    paragraph(
        "1. ",
        "\"The tiled softmax is exact.\" It is the same function, summed in another order: here O "
        "differs by %.1e, LSE by %.1e. Equal bits are not promised.",
        most.o, most.lse);
    paragraph(
        "2. ",
        "\"Each block rescales what was summed.\" Only where it raises the row's maximum: c was "
        "1 in %zu of %zu corrections. In a row's first block c = exp(-inf) = 0: there is nothing "
        "to keep.",
        idle_corrections, corrections);
    paragraph(
        "3. ",
        "\"O is the weighted average so far.\" In the paper of 2022, which divides by l at every "
        "block (the lines O/l); that of 2023 carries the sum (the lines O) and divides once, at "
        "the end. The two differ by %.1e here.",
        most.between);
    paragraph("4. ",
              "\"m and l are saved for the backward.\" LSE = m + log l is enough: P = exp(S - LSE) "
              "differs from the exact P by %.1e.",
              most.p);
    paragraph(
        "5. ",
        "\"K and V are read once.\" Once by each block of queries: this one read %zu blocks of "
        "keys, and there are %zu such blocks%s. With the loops as in 2022, keys outside, K and V are "
        "read once, but O, m and l of every query go to memory and back at each block of keys.",
        steps, blocks, causal ? ", the earlier of which read fewer" : "");
    if (causal)
        paragraph(
            "6. ",
            "\"Causal halves the work.\" Blocks of keys beyond query %zu are skipped; in a block "
            "that the diagonal cuts, masked scores are computed and set to -inf all the same.",
            i0 + queries - 1);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--help") == 0) {
        printf("trace: one block of queries against each block of keys, in plain numbers\n\n");
        flags_print_help(flags, stdout);
        return 0;
    }
    if (!flags_parse(flags, argc - 1, argv + 1)) leave();
    const int64_t blocks = (T + rows - 1) / rows;
    if (block >= blocks) {
        error_set("--block=%lld: T=%lld has %lld blocks of %lld queries; give 0 … %lld",
                  (long long)block, (long long)T, (long long)blocks, (long long)rows,
                  (long long)blocks - 1);
        leave();
    }
    const size_t i0 = (size_t)((block < 0 ? blocks - 1 : block) * rows);
    const size_t queries = minimum((size_t)rows, (size_t)T - i0);
    const AttentionMask mask = causal ? ATTENTION_CAUSAL : ATTENTION_FULL;
    const Attention problem = {.device = DEVICE_CPU,
                               .type = TYPE_F64,
                               .B = 1,
                               .NH = 1,
                               .TQ = (size_t)T,
                               .TK = (size_t)T,
                               .HS = (size_t)HS,
                               .mask = mask,
                               .scale = 1 / sqrtf((float)HS),
                               .family = ATTENTION_NAIVE};
    const double scale = (double)problem.scale;
    fill(Q, 0);
    fill(K, 1);
    fill(V, 2);
    compute_exact(&problem);

    printf("T=%lld HS=%lld Br=%lld Bc=%lld %s, scale = 1/sqrt(HS) = %.4f\n", (long long)T,
           (long long)HS, (long long)rows, (long long)columns, causal ? "causal" : "full", scale);
    printf("l is the papers' ell; a -> b is a value before and after a block\n\n");
    for (size_t i = 0; i < queries; i++) {
        printf("query %-2zu    Q", i0 + i);
        print_numbers(Q[i0 + i], (size_t)HS);
        printf("\n");
    }
    online_softmax_start(&state);
    const size_t seen = keys_seen(mask, i0 + queries - 1, (size_t)T, (size_t)T);
    size_t steps = 0;
    for (size_t j0 = 0; j0 < seen; j0 += (size_t)columns, steps++)
        step(mask, scale, i0, queries, j0, minimum((size_t)columns, seen - j0));
    const Differences most = compare_with_exact(mask, scale, i0, queries);
    print_notes(most, i0, queries, steps);

    const double worst = larger(larger(most.o, most.between), larger(most.lse, most.p));
    const bool good = worst <= TOLERANCE;
    if (!good) printf("\ntrace: the results differ by %g, more than %g\n", worst, TOLERANCE);
    return !good;
}
