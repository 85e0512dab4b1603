/* The tokenizers of characters and of bytes: text to tokens and back, and their tokenizer.json,
 * whole and damaged. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/tokenizer.h"
#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

/* ---- tokenizers ---- */

/* Characters of one to four bytes, the ends of each range among them, in malloc'd memory. */
static char *random_text(size_t characters, size_t *bytes) {
    static const uint32_t edge[] = {0,      0x7F,   0x80,   0x7FF,   0x800,
                                    0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF};
    static const uint32_t bound[] = {0x80, 0x800, 0xD800, UTF8_CODES};
    char *text = malloc(4 * (characters + 10));
    size_t n = 0;
    for (uint32_t i = 0; i < 10; i++) n += utf8_encode(edge[i], text + n);
    for (uint32_t i = 0; i < characters; i++) {
        uint32_t code = noise(2 * i) % bound[noise(2 * i + 1) % 4];
        if (code >= 0xD800 && code < 0xE000) code = '\n';
        n += utf8_encode(code, text + n);
    }
    *bytes = n;
    return text;
}

static void test_bytes(void **state) {
    (void)state;
    Tokenizer *tokenizer = tokenizer_bytes();
    assert_string_equal(tokenizer_kind(tokenizer), "bytes");
    assert_int_equal(tokenizer_vocabulary(tokenizer), 256);
    char text[4096];
    for (uint32_t i = 0; i < sizeof text; i++) text[i] = (char)noise(i);
    assert_round_trip(tokenizer, text, sizeof text);
    size_t count;
    int32_t *ids = tokenizer_encode(tokenizer, "\xff\0A", 3, &count);
    assert_int_equal(count, 3);
    assert_int_equal(ids[0], 255);
    assert_int_equal(ids[1], 0);
    assert_int_equal(ids[2], 'A');
    free(ids);
    tokenizer_free(tokenizer);
}

static void test_characters(void **state) {
    (void)state;
    const char text[] = "b\r\né a😀é";
    Tokenizer *tokenizer = tokenizer_characters(text, strlen(text));
    assert_string_equal(tokenizer_kind(tokenizer), "char");
    assert_int_equal(tokenizer_vocabulary(tokenizer), 7);
    /* In code point order, the carriage return kept. */
    static const char *const order[] = {"\n", "\r", " ", "a", "b", "é", "😀"};
    for (int32_t id = 0; id < 7; id++) {
        size_t bytes;
        const char *token = tokenizer_decode(tokenizer, id, &bytes);
        assert_int_equal(bytes, strlen(order[id]));
        assert_memory_equal(token, order[id], bytes);
    }
    assert_round_trip(tokenizer, text, strlen(text));
    size_t count = 9, bytes = 9;
    int32_t *ids = tokenizer_encode(tokenizer, "", 0, &count);
    assert_non_null(ids);
    assert_int_equal(count, 0);
    free(ids);
    assert_string_equal(tokenizer_decode(tokenizer, 7, &bytes), "");
    assert_int_equal(bytes, 0);
    assert_string_equal(tokenizer_decode(tokenizer, -1, &bytes), "");
    tokenizer_free(tokenizer);

    size_t length;
    char *random = random_text(5000, &length);
    tokenizer = tokenizer_characters(random, length);
    assert_non_null(tokenizer);
    assert_round_trip(tokenizer, random, length);
    tokenizer_free(tokenizer);
    free(random);
}

static void test_unknown_character(void **state) {
    (void)state;
    Tokenizer *tokenizer = tokenizer_characters("abc", 3);
    size_t count;
    assert_null(tokenizer_encode(tokenizer, "abécd", 6, &count));
    assert_said("'é'");
    assert_said("U+00E9");
    assert_said("byte 2");
    assert_null(tokenizer_encode(tokenizer, "a\tb", 3, &count));
    assert_said("U+0009");
    assert_null(tokenizer_encode(tokenizer, "ab\xC3\xA9", 3, &count)); /* cut inside a character */
    assert_said("offset 2");
    tokenizer_free(tokenizer);
}

static void test_not_utf8(void **state) {
    (void)state;
    static const char *const bad[] = {
        "\x80",             /* a continuation first */
        "\xC3",             /* cut short */
        "\xE2\x82",         /* cut short */
        "\xC3(",            /* no continuation */
        "\xC0\xAF",         /* overlong / */
        "\xE0\x9F\xBF",     /* overlong U+07FF */
        "\xF0\x8F\xBF\xBF", /* overlong U+FFFF */
        "\xED\xA0\x80",     /* a surrogate */
        "\xF4\x90\x80\x80", /* above U+10FFFF */
        "\xF8\x88\x80\x80\x80",
        "\xFE",
        "\xFF",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[16];
        size_t bytes = (size_t)snprintf(text, sizeof text, "aé%s", bad[i]);
        assert_null(tokenizer_characters(text, bytes));
        assert_said("offset 3");
    }
    assert_null(tokenizer_characters("", 0));
    assert_said("empty");
}

static void test_tinyshakespeare(void **state) {
    (void)state;
    char path[FILE_PATH_BYTES];
    if (!find_tinyshakespeare(path)) skip();
    size_t bytes;
    char *text = file_read(path, SIZE_MAX, &bytes);
    assert_non_null(text);
    Tokenizer *tokenizer = tokenizer_characters(text, bytes);
    assert_non_null(tokenizer);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 65);
    assert_round_trip(tokenizer, text, bytes);
    tokenizer_free(tokenizer);
    free(text);
}

/* ---- tokenizer.json ---- */

/* The form that the tokenizers library (0.23) was seen to load, to encode with as this program
 * does, and to save again as the same JSON value. */
static const char golden[] =
    "{\n"
    "  \"version\": \"1.0\",\n"
    "  \"truncation\": null,\n"
    "  \"padding\": null,\n"
    "  \"added_tokens\": [],\n"
    "  \"normalizer\": null,\n"
    "  \"pre_tokenizer\": {\"type\": \"Split\", \"pattern\": {\"Regex\": \"[\\\\s\\\\S]\"}, "
    "\"behavior\": \"Isolated\", \"invert\": false},\n"
    "  \"post_processor\": null,\n"
    "  \"decoder\": {\"type\": \"Fuse\"},\n"
    "  \"model\": {\n"
    "    \"type\": \"WordLevel\",\n"
    "    \"vocab\": {\n"
    "      \"\\u000a\": 0,\n"
    "      \"\\\"\": 1,\n"
    "      \"\\\\\": 2,\n"
    "      \"é\": 3\n"
    "    },\n"
    "    \"unk_token\": \"[UNK]\"\n"
    "  }\n"
    "}\n";

static char *saved_json(const Tokenizer *tokenizer, const char *directory) {
    assert_true(tokenizer_save(tokenizer, directory));
    char path[256];
    snprintf(path, sizeof path, "%s/tokenizer.json", directory);
    size_t bytes;
    char *json = file_read(path, SIZE_MAX, &bytes);
    assert_non_null(json);
    assert_int_equal(strlen(json), bytes);
    return json;
}

static void test_save_and_load(void **state) {
    (void)state;
    const char *directory = "save";
    make_directory(directory);
    Tokenizer *small = tokenizer_characters("\\\n\"é", 5);
    char *json = saved_json(small, directory);
    assert_string_equal(json, golden);
    free(json);
    tokenizer_free(small);

    size_t bytes;
    char *text = random_text(3000, &bytes);
    Tokenizer *saved[] = {tokenizer_characters(text, bytes), tokenizer_bytes()};
    for (int i = 0; i < 2; i++) {
        free(saved_json(saved[i], directory)); /* replaces the one before */
        Tokenizer *loaded = tokenizer_load(directory);
        assert_non_null(loaded);
        assert_string_equal(tokenizer_kind(loaded), tokenizer_kind(saved[i]));
        assert_int_equal(tokenizer_vocabulary(loaded), tokenizer_vocabulary(saved[i]));
        size_t n, m;
        int32_t *a = tokenizer_encode(saved[i], text, bytes, &n);
        int32_t *b = tokenizer_encode(loaded, text, bytes, &m);
        assert_int_equal(n, m);
        assert_memory_equal(a, b, n * sizeof *a);
        assert_round_trip(loaded, text, bytes);
        free(a);
        free(b);
        tokenizer_free(loaded);
    }
    /* ByteLevel's names of bytes: visible ones are themselves, the others follow from U+0100. */
    json = saved_json(saved[1], directory);
    static const char *const names[] = {"\"Ā\": 0,",   "\"Ċ\": 10,",    "\"Ġ\": 32,",
                                        "\"!\": 33,",  "\"\\\"\": 34,", "\"~\": 126,",
                                        "\"ġ\": 127,", "\"ł\": 160,",   "\"¡\": 161,",
                                        "\"Ń\": 173,", "\"®\": 174,",   "\"ÿ\": 255\n"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strstr(json, names[i]) == NULL) fail_msg("%s is not in the vocabulary", names[i]);
    free(json);
    free(text);
    for (int i = 0; i < 2; i++) tokenizer_free(saved[i]);

    assert_null(tokenizer_load("nowhere"));
    assert_said("nowhere/tokenizer.json");
    Tokenizer *tokenizer = tokenizer_bytes();
    assert_false(tokenizer_save(tokenizer, "nowhere"));
    assert_said("nowhere/tokenizer.json");
    tokenizer_free(tokenizer);
}

static int enter_scratch_with_json(void **state) {
    return enter_scratch(state) != 0 || mkdir("json", 0777) != 0;
}

static Tokenizer *load_json(const char *json, size_t bytes) {
    put_file("json/tokenizer.json", json, bytes);
    return tokenizer_load("json");
}

/* Cut at every length and with every byte damaged, a file is read or refused with a sentence. */
static void test_damaged_json(void **state) {
    (void)state;
    Tokenizer *bytes = tokenizer_bytes();
    char *byte_json = saved_json(bytes, "json");
    tokenizer_free(bytes);
    const char *const whole[] = {golden, byte_json};
    for (int kind = 0; kind < 2; kind++) {
        size_t size = strlen(whole[kind]);
        for (size_t length = 0; length < size - 1; length++) { /* the last byte is a newline */
            assert_null(load_json(whole[kind], length));
            assert_said("tokenizer.json");
        }
    }
    free(byte_json);
    char damaged[sizeof golden];
    static const char values[] = {0, '"', '}', '\\', '9', (char)0xFF};
    for (size_t i = 0; i < sizeof golden - 1; i++)
        for (size_t v = 0; v < sizeof values; v++) {
            memcpy(damaged, golden, sizeof golden);
            damaged[i] = values[v];
            error_set("%s", "");
            Tokenizer *tokenizer = load_json(damaged, sizeof golden - 1);
            if (tokenizer == NULL)
                assert_said("tokenizer.json");
            else
                assert_int_equal(tokenizer_vocabulary(tokenizer), 4);
            tokenizer_free(tokenizer);
        }
    /* Nested more deeply than any parser's stack. */
    char *deep = malloc(100000);
    memset(deep, '[', 100000);
    assert_null(load_json(deep, 100000));
    free(deep);
}

static void test_refused_json(void **state) {
    (void)state;
    static const struct {
        const char *find, *replacement, *said;
    } cases[] = {
        {"\"é\": 3", "\"é\": 4", "the id of \"é\""}, /* 3 is missing */
        {"\"é\": 3", "\"é\": 2", "id 2 is given twice"},
        {"\"é\": 3", "\"é\": -1", "the id of \"é\""},
        {"\"é\": 3", "\"é\": 2.5", "the id of \"é\""},
        {"\"é\": 3", "\"é\": 1e300", "the id of \"é\""},
        {"\"é\": 3", "\"é\": \"3\"", "the id of \"é\""},
        {"\"é\": 3", "\"é\": null", "the id of \"é\""},
        {"\"é\": 3", "\"\\\\\": 3", "given twice"},
        {"\"é\": 3", "\"éé\": 3", "not one character"},
        {"\"é\": 3", "\"\xC3\": 3", "not one character"},
        {"\"é\": 3", "\"é\": 3, \"the\": 4", "not one character"},
        {"\"vocab\"", "\"words\"", "no \"vocab\""},
        {"\"model\"", "\"mode\"", "no \"model\""},
        {"\"type\": \"WordLevel\"", "\"type\": 3", "no \"type\""},
        {"WordLevel", "Unigram", "Unigram tokenizer, which is not supported"},
        {"WordLevel\"", "BPE\", \"merges\": [\"a b\", \"c d\"]", "\"pre_tokenizer\" is"},
        {"\"added_tokens\": []", "\"added_tokens\": [{\"id\": 4}]", "\"added_tokens\" is [{"},
        {"\"normalizer\": null", "\"normalizer\": {\"type\": \"Lowercase\"}", "\"normalizer\""},
        {"Isolated", "Removed", "\"pre_tokenizer\""},
        {"\"pre_tokenizer\"", "\"pre_tokenise\"", "\"pre_tokenizer\" is missing"},
        {"[UNK]", "é", "\"unk_token\""},
        {"  }\n}\n", "  }\n}\n}", "not JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[2 * sizeof golden];
        const char *at = strstr(golden, cases[i].find);
        assert_non_null(at);
        int bytes = snprintf(json, sizeof json, "%.*s%s%s", (int)(at - golden), golden,
                             cases[i].replacement, at + strlen(cases[i].find));
        Tokenizer *tokenizer = load_json(json, (size_t)bytes);
        if (tokenizer != NULL) fail_msg("accepted: %s", cases[i].replacement);
        assert_said("tokenizer.json");
        assert_said(cases[i].said);
    }
    static const char *const others[] = {"[]",
                                         "3",
                                         "null",
                                         "{}",
                                         "{\"model\": []}",
                                         "{\"model\": {\"type\": \"WordLevel\", \"vocab\": {}}}"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_null(load_json(others[i], strlen(others[i])));

    /* Bytes in another order than their values. */
    Tokenizer *bytes = tokenizer_bytes();
    char *json = saved_json(bytes, "json");
    strstr(json, "\"A\": 65")[1] = 'z';
    strstr(json, "\"z\": 122")[1] = 'A';
    assert_null(load_json(json, strlen(json)));
    assert_said("id 65 is \"z\"");
    /* A byte missing, the ids contiguous all the same. */
    free(json);
    json = saved_json(bytes, "json");
    char *last = strstr(json, ",\n      \"ÿ\": 255");
    memset(last, ' ', strlen(",\n      \"ÿ\": 255"));
    assert_null(load_json(json, strlen(json)));
    assert_said("255 entries");
    tokenizer_free(bytes);
    free(json);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_characters),
        cmocka_unit_test(test_unknown_character),
        cmocka_unit_test(test_not_utf8),
        cmocka_unit_test(test_tinyshakespeare),
        cmocka_unit_test(test_save_and_load),
        cmocka_unit_test(test_damaged_json),
        cmocka_unit_test(test_refused_json),
    };
    return cmocka_run_group_tests_name("tokenizers", tests, enter_scratch_with_json, leave_scratch);
}
