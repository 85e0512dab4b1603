/* The data path: text to tokens and back, tokenizer.json, token shards, and the loader's claim that
 * every token of a lap is served exactly once, whatever the number of ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/corpus.h"
#include "data/dataset.h"
#include "data/loader.h"
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

/* ---- datasets ---- */

static int32_t *counting(size_t count, int32_t first) {
    int32_t *tokens = malloc(count * sizeof *tokens);
    for (size_t i = 0; i < count; i++) tokens[i] = first + (int32_t)i;
    return tokens;
}

static void put_shard(const char *path, size_t count, int32_t first) {
    int32_t *tokens = counting(count, first);
    assert_true(dataset_write_shard(path, tokens, count));
    free(tokens);
}

/* A file with these three header words and then n tokens, all `token`. */
static void put_raw_shard(const char *path, int32_t magic, int32_t version, int32_t count, size_t n,
                          uint16_t token) {
    char data[1024 + 64] = {0};
    memcpy(data, (int32_t[]){magic, version, count}, 12);
    for (size_t i = 0; i < n; i++) memcpy(data + 1024 + 2 * i, &token, 2);
    put_file(path, data, 1024 + 2 * n);
}

static void assert_refused(const char *path, size_t V, bool scan, const char *said) {
    assert_null(dataset_from_shards(path, V, scan));
    assert_said(path);
    assert_said(said);
}

static void test_tokens_in_memory(void **state) {
    (void)state;
    assert_null(dataset_from_tokens(counting(5, 0), 5, 4));
    assert_said("token 4 at position 4");
    assert_null(dataset_from_tokens(counting(5, -1), 5, 4));
    assert_said("token -1 at position 0");
    assert_null(dataset_from_tokens(NULL, 0, 4));
    Dataset *dataset = dataset_from_tokens(counting(5, 0), 5, 5);
    assert_int_equal(dataset_tokens(dataset), 5);
    int32_t out[13];
    assert_true(dataset_read(dataset, 5 * (uint64_t)1000000007 + 3, 13, out));
    for (int i = 0; i < 13; i++) assert_int_equal(out[i], (3 + i) % 5);
    dataset_close(dataset);
}

/* A directory, a pattern and a file; unequal shards; reads over their ends and round the ring. */
static void test_shards(void **state) {
    (void)state;
    const char *directory = "shards";
    make_directory(directory);
    static const size_t sizes[] = {5, 1, 70000, 2}; /* the third takes several pieces to read */
    size_t N = 0;
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "shards/part_%d.bin", i);
        int32_t *tokens = malloc(sizes[i] * sizeof *tokens);
        for (size_t k = 0; k < sizes[i]; k++) tokens[k] = (int32_t)((N + k) % 65536);
        assert_true(dataset_write_shard(name, tokens, sizes[i]));
        free(tokens);
        N += sizes[i];
    }
    put_file("shards/readme.txt", "not a shard", 11);
    const char *pattern[] = {directory, "shards/part_[0-3].bin"};
    int32_t *out = malloc(3 * N * sizeof *out);
    for (int p = 0; p < 2; p++) {
        Dataset *dataset = dataset_from_shards(pattern[p], 65536, /*scan=*/true);
        if (dataset == NULL) fail_msg("%s", error_message());
        assert_int_equal(dataset_tokens(dataset), N);
        for (uint64_t start = 0; start < 10; start++) {
            assert_true(dataset_read(dataset, start, 9, out));
            for (size_t i = 0; i < 9; i++) assert_int_equal(out[i], (start + i) % N % 65536);
        }
        assert_true(dataset_read(dataset, 7 * N + N - 3, 2 * N + 11, out));
        for (size_t i = 0; i < 2 * N + 11; i++) assert_int_equal(out[i], (N - 3 + i) % N % 65536);
        dataset_close(dataset);
    }
    free(out);
    Dataset *one = dataset_from_shards("shards/part_0.bin", 5, /*scan=*/true);
    assert_int_equal(dataset_tokens(one), 5);
    dataset_close(one);
}

/* A directory that exists is itself in a pattern, even if it looks like one. */
static void test_directory_like_a_pattern(void **state) {
    (void)state;
    make_directory("odd[1]");
    make_directory("odd[1]/a*\\?");
    make_directory("odd1");
    put_shard("odd[1]/a*\\?/part_0.bin", 5, 0);
    put_shard("odd[1]/a*\\?/part_1.bin", 6, 0);
    put_shard("odd1/part_0.bin", 7, 0);
    const struct {
        const char *pattern;
        size_t tokens;
    } cases[] = {{"odd[1]/a*\\?/part_*.bin", 11},    {"odd[1]/*/part_[1].bin", 6},
                 {"odd[1]/a*\\?/part_0.bin", 5},     {"odd[1]/a*\\?", 11},
                 {"./odd[1]/a*\\?//part_?.bin", 11}, {"od[d]1/part_*.bin", 7},
                 {"odd\\[1]/*/part_0.bin", 5}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Dataset *dataset = dataset_from_shards(cases[i].pattern, 10, /*scan=*/true);
        if (dataset == NULL) fail_msg("%s", error_message());
        assert_int_equal(dataset_tokens(dataset), cases[i].tokens);
        dataset_close(dataset);
    }
    put_file("text[1].txt", "text", 4);
    assert_false(corpus_is_shards("text[1].txt"));
    assert_true(corpus_is_shards("odd[1]"));
    assert_true(corpus_is_shards("odd*"));
}

static void test_packed_texts(void **state) {
    (void)state;
    static const char *const names[] = {"lines.jsonl", "lines.ndjson.gz", "packed.txt"};
    put_file("lines.jsonl", "{}\n", 3);
    put_file("lines.ndjson.gz", "\x1f\x8b\x08", 3);
    put_file("packed.txt", "\x1f\x8b\x08", 3);
    Corpus corpus;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        assert_false(corpus_open_text(&corpus, names[i], tokenizer_bytes(), "", 0));
        assert_said(names[i]);
        assert_said("use tokenize first");
    }
    put_file("half.txt", "\x1f magic", 7);
    assert_true(corpus_open_text(&corpus, "half.txt", NULL, "bytes", 0));
    corpus_close(&corpus);
}

static void test_refused_shards(void **state) {
    (void)state;
    make_directory("bad");
    const char *path = "bad/a.bin";
    put_raw_shard(path, 20240521, 1, 4, 4, 0);
    assert_refused(path, 10, false, "20240521, expected 20240520");
    put_file(path, "First Citizen: ...", 18);
    assert_refused(path, 10, false, "\"First Citize\"");
    put_file(path, "", 0);
    assert_refused(path, 10, false, "0 bytes");
    put_raw_shard(path, 20240520, 2, 4, 4, 0);
    assert_refused(path, 10, false, "version 2, expected 1");
    put_raw_shard(path, 20240520, 1, 0, 0, 0);
    assert_refused(path, 10, false, "0 tokens");
    put_raw_shard(path, 20240520, 1, -4, 4, 0);
    assert_refused(path, 10, false, "-4 tokens");
    put_raw_shard(path, 20240520, 1, 5, 4, 0);
    assert_refused(path, 10, false, "1032 bytes, expected 1034 for the 5 tokens");
    put_raw_shard(path, 20240520, 1, 3, 4, 0);
    assert_refused(path, 10, false, "1032 bytes, expected 1030 for the 3 tokens");
    assert_int_equal(truncate(path, 1023), 0);
    assert_refused(path, 10, false, "1023 bytes");
    assert_refused("bad/nothing*", 10, false, "no such file");
    assert_int_equal(mkfifo("pipe.bin", 0600), 0); /* must not be waited for */
    assert_refused("pipe.bin", 10, false, "is not a file");
    make_directory("none");
    assert_refused("none", 10, false, "no token shards");

    /* Tokens outside the vocabulary: found by the scan, or by the read that meets them. */
    put_raw_shard(path, 20240520, 1, 4, 4, 9);
    const char *other = "bad/b.bin";
    put_raw_shard(other, 20240520, 1, 4, 4, 10);
    assert_null(dataset_from_shards("bad", 10, /*scan=*/true));
    assert_said(other);
    assert_said("token 10 at position 0 (byte 1024) is not in the vocabulary of 10");
    Dataset *dataset = dataset_from_shards("bad", 10, /*scan=*/false);
    assert_non_null(dataset);
    int32_t out[8];
    assert_true(dataset_read(dataset, 0, 4, out));
    assert_false(dataset_read(dataset, 3, 4, out));
    assert_said(other);

    /* Cut short after it was opened. */
    assert_int_equal(truncate(path, 1024 + 4), 0);
    assert_true(dataset_read(dataset, 0, 2, out));
    assert_false(dataset_read(dataset, 1, 2, out));
    assert_said(path);
    dataset_close(dataset);
}

static void test_write_shard(void **state) {
    (void)state;
    make_directory("write");
    const char *path = "write/a.bin";
    put_shard(path, 3, 65533);
    struct stat before, after;
    assert_int_equal(stat(path, &before), 0);
    assert_int_equal(before.st_size, 1024 + 6);
    /* What cannot be written leaves the old one alone. */
    assert_false(dataset_write_shard(path, (int32_t[]){1, 65536}, 2));
    assert_said("token 65536 at position 1");
    assert_false(dataset_write_shard(path, (int32_t[]){-1}, 1));
    assert_false(dataset_write_shard(path, NULL, 0));
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    put_shard(path, 4, 0);
    assert_false(dataset_write_shard("write/no/a.bin", (int32_t[]){1}, 1));
    assert_said("write/no/a.bin");
    make_directory("write/taken"); /* the last step, the rename, fails */
    assert_false(dataset_write_shard("write/taken", (int32_t[]){1}, 1));
    assert_said("write/taken");
    assert_int_equal(rmdir("write/taken"), 0);
    /* Nothing temporary stays: the directory holds one shard, the new one. */
    run_shell("test \"$(ls write)\" = a.bin");
    Dataset *dataset = dataset_from_shards("write", 4, /*scan=*/true);
    assert_int_equal(dataset_tokens(dataset), 4);
    dataset_close(dataset);
}

/* ---- the loader: token i of the ring is i, so that a token tells its place ---- */

enum { LAPS = 4, MAX_ROWS = 3 * 5, MAX_T = 64 };

static Loader loader_of(const Dataset *dataset, size_t B, size_t T, LoaderOrder order) {
    Loader loader = {.dataset = dataset, .B = B, .T = T, .ranks = 1, .order = order, .seed = 42};
    return loader;
}

/* Serves LAPS laps to all the ranks and counts how often each token is an input. Lap e of the ring
 * is [eN, (e+1)N) of the endless tiling; the window at place p belongs to lap floor(pT/N). */
static void serve(const Dataset *dataset, size_t T, size_t B, size_t ranks, LoaderOrder order) {
    size_t N = dataset_tokens(dataset), rows = ranks * B;
    uint64_t places = (LAPS * N + T - 1) / T, batches = (places + rows - 1) / rows;
    size_t tiled = (batches * rows + N / T + 2) * T + N;
    unsigned char *served = calloc(tiled, 1);
    int32_t tokens[MAX_ROWS * MAX_T], targets[MAX_ROWS * MAX_T];
    int32_t all_tokens[MAX_ROWS * MAX_T], all_targets[MAX_ROWS * MAX_T];
    Loader all = loader_of(dataset, rows, T, order), loader[5];
    for (size_t r = 0; r < ranks; r++) {
        loader[r] = loader_of(dataset, B, T, order);
        loader[r].rank = r;
        loader[r].ranks = ranks;
        assert_true(loader_check(&loader[r]));
    }
    for (uint64_t i = 0; i < batches; i++) {
        for (size_t r = 0; r < ranks; r++)
            assert_true(loader_next(&loader[r], tokens + r * B * T, targets + r * B * T));
        /* One rank with all the rows is served the same. */
        assert_true(loader_next(&all, all_tokens, all_targets));
        assert_memory_equal(tokens, all_tokens, rows * T * sizeof *tokens);
        assert_memory_equal(targets, all_targets, rows * T * sizeof *targets);
        for (size_t row = 0; row < rows; row++) {
            uint64_t place = i * rows + row, start = place * T / N * N + (size_t)tokens[row * T];
            for (size_t t = 0; t < T; t++) {
                assert_int_equal(tokens[row * T + t], (start + t) % N);
                assert_int_equal(targets[row * T + t], (start + t + 1) % N);
                assert_true(start + t < tiled);
                served[start + t]++;
            }
        }
    }
    for (size_t i = 0; i < LAPS * N; i++)
        if (served[i] != 1)
            fail_msg("N %zu T %zu B %zu ranks %zu: token %zu of lap %zu served %d times", N, T, B,
                     ranks, i % N, i / N, served[i]);
    for (size_t i = LAPS * N; i < tiled; i++) assert_true(served[i] <= 1);
    free(served);
}

static void test_exactly_once(void **state) {
    (void)state;
    static const struct {
        size_t N, T;
    } shape[] = {{2, 1}, {7, 1}, {12, 4}, {13, 4}, {65, 64}, {127, 64}, {1000, 7}, {1024, 64}};
    static const size_t ranks[] = {1, 2, 3, 5};
    for (size_t s = 0; s < sizeof shape / sizeof *shape; s++) {
        size_t N = shape[s].N;
        Dataset *dataset = dataset_from_tokens(counting(N, 0), N, N);
        for (size_t r = 0; r < 4; r++)
            for (size_t B = 1; B <= 3; B++) {
                serve(dataset, shape[s].T, B, ranks[r], LOADER_SEQUENTIAL);
                serve(dataset, shape[s].T, B, ranks[r], LOADER_SHUFFLED);
            }
        dataset_close(dataset);
    }
}

static void test_resume(void **state) {
    (void)state;
    Dataset *dataset = dataset_from_tokens(counting(1000, 0), 1000, 1000);
    Loader going_on = loader_of(dataset, 3, 7, LOADER_SHUFFLED), resumed = going_on;
    int32_t tokens[2][21], targets[2][21];
    resumed.next = 95;
    for (uint64_t i = 0; i < 300; i++) {
        assert_int_equal(going_on.next, i);
        assert_true(loader_next(&going_on, tokens[0], targets[0]));
        if (i < 95) continue;
        assert_true(loader_next(&resumed, tokens[1], targets[1]));
        assert_memory_equal(tokens[0], tokens[1], sizeof tokens[0]);
        assert_memory_equal(targets[0], targets[1], sizeof targets[0]);
    }
    dataset_close(dataset);
}

static size_t differing(const uint64_t *a, const uint64_t *b, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += a[i] != b[i];
    return count;
}

static void test_order(void **state) {
    (void)state;
    enum { N = 1000, T = 5, W = N / T }; /* T divides N: each lap has the same windows */
    Dataset *dataset = dataset_from_tokens(counting(N, 0), N, N);
    Loader sequential = loader_of(dataset, 1, T, LOADER_SEQUENTIAL);
    Loader shuffled = loader_of(dataset, 1, T, LOADER_SHUFFLED), seeded = shuffled;
    seeded.seed++;
    uint64_t in_order[W], lap0[W], lap1[W], other_seed[W];
    for (size_t p = 0; p < W; p++) {
        in_order[p] = loader_window(&sequential, p);
        assert_int_equal(in_order[p], p * T);
        lap0[p] = loader_window(&shuffled, p);
        lap1[p] = loader_window(&shuffled, p + W);
        other_seed[p] = loader_window(&seeded, p);
    }
    /* Two random orders of 200 agree in 1 place on average, in more than 20 never. */
    assert_true(differing(in_order, lap0, W) > W - 20);
    assert_true(differing(lap0, lap1, W) > W - 20);
    assert_true(differing(lap0, other_seed, W) > W - 20);
    dataset_close(dataset);

    /* Where T does not divide N, the next lap cuts the text at other places. */
    dataset = dataset_from_tokens(counting(13, 0), 13, 13);
    Loader uneven = loader_of(dataset, 1, 4, LOADER_SEQUENTIAL);
    static const uint64_t starts[] = {0, 4, 8, 12, 3, 7, 11, 2};
    for (uint64_t p = 0; p < 8; p++) assert_int_equal(loader_window(&uneven, p), starts[p]);
    /* Far along the order, where a place times T does not fit 64 bits. */
    uint64_t far = (uint64_t)1 << 63;
    assert_int_equal(loader_window(&uneven, far), far % 13 * 4 % 13);
    uneven.order = LOADER_SHUFFLED;
    assert_true(loader_window(&uneven, far) < 13);
    dataset_close(dataset);
}

static void test_loader_refuses(void **state) {
    (void)state;
    Dataset *dataset = dataset_from_tokens(counting(10, 0), 10, 10);
    Loader loader = loader_of(dataset, 1, 10, LOADER_SHUFFLED);
    assert_false(loader_check(&loader));
    assert_said("has 10 tokens");
    assert_said("T + 1 = 11");
    assert_said("largest T that fits is 9");
    loader.T = 9;
    assert_true(loader_check(&loader));
    loader.rank = 1;
    assert_false(loader_check(&loader));
    dataset_close(dataset);

    /* A read that fails leaves the batch to be asked for again. */
    make_directory("cut");
    put_shard("cut/a.bin", 10, 0);
    dataset = dataset_from_shards("cut", 10, /*scan=*/true);
    assert_int_equal(truncate("cut/a.bin", 1024 + 8), 0);
    loader = loader_of(dataset, 1, 4, LOADER_SEQUENTIAL);
    int32_t tokens[4], targets[4];
    assert_false(loader_next(&loader, tokens, targets));
    assert_said("cut/a.bin");
    assert_int_equal(loader.next, 0);
    dataset_close(dataset);
}

/* ---- data/tinyshakespeare.sh, in a copy of the tree with a network of its own ---- */

/* Runs the script under these settings; its exit status, and its stdout in `out`. */
static int run_script(const char *settings, char *out, size_t size) {
    char command[256];
    snprintf(command, sizeof command,
             "cd tree && env -u TINYSHAKESPEARE %s "
             "PATH=\"$PWD/bin:$PATH\" sh data/tinyshakespeare.sh 2>stderr",
             settings);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    out[fread(out, 1, size - 1, pipe)] = '\0';
    return WEXITSTATUS(pclose(pipe));
}

static void test_script(void **state) {
    (void)state;
    run_shell("mkdir -p tree/data tree/bin tree/build");
    char script[FILE_PATH_BYTES], out[256];
    in_repository(script, "data/tinyshakespeare.sh");
    assert_true(file_copy(script, "tree/data/tinyshakespeare.sh"));
    put_file("tree/b.c", "b\n", 2);
    put_file("tree/README.md", "é\n", 3);
    put_file("tree/build/x.c", "x\n", 2);
    put_file("tree/own.txt", "own\n", 4);
    const char *stand_in = "tree/data/source_text.txt";

    assert_int_equal(run_script("TINYSHAKESPEARE=missing.txt", out, sizeof out), 2);
    assert_string_equal(out, "");

    /* No network, and one that serves something else: the source text, under its own name. */
    static const char *const curl[] = {
        "#!/bin/sh\nexit 6\n",
        "#!/bin/sh\nwhile [ \"$1\" != --output ]; do shift; done; echo '<html>' >\"$2\"\n"};
    for (int i = 0; i < 2; i++) {
        put_file("tree/bin/curl", curl[i], strlen(curl[i]));
        assert_int_equal(chmod("tree/bin/curl", 0755), 0);
        unlink(stand_in);
        assert_int_equal(run_script("", out, sizeof out), 0);
        assert_string_equal(out, "data/source_text.txt\n");
        size_t bytes;
        char *text = file_read(stand_in, 100, &bytes);
        assert_non_null(text);
        assert_string_equal(text, "é\nb\n");
        free(text);
        assert_false(file_exists("tree/data/tinyshakespeare.txt"));
    }

    /* A text of the user's is copied, kept, and used with a warning. */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(run_script(i == 0 ? "TINYSHAKESPEARE=own.txt" : "", out, sizeof out), 0);
        assert_string_equal(out, "data/tinyshakespeare.txt\n");
        size_t bytes;
        char *text = file_read("tree/data/tinyshakespeare.txt", 100, &bytes);
        assert_string_equal(text, "own\n");
        free(text);
        text = file_read("tree/stderr", 10000, &bytes);
        assert_non_null(strstr(text, "it is used all the same"));
        free(text);
    }
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
        cmocka_unit_test(test_tokens_in_memory),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_directory_like_a_pattern),
        cmocka_unit_test(test_packed_texts),
        cmocka_unit_test(test_refused_shards),
        cmocka_unit_test(test_write_shard),
        cmocka_unit_test(test_exactly_once),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_loader_refuses),
        cmocka_unit_test(test_script),
    };
    return cmocka_run_group_tests_name("data", tests, enter_scratch_with_json, leave_scratch);
}
