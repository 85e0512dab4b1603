/* What everything stands on: errors, random numbers, digests, the log,
 * devices; and the comparator. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/log.h"
#include "runtime/random.h"
#include "runtime/sha256.h"
#include "test/compare.h"
#include "test/said.h"
#include "test/scratch.h"

static void comparator_fails_on_nan(void **state) {
    (void)state;
    const double reference[3] = {1, 2, 3}, poisoned[3] = {1, NAN, 3};
    const float reference_float[3] = {1, 2, 3}, poisoned_float[3] = {1, NAN, 3};
    assert_true(compare("equal values", relative_error(reference, reference, 3), 0));
    assert_false(
        compare("must fail: NaN in double", relative_error(poisoned, reference, 3), INFINITY));
    assert_false(compare("must fail: NaN in float",
                         relative_error_float(poisoned_float, reference_float, 3), INFINITY));
    assert_false(
        compare("must fail: NaN in reference", relative_error(reference, poisoned, 3), INFINITY));
    assert_false(
        compare("must fail: difference", relative_error((double[]){1.1}, reference, 1), 0.09));
}

static void error_may_quote_itself(void **state) {
    (void)state;
    assert_false(error_set("inner %d", 7));
    assert_string_equal(error_message(), "inner 7");
    error_set("outer: %s", error_message());
    error_set("%s (%s)", error_message(), error_message());
    assert_string_equal(error_message(), "outer: inner 7 (outer: inner 7)");

    char *longest = malloc(100001);
    assert_non_null(longest);
    memset(longest, 'x', 100000);
    longest[100000] = '\0';
    error_set("%s", longest);
    free(longest);
    size_t length = strlen(error_message());
    assert_true(length > 1000 && length < 100000);
    assert_string_equal(error_message() + length - 3, "...");
}

/* Random123, tests/kat_vectors: "philox4x32 7" with all bits clear, all set, and digits of pi. */
static void philox_gives_the_published_numbers(void **state) {
    (void)state;
    static const struct {
        uint64_t key;
        uint32_t counter[4], expected[4];
    } vectors[] = {
        {0, {0, 0, 0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        {UINT64_MAX,
         {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX},
         {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        {0x299f31d0a4093822,
         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        const uint32_t *c = vectors[i].counter;
        Philox draw = philox(vectors[i].key, c[0], c[1], c[2], c[3]);
        for (int w = 0; w < 4; w++) assert_int_equal(draw.word[w], vectors[i].expected[w]);
    }
    Philox draw = {{0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c}};
    for (int i = 0; i < 16; i++) assert_int_equal(philox_byte(&draw, i), i);
}

/* Element i of a dropout over n elements is kept with probability 1 - threshold / 256 and scaled so
 * that the expectation is 1. The kept fraction has deviation sqrt(q (1 - q) / n) and the mean byte
 * 73.9 / sqrt(n): five of them, for counters that are fixed, leave no chance. */
static void dropout_keeps_the_stated_fraction(void **state) {
    (void)state;
    const uint64_t n = 1 << 20;
    for (int step = 0; step <= 9; step++) {
        float p = 0.1f * (float)step;
        unsigned threshold = dropout_threshold(p);
        double kept = 0, byte_sum = 0;
        for (uint64_t i = 0; i < n; i++) {
            Philox draw = dropout_draw(random_mix(1234, (uint64_t)step), i);
            unsigned byte = philox_byte(&draw, (int)(i % 16));
            byte_sum += byte;
            kept += byte >= threshold;
        }
        double q = 1 - threshold / 256.0;
        assert_true(fabs(p - threshold / 256.0) <= 1.0 / 512 + 1e-7); /* half a step, and float's */
        assert_true(fabs(kept / n - q) <= 5 * sqrt(q * (1 - q) / n));
        assert_true(fabs(byte_sum / n - 127.5) <= 5 * 73.9 / sqrt(n));
        assert_true(fabs(q * dropout_scale(p) - 1) <= FLT_EPSILON); /* one division in float */
    }
}

/* Every score of a 64-wide tile has a byte of its own: no draw and byte serve two columns. */
static void attention_dropout_gives_each_column_its_byte(void **state) {
    (void)state;
    enum { COLUMNS = 192 };
    for (uint32_t j = 0; j < COLUMNS; j++)
        for (uint32_t k = 0; k < j; k++) {
            Philox a = dropout_attention_draw(5, 2, 3, j), b = dropout_attention_draw(5, 2, 3, k);
            bool same_draw = memcmp(&a, &b, sizeof a) == 0;
            assert_false(same_draw && dropout_attention_byte(j) == dropout_attention_byte(k));
            assert_int_equal(same_draw, j / 64 == k / 64 && j % 8 / 2 == k % 8 / 2);
        }
    Philox a = dropout_attention_draw(5, 2, 3, 0), b = dropout_attention_draw(5, 3, 2, 0);
    Philox c = dropout_draw(5, 0);
    assert_memory_not_equal(&a, &b, sizeof a);
    assert_memory_not_equal(&a, &c, sizeof a);
}

static void mixed_keys_are_distinct(void **state) {
    (void)state;
    enum { SEEDS = 40, USES = 40 };
    uint64_t keys[SEEDS * USES];
    for (size_t i = 0; i < SEEDS * USES; i++) {
        keys[i] = random_mix(i / USES, i % USES);
        for (size_t k = 0; k < i; k++) assert_true(keys[k] != keys[i]);
    }
}

static void assert_permutation(uint64_t n, uint64_t key) {
    unsigned char *seen = calloc(n, 1);
    assert_non_null(seen);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t image = random_permute(i, n, key);
        assert_true(image < n);
        assert_false(seen[image]);
        seen[image] = 1;
    }
    free(seen);
}

static void permute_is_a_bijection(void **state) {
    (void)state;
    for (uint64_t n = 1; n <= 300; n++)
        for (uint64_t key = 0; key < 5; key++) assert_permutation(n, random_mix(n, key));
    const uint64_t lengths[] = {1023, 1024, 1025, 4095, 4096, 4097, 65537, 100003};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        assert_permutation(lengths[i], i);
    /* The widest networks, halves of 31 and 32 bits: images below n that reach every bit. */
    uint64_t bits_31 = 0, bits_32 = 0;
    for (uint64_t i = 0; i < 64; i++) {
        bits_31 |= random_permute(i, (uint64_t)1 << 62, 1);
        bits_32 |= random_permute(i, UINT64_MAX, 1);
    }
    assert_true(bits_31 == UINT64_MAX >> 2);
    assert_true(bits_32 == UINT64_MAX);
}

/* Over many keys every image of every place of a small permutation is equally likely: Pearson's
 * chi-square over the n × n table has (n - 1)² degrees of freedom, mean (n - 1)² and deviation
 * sqrt(2) (n - 1). */
static void permute_is_unbiased(void **state) {
    (void)state;
    enum { KEYS = 4000, LONGEST = 20 };
    for (uint64_t n = 2; n <= LONGEST; n++) {
        int counts[LONGEST][LONGEST] = {{0}};
        for (uint64_t key = 0; key < KEYS; key++)
            for (uint64_t i = 0; i < n; i++) counts[i][random_permute(i, n, random_mix(99, key))]++;
        double expected = (double)KEYS / (double)n, chi_square = 0, m = (double)n - 1;
        for (uint64_t i = 0; i < n; i++)
            for (uint64_t k = 0; k < n; k++)
                chi_square += pow(counts[i][k] - expected, 2) / expected;
        assert_true(chi_square <= m * m + 5 * sqrt(2) * m + 10); /* + 10: its skew at small n */
    }
}

static void normals_have_normal_moments(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    const double deviation = 0.02;
    float *values = malloc(N * sizeof *values);
    assert_non_null(values);
    random_normal(values, N, 42, (float)deviation);
    double moment[5] = {0}, neighbours = 0;
    int beyond_3 = 0;
    for (int i = 0; i < N; i++) {
        double z = values[i] / deviation;
        for (int k = 1; k <= 4; k++) moment[k] += pow(z, k) / N;
        if (i) neighbours += z * values[i - 1] / deviation / N;
        beyond_3 += fabs(z) > 3;
    }
    /* The k-th sample moment has variance (E z^2k - (E z^k)²) / N, with 1, 2, 15 and 96 above N. */
    assert_true(fabs(moment[1]) <= 5 * sqrt(1.0 / N));
    assert_true(fabs(moment[2] - 1) <= 5 * sqrt(2.0 / N));
    assert_true(fabs(moment[3]) <= 5 * sqrt(15.0 / N));
    assert_true(fabs(moment[4] - 3) <= 5 * sqrt(96.0 / N));
    assert_true(fabs(neighbours) <= 5 * sqrt(1.0 / N));
    const double tail = 0.0026998; /* P(|z| > 3) */
    assert_true(fabs(beyond_3 - N * tail) <= 5 * sqrt(N * tail));
    free(values);
}

static void normal_depends_on_key_and_place_only(void **state) {
    (void)state;
    enum { N = 10001 };
    static float whole[N], other[N];
    random_normal(whole, N, 7, 1);
    const size_t lengths[] = {1, 2, 3, 4, 5, 17, 4096, N};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        memset(other, 0, sizeof other);
        random_normal(other, lengths[i], 7, 1);
        assert_memory_equal(other, whole, lengths[i] * sizeof *whole);
        for (size_t k = lengths[i]; k < N; k++) assert_true(other[k] == 0);
    }
#ifdef _OPENMP
    int threads = omp_get_max_threads();
    for (int t = 1; t <= 5; t++) {
        omp_set_num_threads(t);
        random_normal(other, N, 7, 1);
        assert_memory_equal(other, whole, sizeof whole);
    }
    omp_set_num_threads(threads);
#endif
    random_normal(other, N, 8, 1);
    assert_memory_not_equal(other, whole, sizeof whole);
}

/* By sha256sum. */
static void sha256_gives_the_known_digests(void **state) {
    (void)state;
    static const struct {
        size_t count; /* of letters 'a' */
        const char *hex;
    } known[] = {/* both sides of the block and of the padding's place for the length */
                 {0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                 {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
                 {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
                 {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
                 {1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    char *text = malloc(1000000), hex[SHA256_HEX_BYTES];
    memset(text, 'a', 1000000);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        Sha256 hash;
        sha256_begin(&hash);
        sha256_add(&hash, text, known[i].count / 3); /* also in two parts of unlike sizes */
        sha256_add(&hash, text, known[i].count - known[i].count / 3);
        sha256_end(&hash, hex);
        assert_string_equal(hex, known[i].hex);
    }
    uint64_t bytes;
    put_file("a.txt", text, 1000000);
    assert_true(sha256_file("a.txt", hex, &bytes));
    assert_int_equal(bytes, 1000000);
    assert_string_equal(hex, known[4].hex);
    assert_false(sha256_file("no.txt", hex, &bytes));
    assert_said("no.txt");
    free(text);
}

static void assert_log(const char *path, const char *expected) {
    char *text = file_read(path, 1 << 20, NULL);
    assert_non_null(text);
    assert_string_equal(text, expected);
    free(text);
}

/* Resuming drops the rows after the step and what was half written; a disk that is full costs rows,
 * neither the run nor what was logged. */
static void log_keeps_what_it_can(void **state) {
    (void)state;
    const char *directory = "logged", *path = "logged/log.csv";
    make_directory(directory);
    const char header[] = "step,split,loss,norm,lr,ms,tokens_per_second\n";
    char rows[256];
    snprintf(rows, sizeof rows, "%s1,train,4,1,0.1,2.000,3\n2,train,3,1,0.1,2.000,3\n3,tr", header);
    assert_true(file_write(path, rows, strlen(rows)));
    Log log;
    assert_true(log_open(&log, directory, 2));
    log_close(&log);
    *strstr(rows, "3,tr") = '\0';
    assert_log(path, rows);
    assert_true(log_open(&log, directory, 1));
    LogStep step = {
        .step = 2, .steps = 2, .loss = 5, .norm = 1, .lr = 1, .seconds = 1, .tokens = 4};
    log_step(&log, &step, /*print=*/false);
    log_close(&log);
    strcpy(strstr(rows, "2,train"), "2,train,5,1,1,1000.000,4\n");
    assert_log(path, rows);

    unlink(path);
    assert_int_equal(symlink("/dev/full", path), 0);
    assert_true(log_open(&log, directory, 0)); /* the header is the first row that fails */
    assert_null(log.csv);
    log_step(&log, &step, /*print=*/false);
    log_close(&log);
    unlink(path);
    assert_int_equal(rmdir(directory), 0); /* and nothing temporary was left */
}

/* Every promise of device.h on one device. */
static void check_device(Device *device) {
    enum { N = 3000001 }; /* several pieces of an upload, and a ragged end */
    const size_t bytes = N * sizeof(uint32_t);
    uint32_t *host = malloc(bytes), *back = malloc(bytes);
    assert_true(host && back);
    size_t peak = device_peak_allocated(device);
    uint32_t *a = device_alloc(device, bytes), *b = device_alloc(device, bytes);
    void *nothing = device_alloc(device, 0);
    assert_true(a && b && nothing);
    assert_int_equal((uintptr_t)a % 256, 0);
    assert_int_equal((uintptr_t)b % 256, 0);
    assert_true(device_peak_allocated(device) >= peak);
    assert_true(device_peak_allocated(device) >= 2 * bytes);

    /* The source is overwritten as soon as device_upload returns, many times over. */
    for (uint32_t pass = 0; pass < 20; pass++) {
        for (uint32_t i = 0; i < N; i++) host[i] = i * 2654435761u + pass;
        device_upload(device, pass % 2 ? b : a, host, bytes);
    }
    memset(host, 0xff, bytes);
    device_download(device, back, b, bytes);
    for (uint32_t i = 0; i < N; i++) assert_true(back[i] == i * 2654435761u + 19);
    device_copy(device, b, a, bytes);
    device_download(device, back, b, bytes);
    for (uint32_t i = 0; i < N; i++) assert_true(back[i] == i * 2654435761u + 18);

    device_zero(device, b + 1, bytes - 2 * sizeof *b); /* all but the first and the last */
    device_download(device, back, b, bytes);
    assert_true(back[0] == 18 && back[N - 1] == (N - 1) * 2654435761u + 18);
    for (uint32_t i = 1; i < N - 1; i++) assert_true(back[i] == 0);

    assert_true(device_reserve_scratch(device, 1000));
    void *scratch = device->scratch;
    assert_non_null(scratch);
    assert_int_equal((uintptr_t)scratch % 256, 0);
    assert_int_equal(device->scratch_bytes, 1000);
    assert_true(device_reserve_scratch(device, 10));
    assert_ptr_equal(device->scratch, scratch);
    assert_int_equal(device->scratch_bytes, 1000);
    assert_true(device_reserve_scratch(device, 1 << 20));
    assert_int_equal(device->scratch_bytes, 1 << 20);

    size_t available, total;
    device_memory(device, &available, &total);
    assert_true(available > 0 && available <= total);
    assert_null(device_alloc(device, total + 1));
    assert_said("not enough memory on");
    assert_said("GiB wanted");
    assert_null(device_alloc(device, SIZE_MAX));
    assert_false(device_reserve_scratch(device, total + 1));
    assert_int_equal(device->scratch_bytes, 0);
    assert_true(device_reserve_scratch(device, 1000));

    device_free(device, a);
    device_free(device, nothing);
    device_free(device, NULL);
    peak = device_peak_allocated(device);
    a = device_alloc(device, bytes); /* no more live than before */
    assert_non_null(a);
    assert_int_equal(device_peak_allocated(device), peak);
    device_free(device, a);
    device_free(device, b);
    device_synchronize(device);
    free(host);
    free(back);
}

static void cpu_device_keeps_its_promises(void **state) {
    (void)state;
    Device *device = device_open(DEVICE_CPU, 0);
    assert_non_null(device);
    assert_int_equal(device->type, DEVICE_CPU);
    assert_true(device->name[0] != '\0' && device->processors >= 1);
    assert_true(device->architecture == 0 && device->stream == NULL);
    check_device(device);

    /* Untouched memory costs nothing. (What else runs here may take some meanwhile.) */
    size_t available, total, after;
    device_memory(device, &available, &total);
    void *arena = device_alloc(device, available / 3);
    assert_non_null(arena);
    device_memory(device, &after, &total);
    assert_true(after > available - available / 6);
    device_free(device, arena);
    device_close(device);
    device_close(NULL);
}

static void gpu_device_keeps_its_promises(void **state) {
    (void)state;
    if (device_count_gpus() == 0) {
        device_open(DEVICE_CUDA, 0);
        print_message("no GPU: %s\n", error_message());
        skip();
    }
    Device *device = device_open(DEVICE_CUDA, 0);
    if (!device) fail_msg("%s", error_message());
    assert_int_equal(device->type, DEVICE_CUDA);
    assert_true(device->name[0] != '\0' && device->processors >= 1);
    assert_true(device->architecture >= 50 && device->stream != NULL);
    check_device(device);
    device_close(device);
}

static void absent_gpu_is_explained(void **state) {
    (void)state;
    error_set("nothing");
    assert_null(device_open(DEVICE_CUDA, device_count_gpus()));
    if (device_count_gpus() == 0)
        assert_said("--device=cpu");
    else
        assert_said("there is no GPU");
    assert_null(device_open(DEVICE_CUDA, 1000));
}

static void types_know_their_sizes(void **state) {
    (void)state;
    assert_int_equal(type_bytes(TYPE_F32), sizeof(float));
    assert_int_equal(type_bytes(TYPE_F64), sizeof(double));
    assert_int_equal(type_bytes(TYPE_BF16), 2);
    assert_int_equal(type_bytes(TYPE_I32), sizeof(int32_t));
    assert_string_equal(type_name(TYPE_BF16), "bf16");
    assert_int_equal(type_accumulator(TYPE_BF16), TYPE_F32);
    assert_int_equal(type_accumulator(TYPE_F32), TYPE_F32);
    assert_int_equal(type_accumulator(TYPE_F64), TYPE_F64);
    assert_string_equal(type_name((DataType)99), "unknown");
    assert_int_equal(type_bytes((DataType)99), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(comparator_fails_on_nan),
        cmocka_unit_test(error_may_quote_itself),
        cmocka_unit_test(philox_gives_the_published_numbers),
        cmocka_unit_test(dropout_keeps_the_stated_fraction),
        cmocka_unit_test(attention_dropout_gives_each_column_its_byte),
        cmocka_unit_test(mixed_keys_are_distinct),
        cmocka_unit_test(permute_is_a_bijection),
        cmocka_unit_test(permute_is_unbiased),
        cmocka_unit_test(normals_have_normal_moments),
        cmocka_unit_test(normal_depends_on_key_and_place_only),
        cmocka_unit_test(sha256_gives_the_known_digests),
        cmocka_unit_test(log_keeps_what_it_can),
        cmocka_unit_test(types_know_their_sizes),
        cmocka_unit_test(cpu_device_keeps_its_promises),
        cmocka_unit_test(gpu_device_keeps_its_promises),
        cmocka_unit_test(absent_gpu_is_explained),
    };
    return cmocka_run_group_tests_name("runtime", tests, enter_scratch, leave_scratch);
}
