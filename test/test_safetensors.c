/* The safetensors reader and writer: what is written reads back, every number type converts
 * exactly, and no file, however wrong, gives more than a sentence. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/safetensors.h"
#include "test/said.h"
#include "test/scratch.h"

static char directory[] = "/tmp/test_safetensors.XXXXXX";
static char path[64];

static int make_place(void **state) {
    (void)state;
    if (!mkdtemp(directory)) return -1;
    snprintf(path, sizeof path, "%s/file", directory);
    return 0;
}

static int remove_place(void **state) {
    (void)state;
    unlink(path);
    return rmdir(directory);
}

/* A file of this header, of this claimed length, and so many bytes of data. */
static void write_raw(uint64_t length, const char *header, size_t data_bytes) {
    size_t n = strlen(header);
    char *bytes = calloc(1, 8 + n + data_bytes);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, n);
    put_file(path, bytes, 8 + n + data_bytes);
    free(bytes);
}

static void assert_refused(const char *sentence) {
    error_set("no message");
    Safetensors *file = safetensors_open(path);
    assert_null(file);
    assert_said(path);
    assert_said(sentence);
}

static const float floats[6] = {1.5f, -2, 0, 3e38f, 1e-45f, -0.0f};
static const int32_t ints[3] = {INT32_MIN, 7, INT32_MAX};
static const int64_t longs[2] = {-5, (int64_t)1 << 40};

static void write_example(void) {
    SafetensorsWriter *writer = safetensors_writer(path);
    safetensors_declare(writer, "floats", "F32", 2, (size_t[]){2, 3});
    safetensors_declare(writer, "empty", "F32", 2, (size_t[]){0, 4});
    safetensors_declare(writer, "a \"quoted\" name", "I32", 1, (size_t[]){3});
    safetensors_declare(writer, "longs", "I64", 1, (size_t[]){2});
    safetensors_declare(writer, "scalar", "F32", 0, NULL);
    assert_true(safetensors_begin(writer));
    assert_true(safetensors_write(writer, floats, 4));
    assert_true(safetensors_write(writer, floats + 1, sizeof floats - 4));
    assert_true(safetensors_write(writer, ints, sizeof ints));
    assert_true(safetensors_write(writer, longs, sizeof longs));
    assert_true(safetensors_write(writer, floats, 4));
    assert_true(safetensors_finish(writer));
}

static void round_trip(void **state) {
    (void)state;
    write_example();
    size_t bytes;
    char *text = file_read(path, 1 << 20, &bytes);
    uint64_t length;
    memcpy(&length, text, 8);
    assert_int_equal(length % 8, 0);
    assert_int_equal(bytes, 8 + length + sizeof floats + sizeof ints + sizeof longs + 4);
    assert_memory_equal(text + 8, "{\"__metadata__\":{\"format\":\"pt\"}", 31);
    free(text);

    Safetensors *file = safetensors_open(path);
    assert_non_null(file);
    assert_int_equal(safetensors_count(file), 5);
    assert_null(safetensors_find(file, "float"));
    const SafetensorsTensor *tensor = safetensors_find(file, "floats");
    assert_string_equal(tensor->dtype, "F32");
    assert_int_equal(tensor->rank, 2);
    assert_int_equal(tensor->shape[0], 2);
    assert_int_equal(tensor->shape[1], 3);
    assert_int_equal(tensor->elements, 6);
    float values[6];
    assert_true(safetensors_read_float(file, tensor, 0, 6, values));
    assert_memory_equal(values, floats, sizeof floats);
    assert_true(safetensors_read_float(file, tensor, 4, 2, values));
    assert_memory_equal(values, floats + 4, 8);
    assert_true(safetensors_read_float(file, tensor, 6, 0, values));
    assert_false(safetensors_read_float(file, tensor, 5, 2, values));
    assert_false(safetensors_read_float(file, tensor, 1, SIZE_MAX, values));
    assert_said("were asked for");

    int32_t integers[3];
    tensor = safetensors_find(file, "a \"quoted\" name");
    assert_true(safetensors_read_int32(file, tensor, 0, 3, integers));
    assert_memory_equal(integers, ints, sizeof ints);
    assert_false(safetensors_read_float(file, tensor, 0, 3, values));
    assert_said("I32");
    tensor = safetensors_find(file, "longs");
    assert_true(safetensors_read_int32(file, tensor, 0, 1, integers));
    assert_int_equal(integers[0], -5);
    assert_false(safetensors_read_int32(file, tensor, 0, 2, integers));
    assert_said("1099511627776");
    assert_false(safetensors_read_int32(file, safetensors_find(file, "floats"), 0, 1, integers));
    assert_int_equal(safetensors_find(file, "empty")->elements, 0);
    assert_int_equal(safetensors_find(file, "scalar")->elements, 1);

    /* In the order of the data. */
    size_t end = 0;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        assert_int_equal(safetensors_at(file, i)->begin, end);
        end += safetensors_at(file, i)->bytes;
    }
    safetensors_close(file);
}

/* Cut at every length, and one byte too long. */
static void truncation(void **state) {
    (void)state;
    write_example();
    size_t bytes;
    char *text = file_read(path, 1 << 20, &bytes);
    for (size_t n = 0; n < bytes; n++) {
        put_file(path, text, n);
        assert_refused("");
    }
    text = realloc(text, bytes + 1);
    put_file(path, text, bytes + 1);
    assert_refused("after its end");
    free(text);

    /* Cut between the opening and the read. */
    write_example();
    Safetensors *file = safetensors_open(path);
    assert_int_equal(truncate(path, (off_t)bytes - 10), 0);
    int32_t values[2];
    assert_false(safetensors_read_int32(file, safetensors_find(file, "longs"), 0, 2, values));
    assert_said("cut");
    safetensors_close(file);
}

/* Every single-bit error of a header opens or is refused with a sentence; the sanitizers watch. */
static void flipped_bits(void **state) {
    (void)state;
    write_example();
    size_t bytes, refused = 0;
    char *text = file_read(path, 1 << 20, &bytes);
    uint64_t length;
    memcpy(&length, text, 8);
    for (size_t bit = 0; bit < 8 * (8 + length); bit++) {
        text[bit / 8] ^= (char)(1 << bit % 8);
        put_file(path, text, bytes);
        error_set("%s", "");
        Safetensors *file = safetensors_open(path);
        assert_true(file || *error_message());
        refused += !file;
        safetensors_close(file);
        text[bit / 8] ^= (char)(1 << bit % 8);
    }
    assert_true(refused > length);
    free(text);
}

#define T(dtype, shape, offsets) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void hostile_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *sentence; /* NULL: a good file */
    } cases[] = {
        {"{\"a\":" T("F32", "[2]", "[0,8]") "}", 8, NULL},
        {"{\"b\":" T("F32", "[1]", "[4,8]") ",\"a\":" T("F32", "[1]", "[0,4]") "}", 8, NULL},
        {"{}", 0, NULL},
        {"{}    ", 0, NULL},
        {"", 0, "not a JSON object"},
        {"[]", 0, "not a JSON object"},
        {"7", 0, "not a JSON object"},
        {"{", 0, "not a JSON object"},
        {"{} {}", 0, "not a JSON object"},
        {"{\"a\":" T("F32", "[2]", "[0,8]"), 8, "not a JSON object"},
        {"{\"a\":3}", 0, "not an object"},
        {"{\"__metadata__\":3}", 0, "not an object"},
        {"{\"a\\u001b[2J\":" T("F32", "[2]", "[0,8]") "}", 8, "control character"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "exactly"},
        {"{\"a\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "exactly"},
        {"{\"a\":" T("F32", "8", "[0,8]") "}", 8, "exactly"},
        {"{\"a\":" T("F32", "[2]", "8") "}", 8, "exactly"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "exactly"},
        {"{\"a\":" T("F33", "[2]", "[0,8]") "}", 8, "unknown dtype \"F33\""},
        {"{\"a\":" T("f32", "[2]", "[0,8]") "}", 8, "unknown dtype"},
        {"{\"a\":" T("", "[2]", "[0,8]") "}", 8, "unknown dtype"},
        {"{\"a\":" T("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", 8, "more than 8 dimensions"},
        {"{\"a\":" T("F32", "[-2]", "[0,8]") "}", 8, "not a size"},
        {"{\"a\":" T("F32", "[2.5]", "[0,10]") "}", 10, "not a size"},
        {"{\"a\":" T("F32", "[\"2\"]", "[0,8]") "}", 8, "not a size"},
        {"{\"a\":" T("F32", "[null]", "[0,8]") "}", 8, "not a size"},
        {"{\"a\":" T("F32", "[1e300]", "[0,8]") "}", 8, "not a size"},
        {"{\"a\":" T("F32", "[9007199254740994]", "[0,8]") "}", 8, "not a size"},
        {"{\"a\":" T("F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "too large"},
        {"{\"a\":" T("U8", "[4294967296,4294967296]", "[0,0]") "}", 0, "too large"},
        {"{\"a\":" T("F64", "[2147483648,1073741824]", "[0,0]") "}", 0, "too large"},
        {"{\"a\":" T("F32", "[2]", "[0,8,16]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[0]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[8,0]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[-8,0]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[0.5,8.5]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[0,1e400]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[2]", "[9007199254740992,9007199254741000]") "}", 8, "[begin, end]"},
        {"{\"a\":" T("F32", "[3]", "[0,8]") "}", 8, "8 bytes by its data_offsets but 12"},
        {"{\"a\":" T("F16", "[2]", "[0,8]") "}", 8, "8 bytes by its data_offsets but 4"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") "}", 7, "cut short"},
        {"{\"a\":" T("F32", "[2251799813685248]", "[0,9007199254740992]") "}", 8, "cut short"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") "}", 9, "after its end"},
        {"{\"a\":" T("F32", "[2]", "[4,12]") "}", 12, "a gap"},
        {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[8,12]") "}", 12, "a gap"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[2]", "[4,12]") "}", 12, "overlap"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[2]", "[0,8]") "}", 8, "overlap"},
        {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"a\":" T("F32", "[1]", "[4,8]") "}", 8, "twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_raw(strlen(cases[i].header), cases[i].header, cases[i].data_bytes);
        if (cases[i].sentence) {
            assert_refused(cases[i].sentence);
        } else {
            Safetensors *file = safetensors_open(path);
            if (!file) fail_msg("case %zu: %s", i, error_message());
            safetensors_close(file);
        }
    }
}

static void hostile_lengths(void **state) {
    (void)state;
    const uint64_t lengths[] = {
        9, 1000, 1u << 31, (uint64_t)1 << 60, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_raw(lengths[i], "{}", 6);
        assert_refused("header would take");
    }
    /* There in full, but larger than the format allows: refused without being read. */
    write_raw(100000001, "{}", 0);
    assert_int_equal(truncate(path, 200000000), 0);
    assert_refused("header would take");

    /* Nested past what the JSON library follows. */
    size_t depth = 100000;
    char *deep = malloc(depth + 1);
    memset(deep, '[', depth);
    deep[depth] = 0;
    write_raw(depth, deep, 0);
    free(deep);
    assert_refused("not a JSON object");

    /* A 0 byte must not end the header early. */
    put_file(path, "\3\0\0\0\0\0\0\0{}\0", 11);
    assert_refused("not a JSON object");

    unlink(path);
    assert_refused("No such file");
    assert_null(safetensors_open(directory));
    assert_said("not a file");
}

/* Values stored as `dtype` and read as floats, in pieces that are no divisor of anything. */
static void convert(const char *dtype, const void *data, size_t size, size_t n, float *values) {
    SafetensorsWriter *writer = safetensors_writer(path);
    safetensors_declare(writer, "x", dtype, 1, &n);
    assert_true(safetensors_begin(writer) && safetensors_write(writer, data, n * size));
    assert_true(safetensors_finish(writer));
    Safetensors *file = safetensors_open(path);
    assert_non_null(file);
    const SafetensorsTensor *tensor = safetensors_find(file, "x");
    size_t split = n / 3;
    assert_true(safetensors_read_float(file, tensor, 0, split, values));
    assert_true(safetensors_read_float(file, tensor, split, n - split, values + split));
    safetensors_close(file);
}

enum { CODES = 65536 };

/* The value of a code by definition: (-1)^s 2^(e-bias) (1 + m / 2^bits), subnormals, infinities. */
static double from_definition(unsigned code, int exponent_bits, int mantissa_bits) {
    int top = (1 << exponent_bits) - 1, bias = top / 2;
    int e = (int)(code >> mantissa_bits) & top, m = (int)code & ((1 << mantissa_bits) - 1);
    double sign = code >> 15 ? -1 : 1;
    if (e == top) return m ? NAN : sign * INFINITY;
    if (e == 0) return sign * ldexp(m, 1 - bias - mantissa_bits);
    return sign * ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
}

/* Writes floats as `dtype` and gives back the codes that the file holds. */
static void store(const char *dtype, const float *values, size_t n, uint16_t *codes) {
    SafetensorsWriter *writer = safetensors_writer(path);
    safetensors_declare(writer, "x", dtype, 1, &n);
    assert_true(safetensors_begin(writer) && safetensors_write_float(writer, dtype, values, n));
    assert_true(safetensors_finish(writer));
    size_t bytes;
    char *text = file_read(path, 1 << 22, &bytes);
    memcpy(codes, text + bytes - 2 * n, 2 * n);
    free(text);
}

/* Between neighbours lies the half that is even; what is nearer to one becomes that one. Beyond the
 * largest the neighbour is where the next binary exponent would begin, and its code infinity. */
static void rounding(void **state) {
    (void)state;
    static const struct {
        const char *dtype;
        int exponent_bits, mantissa_bits;
    } types[] = {{"F16", 5, 10}, {"BF16", 8, 7}};
    static float values[4 * CODES];
    static uint16_t codes[4 * CODES], expected[4 * CODES];
    for (int type = 0; type < 2; type++) {
        int bits = types[type].mantissa_bits, top = (1 << types[type].exponent_bits) - 1;
        size_t n = 0;
        for (unsigned code = 0; code < CODES; code++) {
            if ((code & 0x7FFF) >= (unsigned)top << bits) continue;
            double low = from_definition(code, types[type].exponent_bits, bits);
            double high = from_definition(code + 1, types[type].exponent_bits, bits);
            if (isinf(high)) high = copysign(ldexp(1, top / 2 + 1), high);
            float middle = (float)(low / 2 + high / 2);
            const float four[4] = {
                (float)low, nextafterf(middle, (float)low), middle,
                isinf((float)high) ? INFINITY * (float)high : nextafterf(middle, (float)high)};
            const unsigned rounded[4] = {code, code, code + (code & 1), code + 1};
            for (int i = 0; i < 4; i++, n++)
                values[n] = four[i], expected[n] = (uint16_t)rounded[i];
        }
        values[n] = INFINITY, expected[n++] = (uint16_t)(top << bits);
        store(types[type].dtype, values, n, codes);
        assert_memory_equal(codes, expected, n * sizeof *codes);
        values[0] = NAN;
        store(types[type].dtype, values, 1, codes);
        assert_true(isnan(from_definition(codes[0], types[type].exponent_bits, bits)));
    }
}

static void half_precision(void **state) {
    (void)state;
    static uint16_t codes[CODES];
    static float values[CODES];
    for (unsigned i = 0; i < CODES; i++) codes[i] = (uint16_t)i;
    static const struct {
        const char *dtype;
        int exponent_bits, mantissa_bits;
    } types[] = {{"F16", 5, 10}, {"BF16", 8, 7}};
    for (int type = 0; type < 2; type++) {
        convert(types[type].dtype, codes, 2, CODES, values);
        for (unsigned i = 0; i < CODES; i++) {
            double expected =
                from_definition(i, types[type].exponent_bits, types[type].mantissa_bits);
            if (isnan(expected))
                assert_true(isnan(values[i]));
            else
                assert_true(values[i] == expected && !signbit(values[i]) == !signbit(expected));
        }
    }
}

static void double_precision(void **state) {
    (void)state;
    static double doubles[10000];
    static float values[10000];
    for (int i = 0; i < 10000; i++) doubles[i] = ldexp(1.0 / (i + 1), i % 200 - 100);
    doubles[5000] = INFINITY;
    convert("F64", doubles, 8, 10000, values);
    for (int i = 0; i < 10000; i++) assert_true(values[i] == (float)doubles[i]);
}

/* Each misuse fails in _finish at the latest, with a sentence and without a file. */
static void writer_misuse(void **state) {
    (void)state;
    static const size_t two = 2, huge = SIZE_MAX / 2;
    for (int misuse = 0; misuse < 7; misuse++) {
        unlink(path);
        error_set("%s", "");
        SafetensorsWriter *writer = safetensors_writer(path);
        safetensors_declare(writer, "a", misuse == 0 ? "F33" : "F32", 1,
                            misuse == 1 ? &huge : &two);
        safetensors_declare(writer, misuse == 2 ? "a" : "b", "F32", misuse == 3 ? 9 : 1,
                            (size_t[9]){2, 2, 2, 2, 2, 2, 2, 2, 2});
        bool begun = misuse == 4 ? false : safetensors_begin(writer);
        assert_int_equal(begun, misuse > 4);
        if (begun) {
            assert_true(safetensors_write(writer, floats, 12));
            if (misuse == 5) assert_false(safetensors_write(writer, floats, 8)); /* too many */
        }
        assert_false(safetensors_finish(writer));
        assert_said(path);
        assert_int_not_equal(access(path, F_OK), 0);
    }
    char nowhere[128];
    snprintf(nowhere, sizeof nowhere, "%s/nowhere/file", directory);
    SafetensorsWriter *writer = safetensors_writer(nowhere);
    assert_false(safetensors_begin(writer));
    assert_said("No such file");
    assert_false(safetensors_finish(writer));
}

/* A limit on the size of files stands for a full disk. */
static void full_disk(void **state) {
    (void)state;
    unlink(path);
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 1000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    static const float zeros[1000];
    SafetensorsWriter *writer = safetensors_writer(path);
    safetensors_declare(writer, "a", "F32", 1, (size_t[]){1000});
    bool begun = safetensors_begin(writer),
         written = safetensors_write(writer, zeros, sizeof zeros);
    bool finished = safetensors_finish(writer);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_DFL);
    assert_true(begun);
    assert_false(written);
    assert_false(finished);
    assert_said("File too large");
    assert_int_not_equal(access(path, F_OK), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),      cmocka_unit_test(truncation),
        cmocka_unit_test(flipped_bits),    cmocka_unit_test(hostile_headers),
        cmocka_unit_test(hostile_lengths), cmocka_unit_test(half_precision),
        cmocka_unit_test(rounding),        cmocka_unit_test(double_precision),
        cmocka_unit_test(writer_misuse),   cmocka_unit_test(full_disk),
    };
    return cmocka_run_group_tests_name("safetensors", tests, make_place, remove_place);
}
