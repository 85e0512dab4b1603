/* BPE's files: a tokenizer.json saved and loaded again, its variants, a pair of vocab.json and
 * merges.txt; what is refused of them, and damaged ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/tokenizer.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "test/bpe_case.h"
#include "test/said.h"
#include "test/scratch.h"

static void test_special(void **state) {
    (void)state;
    Tokenizer *tokenizer = load_oracle();
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 0);
    assert_int_equal(tokenizer_special(tokenizer, "gent"), -1); /* added, not special */
    assert_int_equal(tokenizer_special(tokenizer, "e"), -1);
    assert_int_equal(tokenizer_special(tokenizer, ""), -1);
    tokenizer_free(tokenizer);
    tokenizer = tokenizer_bytes();
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), -1);
    tokenizer_free(tokenizer);
}

/* Loads the saved form again, and compares all that can be seen of it. */
static void test_save(void **state) {
    (void)state;
    Merges merges;
    make_merges(&merges, "a' \n");
    Tokenizer *saved = make_tokenizer(&merges);
    assert_true(tokenizer_save(saved, scratch));
    Tokenizer *loaded = tokenizer_load(scratch);
    if (loaded == NULL) fail_msg("%s", error_message());
    assert_string_equal(tokenizer_kind(loaded), "bpe");
    int32_t V = (int32_t)tokenizer_vocabulary(saved);
    assert_int_equal(tokenizer_vocabulary(loaded), V);
    assert_int_equal(tokenizer_special(loaded, "<|endoftext|>"), V - 1);
    size_t n, m;
    for (int32_t id = 0; id < V; id++) {
        const char *a = tokenizer_decode(saved, id, &n), *b = tokenizer_decode(loaded, id, &m);
        assert_int_equal(n, m);
        assert_memory_equal(a, b, n);
    }
    char *text = long_text(20000);
    int32_t *a = tokenizer_encode_special(saved, text, 20000, &n);
    int32_t *b = tokenizer_encode_special(loaded, text, 20000, &m);
    assert_int_equal(n, m);
    assert_memory_equal(a, b, n * sizeof *a);
    free(a);
    free(b);
    free(text);
    tokenizer_free(saved);
    tokenizer_free(loaded);
}

/* A tokenizer.json without most of the bytes. Not to be had from GPT-2, but from trainers that
 * begin with the letters of a text. */
static const char small_json[] =
    "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null,"
    " \"added_tokens\": [{\"id\": 5, \"content\": \"<s>\", \"special\": true}],"
    " \"normalizer\": null,"
    " \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false},"
    " \"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\"},"
    " \"model\": {\"dropout\": null, \"unk_token\": null,"
    " \"vocab\": {\"a\": 0, \"b\": 1, \"\\u0120\": 2, \"ab\": 3, \"\\u0120ab\": 4},"
    " \"merges\": [\"a b\", [\"\\u0120\", \"ab\"]]}}";

/* Writes small_json with one replacement and loads it. */
static Tokenizer *load_with(const char *find, const char *replacement) {
    char json[2 * sizeof small_json];
    const char *at = strstr(small_json, find);
    assert_non_null(at);
    int bytes = snprintf(json, sizeof json, "%.*s%s%s", (int)(at - small_json), small_json,
                         replacement, at + strlen(find));
    put_file("tokenizer.json", json, (size_t)bytes);
    return tokenizer_load(scratch);
}

static void check_small(const char *find, const char *replacement, const char *text, size_t count,
                        const int32_t *expected) {
    Tokenizer *tokenizer = load_with(find, replacement);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    size_t n;
    int32_t *ids = tokenizer_encode_special(tokenizer, text, strlen(text), &n);
    if (ids == NULL) fail_msg("%s", error_message());
    assert_int_equal(n, count);
    assert_memory_equal(ids, expected, n * sizeof *ids);
    free(ids);
    tokenizer_free(tokenizer);
}

#define IDS(...) \
    sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t), (int32_t[]) { __VA_ARGS__ }

/* The ids are those that the library gave for these files. */
static void test_variants(void **state) {
    (void)state;
    check_small("", "", "ab ab<s>ba", IDS(3, 4, 5, 1, 0));
    check_small("false}", "true}", "ab ab<s>ab<s> ab", IDS(4, 4, 5, 4, 5, 4));
    check_small("false}", "true}", "", 0, NULL);
    /* Without the pattern a word has no end: a merge over a space. */
    check_small("false}", "false, \"use_regex\": false}", "ab ab", IDS(3, 4));
    check_small("null, \"unk", "0.0, \"unk", "ab ab", IDS(3, 4));
    /* A merge that is there twice counts where it is last. */
    check_small("[\"a b\"", "[[\"\\u0120\", \"ab\"], \"a b\"", "ab ab", IDS(3, 4));
    static const char merges[] = "\"merges\": [\"a b\", [\"\\u0120\", \"ab\"]]";
    check_small(merges, "\"merges\": []", "ab aab", IDS(0, 1, 2, 0, 0, 1));
    check_small(merges, "\"ignore_merges\": true, \"merges\": []", "ab ab aab",
                IDS(3, 4, 2, 0, 0, 1));
    check_small("\"unk_token\": null", "\"unk_token\": \"b\"", "acb cc", IDS(3, 1, 2, 1, 1));
    check_small("\"unk_token\": null", "\"unk_token\": \"b\"", "acb\xC3\xA9", IDS(3, 1, 1, 1));
}

static void test_refused(void **state) {
    (void)state;
    static const struct {
        const char *find, *replacement, *said;
    } cases[] = {
        {"\"a b\"", "\"a c\"", "merge 0 needs the token \"c\""},
        {"\"a b\"", "\"b a\"", "merge 0 needs the token \"ba\""},
        {"\"a b\"", "\"ab\"", "merge 0 is \"ab\""},
        {"\"a b\"", "\"a  b\"", "merge 0 is \"a  b\""},
        {"\"a b\"", "3", "merge 0 is neither"},
        {"\"a b\"", "[\"a\"]", "merge 0 is neither"},
        {"\"a b\"", "[\"a\", \"b\", \"\"]", "merge 0 is neither"},
        {"\"a b\"", "{\"x\": \"a\", \"y\": \"b\"}", "merge 0 is neither"},
        {"\"merges\"", "\"type\": \"BPE\", \"merge\"", "no list \"merges\""},
        {"\"merges\"", "\"merge\"", "no \"type\""},
        {"\"dropout\"", "\"type\": \"Unigram\", \"dropout\"", "a Unigram tokenizer"},
        {"\"dropout\": null", "\"dropout\": 0.1", "\"dropout\" is 0.1"},
        {"\"dropout\": null", "\"byte_fallback\": true", "\"byte_fallback\" is true"},
        {"\"dropout\": null", "\"end_of_word_suffix\": \"</w>\"", "\"end_of_word_suffix\""},
        {"\"dropout\": null", "\"continuing_subword_prefix\": \"#\"", "\"continuing_subword_pre"},
        {"\"dropout\": null", "\"ignore_merges\": 1", "\"ignore_merges\" is 1"},
        {"\"unk_token\": null", "\"unk_token\": \"c\"", "the unknown token \"c\""},
        {"\"unk_token\": null", "\"unk_token\": 7", "\"unk_token\" is 7"},
        {"\"unk_token\": null", "\"unk_token\": \"a\", \"fuse_unk\": true", "\"fuse_unk\" is true"},
        {"\"b\": 1", "\"b\": 0", "the id 0 is given twice"},
        {"\"b\": 1", "\"a\": 1", "the token \"a\" is there twice"},
        {"\"b\": 1", "\"\": 1", "id 1 is empty"},
        {"\"b\": 1", "\"\xC3\": 1", "id 1 is not UTF-8"},
        {"\"b\": 1", "\"b\": 5", "the id of \"b\" is not a whole number from 0 to 4"},
        {"\"b\": 1", "\"b\": 1e99", "the id of \"b\""},
        {"\"b\": 1", "\"b\": \"1\"", "the id of \"b\""},
        {"\"vocab\": {", "\"vocab\": 3, \"words\": {", "no vocabulary"},
        {"\"id\": 5", "\"id\": 6", "the added token \"<s>\" has the id 6"},
        {"\"content\": \"<s>\"", "\"content\": \"b\"", "the added token \"b\" has the id 5"},
        {"\"content\": \"<s>\"", "\"content\": \"\"", "empty"},
        {"\"id\": 5, ", "", "without a \"content\" or an \"id\""},
        {"\"special\"", "\"lstrip\": true, \"special\"", "\"lstrip\" is true"},
        {"\"special\": true}", "\"special\": true}, {\"id\": 5, \"content\": \"<s>\"}",
         "there twice"},
        {"\"truncation\": null", "\"truncation\": {\"max_length\": 3}", "\"truncation\" is {"},
        {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", "\"normalizer\" is {"},
        {"\"type\": \"ByteLevel\", \"add", "\"type\": \"Metaspace\", \"add",
         "\"pre_tokenizer\" is"},
        {"\"post_processor\": null", "\"post_processor\": {\"type\": \"Bert\"}",
         "\"post_processor\""},
        {"\"decoder\"", "\"decode\"", "\"decoder\" is missing"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Tokenizer *tokenizer = load_with(cases[i].find, cases[i].replacement);
        if (tokenizer != NULL) fail_msg("accepted: %s", cases[i].replacement);
        assert_said("tokenizer.json");
        assert_said(cases[i].said);
    }
    /* A byte without a token. */
    Tokenizer *tokenizer = load_with("", "");
    size_t count;
    assert_null(tokenizer_encode(tokenizer, "abc", 3, &count));
    assert_said("the byte 0x63 has no token");
    tokenizer_free(tokenizer);
}

/* Cut at every length and with every byte damaged, a file is read or refused with a sentence. */
static void test_damaged(void **state) {
    (void)state;
    size_t size = sizeof small_json - 1;
    for (size_t length = 0; length < size; length++) {
        put_file("tokenizer.json", small_json, length);
        assert_null(tokenizer_load(scratch));
        assert_said("tokenizer.json");
    }
    static const char values[] = {0, '"', '}', '\\', '9', (char)0xFF};
    for (size_t i = 0; i < size; i++)
        for (size_t v = 0; v < sizeof values; v++) {
            char damaged[sizeof small_json];
            memcpy(damaged, small_json, sizeof small_json);
            damaged[i] = values[v];
            put_file("tokenizer.json", damaged, size);
            error_set("%s", "");
            Tokenizer *tokenizer = tokenizer_load(scratch);
            if (tokenizer == NULL) {
                assert_said("tokenizer.json");
                continue;
            }
            size_t count;
            free(tokenizer_encode_special(tokenizer, "ab ba<s> ab", 11, &count));
            tokenizer_free(tokenizer);
        }
}

static Tokenizer *load_pair(const char *vocabulary, const char *merges, size_t merges_bytes) {
    char path[FILE_PATH_BYTES];
    assert_true(file_join(path, scratch, "tokenizer.json"));
    unlink(path);
    put_file("vocab.json", vocabulary, strlen(vocabulary));
    put_file("merges.txt", merges, merges_bytes);
    return tokenizer_load(scratch);
}

static void test_vocab_and_merges(void **state) {
    (void)state;
    static const char vocabulary[] =
        "{\"a\": 0, \"b\": 1, \"\\u0120\": 2, \"ab\": 3, \"\\u0120ab\": 4, \"<|endoftext|>\": 5}";
    static const char merges[] = "#version: 0.2\na b\nĠ ab\n";
    size_t bytes = strlen(merges), count;
    Tokenizer *tokenizer = load_pair(vocabulary, merges, bytes);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 5);
    int32_t *ids = tokenizer_encode_special(tokenizer, "ab ab<|endoftext|>b", 19, &count);
    static const int32_t expected[] = {3, 4, 5, 1};
    assert_int_equal(count, 4);
    assert_memory_equal(ids, expected, sizeof expected);
    free(ids);
    tokenizer_free(tokenizer);

    for (size_t length = 0; length < bytes - 1; length++) { /* the last byte is a newline */
        assert_null(load_pair(vocabulary, merges, length));
        assert_said("merges.txt");
    }
    tokenizer_free(load_pair(vocabulary, merges, bytes - 1));
    static const char *const lines[] = {"a b\r\nĠ ab\r\n", "a b\nĠ ab\n"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        assert_non_null(tokenizer = load_pair(vocabulary, lines[i], strlen(lines[i])));
        tokenizer_free(tokenizer);
    }
    assert_null(load_pair(vocabulary, "a b\nĠ ab\n\n", strlen("a b\nĠ ab\n\n")));
    assert_said("merge 2 is \"\"");
    for (size_t length = 0; length < strlen(vocabulary); length++) {
        char cut[sizeof vocabulary];
        snprintf(cut, sizeof cut, "%.*s", (int)length, vocabulary);
        assert_null(load_pair(cut, merges, bytes));
        assert_said("vocab.json");
    }
    assert_null(load_pair("{\"a\": 0, \"b\": 1, \"ab\": 3}", merges, bytes));
    assert_said("\"ab\" is not a whole number from 0 to 2"); /* a hole */
    char path[FILE_PATH_BYTES];
    assert_true(file_join(path, scratch, "merges.txt"));
    unlink(path);
    assert_null(tokenizer_load(scratch));
    assert_said("merges.txt");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_special),  cmocka_unit_test(test_save),
        cmocka_unit_test(test_variants), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_damaged),  cmocka_unit_test(test_vocab_and_merges),
    };
    return cmocka_run_group_tests_name("BPE's files", tests, enter_scratch, leave_scratch);
}
