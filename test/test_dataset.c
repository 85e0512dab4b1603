/* Datasets: a ring of tokens from memory and from shards, which shards a name or a pattern finds,
 * shards that are refused, and how one is written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/corpus.h"
#include "data/dataset.h"
#include "runtime/error.h"
#include "test/counting.h"
#include "test/said.h"
#include "test/scratch.h"

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens_in_memory),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_directory_like_a_pattern),
        cmocka_unit_test(test_refused_shards),
        cmocka_unit_test(test_write_shard),
    };
    return cmocka_run_group_tests_name("datasets", tests, enter_scratch, leave_scratch);
}
