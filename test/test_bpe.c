/* GPT-2's BPE against the tokenizers library (ids that it made, test/oracle/bpe/make.py), against
 * PCRE2 running the pattern, and against the plainest way of merging; and its files, whole and
 * damaged.
 *
 * Tests of GPT-2's own vocabulary need its vocab.json and merges.txt in $GPT2_TOKENIZER. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "data/json.h"
#include "data/pretokenize.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/random.h"
#include "runtime/sha256.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

/* The tokenizer that the library's ids were made with. */
static Tokenizer *load_oracle(void) {
    char directory[FILE_PATH_BYTES];
    in_repository(directory, "test/oracle/bpe");
    Tokenizer *tokenizer = tokenizer_load(directory);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    return tokenizer;
}

/* ---- random texts ---- */

static uint64_t draws; /* made so far */

static uint32_t draw(uint32_t below) { return (uint32_t)(random_mix(7, draws++) >> 33) % below; }

static void random_bytes(char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) text[i] = (char)draw(256);
}

/* Characters that PCRE2's Unicode classes as this program's does: assigned for long, or known to be
 * never assigned. In some draws, bytes that are no UTF-8. */
static size_t random_character(char text[4], bool broken) {
    static const char *const odd[] = {"a ",
                                      "'",
                                      "'",
                                      "s",
                                      "t",
                                      "l",
                                      "r",
                                      "e",
                                      "v",
                                      "m",
                                      "d",
                                      "D",
                                      " ",
                                      " ",
                                      " ",
                                      "\t",
                                      "\n",
                                      "\r",
                                      "\v",
                                      "0",
                                      "9",
                                      "\x7f",
                                      "!",
                                      "\xC2\x85",
                                      "\xC2\xA0",
                                      "\xC2\xAD",
                                      "\xC2\xBD",
                                      "\xCC\x81",
                                      "\xD9\xA3",
                                      "\xE1\x9A\x80",
                                      "\xE1\xA0\x8E",
                                      "\xE2\x80\x82",
                                      "\xE2\x80\x8B",
                                      "\xE2\x80\x8D",
                                      "\xE2\x80\xA8",
                                      "\xE2\x80\xAF",
                                      "\xE2\x85\xA7",
                                      "\xE3\x80\x80",
                                      "\xEF\xBB\xBF",
                                      "\xEF\xBF\xBD",
                                      "\xEF\xBF\xBF"};
    static const uint32_t blocks[][2] = {
        {0, 0x7F},        {0xA0, 0x24F},      {0x300, 0x36F},     {0x400, 0x45F},
        {0x620, 0x64A},   {0x905, 0x939},     {0x4E00, 0x9FA5},   {0xAC00, 0xD7A3},
        {0x2000, 0x2064}, {0x1F300, 0x1F5FF}, {0x1D400, 0x1D454}, {0x1FFFE, 0x1FFFF}};
    if (broken && draw(4) == 0) {
        text[0] = (char)(0x80 + draw(0x80));
        return 1;
    }
    if (draw(2) == 0) {
        const char *character = odd[draw(sizeof odd / sizeof *odd)];
        size_t bytes = strlen(character);
        memcpy(text, character, bytes);
        return bytes;
    }
    const uint32_t *block = blocks[draw(sizeof blocks / sizeof *blocks)];
    return utf8_encode(block[0] + draw(block[1] - block[0] + 1), text);
}

static size_t random_text(char *text, size_t characters, bool broken) {
    size_t bytes = 0;
    for (size_t i = 0; i < characters; i++) bytes += random_character(text + bytes, broken);
    return bytes;
}

/* ---- the pattern ---- */

/* \s is written out: PCRE2's has U+180E too, which is no white space since Unicode 6.3. */
#define SPACE "\\t-\\r\\x{85}\\p{Z}"
static const char pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE
                              "\\p{L}\\p{N}]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+";

static pcre2_code *compile(void) {
    int error;
    PCRE2_SIZE offset;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP, &error, &offset, NULL);
    assert_non_null(code);
    return code;
}

/* The text with U+FFFD for each byte that is not UTF-8. place[i] is where byte i of the result
 * comes from. */
static size_t repair(const char *text, size_t bytes, char *repaired, size_t *place) {
    size_t count = 0;
    for (size_t offset = 0, length; offset < bytes; offset += length) {
        uint32_t code;
        length = utf8_decode(text + offset, bytes - offset, &code);
        size_t written = length;
        if (length == 0)
            written = utf8_encode(0xFFFD, repaired + count), length = 1;
        else
            memcpy(repaired + count, text + offset, length);
        for (size_t i = 0; i < written; i++) place[count + i] = offset;
        count += written;
    }
    place[count] = bytes;
    return count;
}

static void test_pattern(void **state) {
    (void)state;
    enum { TEXTS = 20000, CHARACTERS = 40 };
    pcre2_code *code = compile();
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    for (int n = 0; n < TEXTS; n++) {
        char text[4 * CHARACTERS], repaired[4 * CHARACTERS];
        size_t place[4 * CHARACTERS + 1];
        size_t bytes = random_text(text, 1 + draw(CHARACTERS), /*broken=*/n % 2 == 1);
        size_t length = repair(text, bytes, repaired, place);
        size_t end = 0, at = 0;
        while (end < length) {
            int found = pcre2_match(code, (PCRE2_SPTR)repaired, length, end, 0, match, NULL);
            assert_int_equal(found, 1);
            assert_int_equal(pcre2_get_ovector_pointer(match)[0], end);
            end = pcre2_get_ovector_pointer(match)[1];
            at += pretokenize_word(text + at, bytes - at);
            assert_int_equal(at, place[end]);
        }
        assert_int_equal(at, bytes);
    }
    pcre2_match_data_free(match);
    pcre2_code_free(code);
}

/* ---- merging ---- */

enum { MERGES = 300, ID_COUNT = 256 + MERGES };

/* GPT-2's order of the bytes: 188 visible ones from '!' on, then the others from 0 on. */
static int32_t letter_id(char letter) { return letter > ' ' ? letter - '!' : 188 + letter; }

enum { LETTERS = 4 };

/* Random merges of some letters and what they make; several may make the same token. */
typedef struct {
    int32_t pair[MERGES][2], result[MERGES];
    char text[ID_COUNT][64];
    size_t V;
} Merges;

static int32_t find_text(const Merges *merges, const char *text) {
    for (size_t id = 0; id < merges->V; id++)
        if (strcmp(merges->text[id], text) == 0) return (int32_t)id;
    return -1;
}

static void make_merges(Merges *merges, const char letters[LETTERS]) {
    memset(merges, 0, sizeof *merges);
    for (int i = 0; i < LETTERS; i++) merges->text[letter_id(letters[i])][0] = letters[i];
    merges->V = 256;
    for (size_t i = 0; i < MERGES;) {
        char both[2 * sizeof merges->text[0]];
        int32_t *pair = merges->pair[i];
        for (int side = 0; side < 2; side++)
            pair[side] = draw(3) ? letter_id(letters[draw(LETTERS)])
                                 : (int32_t)(256 + draw(1 + (uint32_t)merges->V - 256));
        if ((size_t)pair[0] >= merges->V || (size_t)pair[1] >= merges->V) continue;
        snprintf(both, sizeof both, "%s%s", merges->text[pair[0]], merges->text[pair[1]]);
        if (strlen(both) >= sizeof merges->text[0]) continue;
        merges->result[i] = find_text(merges, both);
        if (merges->result[i] < 0) {
            merges->result[i] = (int32_t)merges->V;
            memcpy(merges->text[merges->V++], both, sizeof merges->text[0]);
        }
        i++;
    }
}

static Tokenizer *make_tokenizer(const Merges *merges) {
    static const char *const special[] = {"<|endoftext|>"};
    Tokenizer *tokenizer = tokenizer_bpe(merges->pair, MERGES, special, 1);
    if (tokenizer == NULL) fail_msg("%s", error_message());
    assert_string_equal(tokenizer_kind(tokenizer), "bpe");
    assert_int_equal(tokenizer_vocabulary(tokenizer), merges->V + 1);
    return tokenizer;
}

/* The rule as it is stated: the merge of lowest rank (of equal ones the last), leftmost first. */
static size_t merge_plainly(const Merges *merges, const char *word, size_t bytes, int32_t *ids) {
    size_t count = bytes;
    for (size_t i = 0; i < bytes; i++) ids[i] = letter_id(word[i]);
    for (;;) {
        size_t best = MERGES, at = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            size_t rank = MERGES;
            while (rank-- > 0)
                if (merges->pair[rank][0] == ids[i] && merges->pair[rank][1] == ids[i + 1]) break;
            if (rank != SIZE_MAX && rank < best) best = rank, at = i;
        }
        if (best == MERGES) return count;
        ids[at] = merges->result[best];
        memmove(ids + at + 1, ids + at + 2, (--count - at - 1) * sizeof *ids);
    }
}

static void test_merging(void **state) {
    (void)state;
    enum { WORDS = 2000, LENGTH = 60 };
    for (int n = 0; n < 3; n++) {
        Merges merges;
        make_merges(&merges, "abcd");
        Tokenizer *tokenizer = make_tokenizer(&merges);
        for (int i = 0; i < WORDS; i++) {
            char word[LENGTH];
            int32_t expected[LENGTH];
            size_t bytes = 1 + draw(LENGTH), count;
            for (size_t j = 0; j < bytes; j++) word[j] = "abcd"[draw(LETTERS)];
            int32_t *ids = tokenizer_encode(tokenizer, word, bytes, &count);
            assert_non_null(ids);
            assert_int_equal(count, merge_plainly(&merges, word, bytes, expected));
            assert_memory_equal(ids, expected, count * sizeof *ids);
            free(ids);
        }
        tokenizer_free(tokenizer);
    }
}

/* A word of a megabyte. If its time grew with the square of that, this would take hours. */
static void test_long_word(void **state) {
    (void)state;
    const int32_t a = letter_id('a'), pair[][2] = {{a, a}, {256, 256}, {257, 257}};
    Tokenizer *tokenizer = tokenizer_bpe(pair, 3, NULL, 0);
    size_t bytes = (size_t)1 << 20, count;
    char *word = malloc(bytes);
    memset(word, 'a', bytes);
    int32_t *ids = tokenizer_encode(tokenizer, word, bytes, &count);
    assert_int_equal(count, bytes / 8);
    for (size_t i = 0; i < count; i++) assert_int_equal(ids[i], 258);
    free(ids);
    free(word);
    tokenizer_free(tokenizer);
}

/* ---- any bytes ---- */

static void test_random_bytes(void **state) {
    (void)state;
    enum { TEXTS = 20000, BYTES = 64 };
    Tokenizer *tokenizer = load_oracle();
    for (int n = 0; n < TEXTS; n++) {
        char text[4 * BYTES];
        size_t bytes = draw(BYTES + 1);
        if (n % 2)
            random_bytes(text, bytes);
        else
            bytes = random_text(text, bytes, /*broken=*/true);
        assert_round_trip(tokenizer, text, bytes);
    }
    size_t bytes;
    assert_string_equal(tokenizer_decode(tokenizer, -1, &bytes), "");
    assert_string_equal(tokenizer_decode(tokenizer, 515, &bytes), "");
    assert_int_equal(bytes, 0);
    tokenizer_free(tokenizer);
}

/* Words with spaces, and sometimes long stretches without. Freed by the caller. */
static char *long_text(size_t bytes) {
    char *text = malloc(bytes + 8);
    for (size_t at = 0; at < bytes;) {
        if (draw(20000) == 0)
            for (size_t end = at + draw(100000); at < end && at < bytes; at++) text[at] = 'x';
        else if (draw(3) == 0)
            text[at++] = " \n'"[draw(3)];
        else
            at += random_character(text + at, true);
    }
    return text;
}

/* As many threads as there are, or more, give the ids of one. */
static void test_threads(void **state) {
    (void)state;
#ifndef _OPENMP
    print_message("skipped: built without OpenMP\n");
    skip();
#else
    size_t bytes = (size_t)3 << 20, count[2];
    char *text = long_text(bytes);
    int32_t *ids[2];
    Tokenizer *tokenizer = load_oracle();
    int threads = omp_get_max_threads();
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i == 0 ? 1 : 4);
        ids[i] = tokenizer_encode(tokenizer, text, bytes, &count[i]);
    }
    omp_set_num_threads(threads);
    assert_int_equal(count[0], count[1]);
    assert_memory_equal(ids[0], ids[1], count[0] * sizeof *ids[0]);
    assert_decodes(tokenizer, ids[0], count[0], text, bytes);
    free(ids[0]);
    free(ids[1]);
    free(text);
    tokenizer_free(tokenizer);
#endif
}

static void test_cut(void **state) {
    (void)state;
    enum { TEXTS = 3000, CHARACTERS = 40 };
    Merges merges;
    make_merges(&merges, "a' \n"); /* a cut among spaces would be seen by their merges */
    Tokenizer *tokenizer = make_tokenizer(&merges);
    size_t cuts = 0;
    for (int n = 0; n < TEXTS; n++) {
        char text[4 * CHARACTERS];
        size_t bytes = random_text(text, CHARACTERS, /*broken=*/true), count, first, second;
        if (n % 2)
            for (size_t i = 0; i < bytes; i++) text[i] = "a'  \n"[draw(5)];
        size_t seen = bytes / 2, cut = tokenizer_cut(tokenizer, text, seen);
        assert_true(cut <= seen);
        cuts += cut > 0;
        int32_t *ids = tokenizer_encode(tokenizer, text, bytes, &count);
        int32_t *before = tokenizer_encode(tokenizer, text, cut, &first);
        int32_t *after = tokenizer_encode(tokenizer, text + cut, bytes - cut, &second);
        assert_int_equal(count, first + second);
        assert_memory_equal(ids, before, first * sizeof *ids);
        assert_memory_equal(ids + first, after, second * sizeof *ids);
        free(ids);
        free(before);
        free(after);
    }
    assert_true(cuts > TEXTS / 10);
    assert_int_equal(tokenizer_cut(tokenizer, "two words", 0), 0);
    assert_int_equal(tokenizer_cut(tokenizer, "two words", 3), 0); /* the word may go on */
    assert_int_equal(tokenizer_cut(tokenizer, "two words", 9), 3);
    tokenizer_free(tokenizer);
    /* An added token, "gentle sir", might be cut. */
    tokenizer = load_oracle();
    assert_int_equal(tokenizer_cut(tokenizer, "two words", 9), 0);
    tokenizer_free(tokenizer);
    tokenizer = tokenizer_bytes();
    assert_int_equal(tokenizer_cut(tokenizer, "two words", 9), 9);
    tokenizer_free(tokenizer);
    tokenizer = tokenizer_characters("\xC3\xA9\xF0\x9F\x99\x82", 6);
    static const size_t whole[] = {0, 0, 2, 2, 2, 2, 6};
    for (size_t n = 0; n <= 6; n++)
        assert_int_equal(tokenizer_cut(tokenizer, "\xC3\xA9\xF0\x9F\x99\x82", n), whole[n]);
    tokenizer_free(tokenizer);
}

/* ---- the tokenizers library's ids ---- */

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

/* ---- files ---- */

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
        cmocka_unit_test(test_pattern),       cmocka_unit_test(test_merging),
        cmocka_unit_test(test_long_word),     cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_threads),       cmocka_unit_test(test_cut),
        cmocka_unit_test(test_library_cases), cmocka_unit_test(test_gpt2_cases),
        cmocka_unit_test(test_special),       cmocka_unit_test(test_save),
        cmocka_unit_test(test_variants),      cmocka_unit_test(test_refused),
        cmocka_unit_test(test_damaged),       cmocka_unit_test(test_vocab_and_merges),
    };
    return cmocka_run_group_tests(tests, enter_scratch, leave_scratch);
}
