/* BPE's ids against those that the tokenizers library made (test/oracle/bpe/make.py).
 *
 * Tests of GPT-2's own vocabulary need its vocab.json and merges.txt in $GPT2_TOKENIZER. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "data/tokenizer.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/sha256.h"
#include "test/bpe_case.h"
#include "test/scratch.h"
#include "test/text.h"

/* cJSON ends its strings at U+0000, so it is read as U+FFFE, which no text here has. */
static cJSON *read_cases(const char *path) {
    size_t bytes;
    char *text = file_read(path, SIZE_MAX, &bytes);
    if (text == NULL) return NULL;
    for (char *zero = text; (zero = strstr(zero, "\\u0000")) != NULL;) memcpy(zero, "\\ufffe", 6);
    cJSON *json = cJSON_Parse(text);
    free(text);
    assert_non_null(json);
    return json;
}

static size_t with_zeros(char *text) {
    size_t bytes = 0;
    for (const char *c = text; *c != '\0'; bytes++) {
        bool zero = strncmp(c, "\xEF\xBF\xBE", 3) == 0;
        text[bytes] = zero ? '\0' : *c;
        c += zero ? 3 : 1;
    }
    return bytes;
}

typedef int32_t *Encode(const Tokenizer *, const char *, size_t, size_t *);

static void check_ids(const Tokenizer *tokenizer, Encode *encode, const char *text, size_t bytes,
                      const cJSON *expected) {
    size_t count;
    int32_t *ids = encode(tokenizer, text, bytes, &count);
    assert_non_null(ids);
    assert_int_equal(count, cJSON_GetArraySize(expected));
    size_t i = 0;
    for (const cJSON *id = expected->child; id != NULL; id = id->next, i++)
        if (ids[i] != id->valueint)
            fail_msg("\"%s\": id %zu is %d, expected %d", text, i, ids[i], id->valueint);
    assert_decodes(tokenizer, ids, count, text, bytes);
    free(ids);
}

static void check_hash(const Tokenizer *tokenizer, const char *text, size_t bytes,
                       const cJSON *expected) {
    size_t count;
    int32_t *ids = tokenizer_encode(tokenizer, text, bytes, &count);
    assert_non_null(ids);
    Sha256 hash;
    char hex[SHA256_HEX_BYTES];
    sha256_begin(&hash);
    for (size_t i = 0; i < count; i++) {
        unsigned char little[2] = {(unsigned char)(ids[i] & 255), (unsigned char)(ids[i] >> 8)};
        sha256_add(&hash, little, sizeof little);
    }
    sha256_end(&hash, hex);
    free(ids);
    assert_int_equal(count, cJSON_GetObjectItem(expected, "n")->valueint);
    assert_string_equal(hex, cJSON_GetObjectItem(expected, "sha256_uint16")->valuestring);
}

/* The whole text, if it is there, and the parts of 90% and 10% where they are given. */
static void check_tinyshakespeare(const Tokenizer *tokenizer, const cJSON *expected) {
    char path[FILE_PATH_BYTES];
    if (!find_tinyshakespeare(path)) return;
    size_t bytes;
    char *text = file_read(path, SIZE_MAX, &bytes);
    assert_non_null(text);
    check_hash(tokenizer, text, bytes, cJSON_GetObjectItem(expected, "whole"));
    const cJSON *first = cJSON_GetObjectItem(expected, "first90");
    if (first != NULL) {
        size_t cut = (size_t)cJSON_GetObjectItem(first, "chars")->valueint; /* all are ASCII */
        check_hash(tokenizer, text, cut, first);
        check_hash(tokenizer, text + cut, bytes - cut, cJSON_GetObjectItem(expected, "last10"));
    }
    free(text);
}

/* Ends the tokenizer. */
static void check_cases(Tokenizer *tokenizer, const char *path) {
    if (tokenizer == NULL) fail_msg("%s", error_message());
    cJSON *json = read_cases(path);
    if (json == NULL) fail_msg("%s", error_message());
    cJSON *cases = cJSON_GetObjectItem(json, "cases");
    assert_true(cJSON_GetArraySize(cases) > 20);
    for (cJSON *item = cases->child; item != NULL; item = item->next) {
        char *text = cJSON_GetObjectItem(item, "text")->valuestring;
        size_t bytes = with_zeros(text);
        const cJSON *both = cJSON_GetObjectItem(item, "ids");
        const cJSON *plain = both != NULL ? both : cJSON_GetObjectItem(item, "plain");
        const cJSON *special = both != NULL ? both : cJSON_GetObjectItem(item, "special");
        check_ids(tokenizer, tokenizer_encode, text, bytes, plain);
        check_ids(tokenizer, tokenizer_encode_special, text, bytes, special);
    }
    check_tinyshakespeare(tokenizer, cJSON_GetObjectItem(json, "tinyshakespeare"));
    cJSON_Delete(json);
    tokenizer_free(tokenizer);
}

static void test_library_cases(void **state) {
    (void)state;
    char path[FILE_PATH_BYTES];
    in_repository(path, "test/oracle/bpe/cases.json");
    check_cases(load_oracle(), path);
}

static void test_gpt2_cases(void **state) {
    (void)state;
    const char *given = getenv("GPT2_TOKENIZER"), *oracle = getenv("TILEGPT_ORACLE");
    if (given == NULL) {
        print_message("skipped: $GPT2_TOKENIZER names no directory with GPT-2's vocabulary\n");
        skip();
    }
    char directory[FILE_PATH_BYTES], oracles[FILE_PATH_BYTES], path[FILE_PATH_BYTES];
    in_repository(directory, given);
    in_repository(oracles, oracle != NULL ? oracle : "test/oracle");
    assert_true(file_join(path, oracles, "gpt2_bpe.json"));
    check_cases(tokenizer_load(directory), path);
    Tokenizer *tokenizer = tokenizer_load(directory);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 50257);
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 50256);
    /* What it is saved as is read as the same. */
    assert_true(tokenizer_save(tokenizer, scratch));
    check_cases(tokenizer_load(scratch), path);
    tokenizer_free(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_library_cases),
        cmocka_unit_test(test_gpt2_cases),
    };
    return cmocka_run_group_tests_name("BPE's ids", tests, enter_scratch, leave_scratch);
}
