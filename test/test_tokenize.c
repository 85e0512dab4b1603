/* From texts to shards: training and validation together are the texts, whatever interrupts, and
 * documents stay whole. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/dataset.h"
#include "data/paths.h"
#include "data/tokenize.h"
#include "data/tokenizer.h"
#include "runtime/error.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

static TokenizeOptions job_of(const Paths *paths, const Tokenizer *tokenizer, const char *output) {
    return (TokenizeOptions){.inputs = paths,
                             .tokenizer = tokenizer,
                             .output = output,
                             .val_fraction = 0.1,
                             .seed = 1,
                             .shard_tokens = 100000000};
}

static TokenizeReport tokenize_well(TokenizeOptions job) {
    TokenizeReport report;
    if (!tokenize(&job, &report)) fail_msg("%s", error_message());
    return report;
}

/* Training and validation together are the text, encoded in one go. */
static void test_text_to_shards(void **state) {
    (void)state;
    enum { BYTES = 2500000 };
    char *text = make_text(BYTES);
    put_file("whole.txt", text, BYTES);
    Tokenizer *bpe = learn("whole.txt", 300), *bytes = tokenizer_bytes();
    Paths paths = one_path("whole.txt");
    for (int k = 0; k < 2; k++) {
        const Tokenizer *tokenizer = k == 0 ? bpe : bytes;
        size_t V = tokenizer_vocabulary(tokenizer), count;
        TokenizeOptions job = job_of(&paths, tokenizer, "whole");
        job.shard_tokens = 300007;
        TokenizeReport report = tokenize_well(job);
        int32_t *ids = tokenizer_encode(tokenizer, text, BYTES, &count);
        size_t separators = tokenizer == bpe;
        assert_int_equal(report.train.tokens + report.validation.tokens, count + separators);
        assert_int_equal(report.train.documents, 1);
        assert_int_equal(report.validation.documents, 1);
        Dataset *train = dataset_from_shards("whole/train_*.bin", V, true);
        Dataset *validation = dataset_from_shards("whole/val_*.bin", V, true);
        size_t held_out = dataset_tokens(validation), first = dataset_tokens(train);
        int32_t *read = malloc((count + 1) * sizeof *read);
        assert_true(dataset_read(train, 0, first, read));
        assert_true(dataset_read(validation, 0, held_out, read + first));
        if (separators) assert_int_equal(read[0], V - 1);
        assert_memory_equal(read + separators, ids, count * sizeof *ids);
        /* A tenth of the text, to a word. */
        size_t held_bytes = 0, n;
        for (size_t i = first; i < first + held_out; i++) {
            tokenizer_decode(tokenizer, read[i], &n);
            held_bytes += n;
        }
        assert_in_range(held_bytes, BYTES / 10, BYTES / 10 + (separators ? 100 : 0));
        /* Once more: complete. Otherwise: refused, and nothing is touched. */
        assert_true(tokenize_well(job).was_complete);
        job.seed++;
        TokenizeReport again;
        assert_false(tokenize(&job, &again));
        assert_said("whole holds shards of other texts, or made with other options");
        run_shell("test ! -e whole.tmp && rm -r whole");
        dataset_close(train);
        dataset_close(validation);
        free(read);
        free(ids);
    }
    make_directory("taken");
    put_file("taken/mine", "mine", 4);
    TokenizeOptions job = job_of(&paths, bytes, "taken");
    TokenizeReport report;
    assert_false(tokenize(&job, &report));
    assert_said("taken exists and is not empty");
    run_shell("test \"$(cat taken/mine)\" = mine && test ! -e taken.tmp");
    paths_free(&paths);
    tokenizer_free(bpe);
    tokenizer_free(bytes);
    free(text);
}

enum { DOCUMENTS = 40000 }; /* several batches */

static void put_documents(void) {
    FILE *file = fopen("many.jsonl", "wb");
    for (uint32_t i = 0; i < DOCUMENTS; i++)
        fprintf(file, "{\"text\": \"document %u: %.*s\"}\n", i, (int)(noise(i) % 20),
                "abracadabra abracadabra");
    fclose(file);
}

/* Interrupted after each batch, and in the worst moments, it ends in the same bytes. */
static void test_interruptions(void **state) {
    (void)state;
    put_documents();
    char *text = make_text(1000000);
    put_file("after.txt", text, 1000000);
    free(text);
    Tokenizer *bpe = learn("after.txt", 300);
    Paths paths = one_path("many.jsonl");
    assert_true(paths_add(&paths, "after.txt", NULL));
    TokenizeOptions job = job_of(&paths, bpe, "at_once");
    job.shard_tokens = 250000;
    TokenizeReport at_once = tokenize_well(job);
    assert_false(at_once.interrupted);

    volatile sig_atomic_t stop = 1;
    job.output = "in_parts";
    job.stop = &stop;
    int parts = 0;
    for (TokenizeReport report = {.interrupted = true}; report.interrupted; parts++) {
        report = tokenize_well(job);
        /* As if it had been killed when it had written more than its progress tells, and as if
         * right after the last shards got their names. */
        if (report.interrupted && parts == 0)
            run_shell("for f in in_parts.tmp/*.part; do head -c 1000000 /dev/zero >>$f; done");
        if (report.interrupted && parts == 1)
            run_shell("for f in in_parts.tmp/*.part; do mv $f ${f%.part}; done");
        if (!report.interrupted) {
            assert_int_equal(report.train.tokens, at_once.train.tokens);
            assert_int_equal(report.validation.documents, at_once.validation.documents);
        }
    }
    assert_true(parts >= 3);
    run_shell("diff -r at_once in_parts && test ! -e in_parts.tmp");

    /* What was begun with other options is begun anew. */
    job.output = "changed";
    assert_true(tokenize_well(job).interrupted);
    job.shard_tokens = 100000;
    job.stop = NULL;
    assert_true(tokenize_well(job).train.shards > 2);
    paths_free(&paths);
    tokenizer_free(bpe);
}

/* Every document is in one part, in the order of the text, after a separator. */
static void test_documents(void **state) {
    (void)state;
    put_documents();
    put_file("none.jsonl", "{\"text\": \"\"}\n",
             13); /* a document without tokens takes no separator */
    Tokenizer *bpe = tokenizer_bpe(NULL, 0, (const char *const[]){"<|endoftext|>"}, 1);
    Paths paths = one_path("many.jsonl");
    assert_true(paths_add(&paths, "none.jsonl", NULL));
    TokenizeReport report = tokenize_well(job_of(&paths, bpe, "documents"));
    /* Four standard deviations of a binomial with DOCUMENTS and 0.1 are 240. */
    assert_in_range(report.validation.documents, DOCUMENTS / 10 - 240, DOCUMENTS / 10 + 240);
    bool *seen = calloc(DOCUMENTS, sizeof *seen);
    for (int part = 0; part < 2; part++) {
        Dataset *dataset =
            dataset_from_shards(part ? "documents/val_*.bin" : "documents/train_*.bin", 257, true);
        size_t count = dataset_tokens(dataset), documents = 0;
        int32_t *ids = malloc(count * sizeof *ids);
        char *text = calloc(count + 1, 1);
        assert_true(dataset_read(dataset, 0, count, ids));
        size_t bytes;
        for (size_t i = 0; i < count; i++)
            text[i] = ids[i] == 256 ? '\x01' : *tokenizer_decode(bpe, ids[i], &bytes);
        int last = -1;
        for (char *at = text; *at; at = at + 1 + strcspn(at + 1, "\x01"), documents++) {
            int number;
            assert_int_equal(sscanf(at,
                                    "\x01"
                                    "document %d:",
                                    &number),
                             1);
            assert_true(number > last && !seen[number]);
            seen[last = number] = true;
        }
        assert_int_equal(documents, part ? report.validation.documents : report.train.documents);
        free(text);
        free(ids);
        dataset_close(dataset);
    }
    for (int i = 0; i < DOCUMENTS; i++) assert_true(seen[i]);
    free(seen);

    TokenizeOptions job = job_of(&paths, bpe, "unsplit");
    job.split = SPLIT_END;
    assert_false(tokenize(&job, &report));
    assert_said("JSON lines are split by documents");
    paths_free(&paths);
    paths = one_path("none.jsonl");
    job = job_of(&paths, bpe, "unsplit");
    assert_false(tokenize(&job, &report));
    assert_said("of 1 documents, ");
    run_shell("test ! -e unsplit && test ! -e unsplit.tmp");
    paths_free(&paths);
    tokenizer_free(bpe);
}

/* A text that spells the separator does not make one, unless it is to. */
static void test_special_tokens_in_text(void **state) {
    (void)state;
    put_file("spelt.txt", "one<|endoftext|>two", 19);
    Tokenizer *bpe = tokenizer_bpe(NULL, 0, (const char *const[]){"<|endoftext|>"}, 1);
    Paths paths = one_path("spelt.txt");
    TokenizeOptions job = job_of(&paths, bpe, "spelt");
    job.val_fraction = 0;
    assert_int_equal(tokenize_well(job).train.tokens, 1 + 19);
    job.output = "meant";
    job.special = true;
    assert_int_equal(tokenize_well(job).train.tokens, 1 + 3 + 1 + 3);
    paths_free(&paths);
    tokenizer_free(bpe);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_to_shards),
        cmocka_unit_test(test_interruptions),
        cmocka_unit_test(test_documents),
        cmocka_unit_test(test_special_tokens_in_text),
    };
    return cmocka_run_group_tests_name("tokenize", tests, enter_scratch, leave_scratch);
}
