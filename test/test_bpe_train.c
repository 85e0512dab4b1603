/* Learning BPE: counting words in bounded memory, and merges that are those of counting all pairs
 * anew each time, and those of Hugging Face's trainer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/bpe_train.h"
#include "data/paths.h"
#include "data/shard.h"
#include "data/tokenizer.h"
#include "data/tokenizer_train.h"
#include "runtime/files.h"
#include "runtime/sha256.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

static uint64_t count_of(const WordCounts *counts, const char *word) {
    for (uint32_t i = 0; i < counts->words.count; i++) {
        size_t bytes;
        const char *text = string_table_get(&counts->words, i, &bytes);
        if (bytes == strlen(word) && memcmp(text, word, bytes) == 0) return counts->count[i];
    }
    return 0;
}

static void test_word_counts(void **state) {
    (void)state;
    WordCounts counts;
    word_counts_begin(&counts, 1000, 1 << 20);
    assert_true(word_counts_add(&counts, "a a b a", 7));
    assert_int_equal(count_of(&counts, " a"), 2);
    assert_int_equal(count_of(&counts, "a"), 1);
    assert_int_equal(counts.total, 4);
    word_counts_free(&counts);

    /* One word in four is " often", the others never come again. */
    enum { ROUNDS = 20000 };
    word_counts_begin(&counts, 500, 1 << 20);
    for (int i = 0; i < ROUNDS; i++) {
        char text[64];
        int n = snprintf(text, sizeof text, " often x%dy", i);
        assert_true(word_counts_add(&counts, text, (size_t)n));
        assert_true(counts.words.count <= 500);
    }
    uint64_t often = count_of(&counts, " often");
    assert_true(often <= ROUNDS && often + counts.threshold >= ROUNDS);
    assert_true(counts.threshold > 0 && counts.threshold < ROUNDS / 10);
    uint64_t kept = 0;
    for (uint32_t i = 0; i < counts.words.count; i++) kept += counts.count[i];
    assert_int_equal(kept + counts.dropped, counts.total);
    word_counts_free(&counts);

    word_counts_begin(&counts, 1000000, 1000); /* the letters count too */
    for (int i = 0; i < 1000; i++) {
        char text[64];
        int n = snprintf(text, sizeof text, " word%cx", 'a' + i % 26);
        assert_true(word_counts_add(&counts, text, (size_t)n));
        n = snprintf(text, sizeof text, " %d", 100000 + i);
        assert_true(word_counts_add(&counts, text, (size_t)n));
        assert_true(counts.words.text_bytes <= 1000);
    }
    word_counts_free(&counts);
}

/* The plainest way to learn: count all pairs anew for each merge. */
enum { MOST_WORDS = 4096, LONGEST = 64 };

typedef struct {
    int32_t token[LONGEST];
    size_t length;
    int64_t count;
} PlainWord;

static bool best_pair(const PlainWord *word, size_t words, int32_t best[2]) {
    int64_t most = 1; /* a pair must occur twice */
    for (size_t w = 0; w < words; w++)
        for (size_t i = 1; i < word[w].length; i++) {
            int32_t left = word[w].token[i - 1], right = word[w].token[i];
            int64_t count = 0;
            for (size_t v = 0; v < words; v++)
                for (size_t j = 1; j < word[v].length; j++)
                    if (word[v].token[j - 1] == left && word[v].token[j] == right)
                        count += word[v].count;
            bool first = left < best[0] || (left == best[0] && right < best[1]);
            if (count > most || (count == most && most > 1 && first)) {
                most = count;
                best[0] = left;
                best[1] = right;
            }
        }
    return most > 1;
}

static void merge_plainly(PlainWord *word, const int32_t pair[2], int32_t token) {
    size_t n = 0;
    for (size_t i = 0; i < word->length; n++) {
        bool here =
            i + 1 < word->length && word->token[i] == pair[0] && word->token[i + 1] == pair[1];
        word->token[n] = here ? token : word->token[i];
        i += here ? 2 : 1;
    }
    word->length = n;
}

static void assert_learns_plainly(const char *text, size_t bytes, size_t V) {
    WordCounts counts;
    BpeVocabulary learnt;
    word_counts_begin(&counts, 1 << 20, 1 << 20);
    assert_true(word_counts_add(&counts, text, bytes));
    assert_true(bpe_train(&counts, V, 2, &learnt));
    static PlainWord word[MOST_WORDS];
    size_t words = counts.words.count, merges = 0;
    assert_true(words <= MOST_WORDS);
    int32_t id[256];
    for (uint32_t k = 0; k < 256; k++) {
        size_t n;
        id[(unsigned char)*string_table_get(&learnt.tokens, k, &n)] = (int32_t)k;
        assert_int_equal(n, 1);
    }
    for (uint32_t w = 0; w < words; w++) {
        const char *letters = string_table_get(&counts.words, w, &word[w].length);
        assert_true(word[w].length <= LONGEST);
        word[w].count = (int64_t)counts.count[w];
        for (size_t i = 0; i < word[w].length; i++)
            word[w].token[i] = id[(unsigned char)letters[i]];
    }
    for (int32_t pair[2]; 256 + merges < V && best_pair(word, words, pair); merges++) {
        if (256 + merges >= learnt.tokens.count)
            fail_msg("%zu merges were learnt, and there is one more", merges);
        assert_int_equal(learnt.merge[merges][0], pair[0]);
        assert_int_equal(learnt.merge[merges][1], pair[1]);
        for (size_t w = 0; w < words; w++) merge_plainly(&word[w], pair, (int32_t)(256 + merges));
    }
    assert_int_equal(learnt.tokens.count, 256 + merges);
    bpe_vocabulary_free(&learnt);
    word_counts_free(&counts);
}

static void test_learns_as_counting_anew(void **state) {
    (void)state;
    static const char runs[] = "aaaa aaa aaaaaaa baaa aab aaaa aaab abaa aaaaa";
    assert_learns_plainly(runs, strlen(runs), 300);
    assert_learns_plainly("aa", 2, 300);
    char *text = make_text(6000);
    assert_learns_plainly(text, 6000, 256);
    assert_learns_plainly(text, 6000, 257);
    assert_learns_plainly(text, 6000, 330);
    free(text);
}

static void test_learnt_tokenizer(void **state) {
    (void)state;
    char *text = make_text(100000);
    put_file("learn.txt", text, 100000);
    Tokenizer *tokenizer = learn("learn.txt", 400);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 400);
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 399);
    size_t bytes, count;
    assert_memory_equal(tokenizer_decode(tokenizer, 0, &bytes), "!", 1);
    assert_memory_equal(tokenizer_decode(tokenizer, 220, &bytes), " ", 1);
    int32_t *ids = tokenizer_encode(tokenizer, text, 100000, &count);
    assert_true(count < 60000);
    assert_decodes(tokenizer, ids, count, text, 100000);
    free(ids);
    tokenizer_free(tokenizer);
    free(text);
    /* Nothing is left to merge: a smaller vocabulary, and its last token still ends texts. */
    put_file("tiny.txt", "hello worl", 10);
    tokenizer = learn("tiny.txt", 400);
    assert_int_equal(tokenizer_vocabulary(tokenizer), 257);
    assert_int_equal(tokenizer_special(tokenizer, "<|endoftext|>"), 256);
    tokenizer_free(tokenizer);
    put_file("empty.txt", "", 0);
    Paths paths = one_path("empty.txt");
    TokenizerTraining training;
    assert_null(tokenizer_train(&paths, TEXT_AUTO, 400, &training));
    assert_said("empty.txt");
    paths_free(&paths);
}

/* What the tokenizers library (0.23.3) learns from TinyShakespeare and encodes it to: BpeTrainer
 * with vocab_size=1023, min_frequency=2 and ByteLevel's alphabet; the ids as uint16. */
static void test_learns_as_hugging_face(void **state) {
    (void)state;
    char path[FILE_PATH_BYTES];
    if (!find_tinyshakespeare(path)) skip();
    Tokenizer *tokenizer = learn(path, 1024);
    size_t bytes, count;
    char *text = file_read(path, 1 << 24, &bytes), hex[SHA256_HEX_BYTES];
    int32_t *ids = tokenizer_encode(tokenizer, text, bytes, &count);
    assert_int_equal(count, 459913);
    unsigned char *packed = malloc(2 * count);
    shard_pack(SHARD_NARROW, ids, count, packed);
    Sha256 hash;
    sha256_begin(&hash);
    sha256_add(&hash, packed, 2 * count);
    sha256_end(&hash, hex);
    assert_string_equal(hex, "f7695e0061623b873020a907e092639c27f1b67273fc545e38c993e49f5f22e5");
    free(packed);
    free(ids);
    free(text);
    tokenizer_free(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_word_counts),
        cmocka_unit_test(test_learns_as_counting_anew),
        cmocka_unit_test(test_learnt_tokenizer),
        cmocka_unit_test(test_learns_as_hugging_face),
    };
    return cmocka_run_group_tests_name("learning BPE", tests, enter_scratch, leave_scratch);
}
