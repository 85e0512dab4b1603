/* A corpus: from shards, from a small text in memory, and from a large one whose tokens are kept in
 * the user's cache; a packed text is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/corpus.h"
#include "data/dataset.h"
#include "data/paths.h"
#include "data/tokenize.h"
#include "data/tokenizer.h"
#include "runtime/error.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

static int enter_scratch_and_cache(void **state) {
    return enter_scratch(state) != 0 || setenv("XDG_CACHE_HOME", "cache", 1) != 0;
}

static void assert_same_tokens(const Dataset *a, const Dataset *b) {
    size_t count = dataset_tokens(a);
    assert_int_equal(count, dataset_tokens(b));
    int32_t *one = malloc(count * sizeof *one), *other = malloc(count * sizeof *other);
    assert_true(dataset_read(a, 0, count, one) && dataset_read(b, 0, count, other));
    assert_memory_equal(one, other, count * sizeof *one);
    free(one);
    free(other);
}

static void test_directory_as_corpus(void **state) {
    (void)state;
    char *text = make_text(50000);
    put_file("corpus.txt", text, 50000);
    free(text);
    Tokenizer *bpe = learn("corpus.txt", 300);
    make_directory("learnt");
    assert_true(tokenizer_save(bpe, "learnt"));
    Paths paths = one_path("corpus.txt");
    TokenizeOptions job = {.inputs = &paths,
                           .tokenizer = bpe,
                           .output = "corpus",
                           .val_fraction = 0.1,
                           .seed = 1,
                           .shard_tokens = 100000000};
    TokenizeReport report;
    if (!tokenize(&job, &report)) fail_msg("%s", error_message());
    Corpus corpus, direct;
    assert_true(corpus_open_shards(&corpus, CORPUS_SHARDS, "corpus", NULL, /*V=*/7));
    assert_int_equal(corpus.V, 300);
    assert_string_equal(tokenizer_kind(corpus.tokenizer), "bpe");
    /* All of the text in memory, tokenized by itself, is the same. */
    assert_true(corpus_open_text(&direct, "corpus.txt", NULL, "learnt", 0));
    assert_int_equal(dataset_tokens(direct.train),
                     dataset_tokens(corpus.train) + dataset_tokens(corpus.validation));
    corpus_close(&direct);
    corpus_close(&corpus);
    assert_false(corpus_open_text(&direct, "corpus.txt", NULL, "nowhere", 0.1));
    assert_said("nowhere");
    paths_free(&paths);
    tokenizer_free(bpe);
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

/* A large text is tokenized once; another text or tokenizer never meets its tokens. */
static void test_cache(void **state) {
    (void)state;
    enum { PART = 1 << 16, BYTES = 17 << 20 };
    char *text = make_text(BYTES);
    for (size_t at = PART; at < BYTES; at += PART) memcpy(text + at, text, PART);
    text[BYTES - 1] = 'z';
    put_file("large.txt", text, BYTES);
    put_file("small.txt", text, PART);
    Tokenizer *bpe = learn("small.txt", 300), *other = learn("small.txt", 290);
    make_directory("small");
    assert_true(tokenizer_save(bpe, "small"));
    size_t count;
    int32_t *ids = tokenizer_encode(bpe, text, BYTES, &count);
    for (int time = 0; time < 2; time++) {
        Corpus corpus;
        if (!corpus_open_text(&corpus, "large.txt", NULL, "small", 0.25))
            fail_msg("%s", error_message());
        size_t train = dataset_tokens(corpus.train), validation = dataset_tokens(corpus.validation);
        assert_int_equal(train + validation, count + 1);
        assert_int_equal(validation, (size_t)((double)(count + 1) * 0.25));
        int32_t *read = malloc((count + 1) * sizeof *read);
        assert_true(dataset_read(corpus.train, 0, train, read));
        assert_true(dataset_read(corpus.validation, 0, validation, read + train));
        assert_int_equal(read[0], 299);
        assert_memory_equal(read + 1, ids, count * sizeof *ids);
        free(read);
        corpus_close(&corpus);
        run_shell("test \"$(ls cache/tilegpt | grep -c ...........)\" = 1");
    }
    free(ids);
    text[BYTES - 1] = 'y'; /* as long as before */
    put_file("large.txt", text, BYTES);
    Corpus first, second;
    assert_true(corpus_open_text(&first, "large.txt", bpe, "", 0.1));
    int32_t last;
    assert_true(dataset_read(first.validation, dataset_tokens(first.validation) - 1, 1, &last));
    assert_memory_equal(tokenizer_decode(first.tokenizer, last, &count), "y", 1);
    assert_true(corpus_open_text(&second, "large.txt", other, "", 0.1));
    assert_true(dataset_tokens(second.train) > dataset_tokens(first.train));
    run_shell("test \"$(ls cache/tilegpt | grep -c ...........)\" = 3");
    Corpus again;
    assert_true(corpus_open_text(&again, "large.txt", NULL, "small", 0.1));
    assert_same_tokens(first.validation, again.validation);
    corpus_close(&again);
    corpus_close(&first);
    corpus_close(&second);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_directory_as_corpus),
        cmocka_unit_test(test_packed_texts),
        cmocka_unit_test(test_cache),
    };
    return cmocka_run_group_tests_name("corpus", tests, enter_scratch_and_cache, leave_scratch);
}
