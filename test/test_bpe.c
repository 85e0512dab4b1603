/* GPT-2's BPE: the pattern against PCRE2 running it, merging against the plainest way of merging;
 * any bytes, any number of threads, and where a text may be cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "data/pretokenize.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "test/bpe_case.h"
#include "test/scratch.h"
#include "test/text.h"

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

static void random_bytes(char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) text[i] = (char)draw(256);
}

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pattern),   cmocka_unit_test(test_merging),
        cmocka_unit_test(test_long_word), cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_threads),   cmocka_unit_test(test_cut),
    };
    return cmocka_run_group_tests_name("BPE", tests, enter_scratch, leave_scratch);
}
