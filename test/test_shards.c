/* Token shards as they are written, and files of tokens as llm.c and nanoGPT write them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/dataset.h"
#include "data/shard_writer.h"
#include "runtime/error.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

static void assert_tokens(const char *pattern, size_t V, const int32_t *tokens, size_t count) {
    Dataset *dataset = dataset_from_shards(pattern, V, /*scan=*/true);
    if (dataset == NULL) fail_msg("%s", error_message());
    assert_int_equal(dataset_tokens(dataset), count);
    int32_t *read = malloc(count * sizeof *read);
    assert_true(dataset_read(dataset, 0, count, read));
    assert_memory_equal(read, tokens, count * sizeof *read);
    free(read);
    dataset_close(dataset);
}

static void test_shard_writer(void **state) {
    (void)state;
    enum { COUNT = 70000 };
    static int32_t tokens[COUNT];
    static const struct {
        ShardWidth width;
        size_t V, shard_tokens;
    } cases[] = {
        {SHARD_NARROW, 65536, 100}, {SHARD_NARROW, 65536, COUNT}, {SHARD_WIDE, 200000, 17777}};
    for (int c = 0; c < 3; c++) {
        for (uint32_t i = 0; i < COUNT; i++) tokens[i] = (int32_t)(noise(i) % cases[c].V);
        make_directory("writer");
        ShardWriter writer;
        assert_true(
            shard_writer_open(&writer, "writer", "x", cases[c].width, cases[c].shard_tokens, 0));
        for (size_t at = 0, n; at < COUNT; at += n) {
            n = noise((uint32_t)at) % 5000;
            if (n > COUNT - at) n = COUNT - at;
            assert_true(shard_writer_add(&writer, tokens + at, n));
            /* Stops in the middle, having written more than it will be told to go on from. */
            if (at > COUNT / 2 && writer.fd >= 0 && at - n < COUNT / 2) {
                uint64_t kept = writer.tokens - writer.tokens % 7;
                assert_true(shard_writer_sync(&writer));
                shard_writer_abandon(&writer);
                assert_true(shard_writer_open(&writer, "writer", "x", cases[c].width,
                                              cases[c].shard_tokens, kept));
                assert_true(shard_writer_add(&writer, tokens + kept, at + n - kept));
            }
        }
        assert_true(shard_writer_finish(&writer));
        assert_int_equal(shard_writer_shards(&writer),
                         (COUNT + cases[c].shard_tokens - 1) / cases[c].shard_tokens);
        run_shell("test -z \"$(ls writer | grep part)\"");
        assert_tokens("writer", cases[c].V, tokens, COUNT);
        run_shell("rm -r writer");
    }
    assert_int_equal(shard_width(65536), SHARD_NARROW);
    assert_int_equal(shard_width(65537), SHARD_WIDE);
}

static void put_words(const char *path, const uint32_t *words, size_t count, size_t bytes) {
    char data[2048] = {0};
    memcpy(data, words, count * sizeof *words);
    put_file(path, data, bytes);
}

static void test_wide_and_bare_files(void **state) {
    (void)state;
    /* Llama 3's: a wrong version, a wrong size, a token that is none. */
    put_words("wide.bin", (uint32_t[]){20240801, 7, 2}, 3, 1032);
    assert_tokens("wide.bin", 10, (int32_t[]){0, 0}, 2);
    put_words("wide.bin", (uint32_t[]){20240801, 1, 2}, 3, 1032);
    assert_null(dataset_from_shards("wide.bin", 10, true));
    assert_said("version 1, expected 7");
    put_words("wide.bin", (uint32_t[]){20240801, 7, 2}, 3, 1028);
    assert_null(dataset_from_shards("wide.bin", 10, true));
    assert_said("1028 bytes, expected 1032 for the 2 tokens");
    uint32_t words[258] = {20240801, 7, 2, [257] = 0xFFFFFFFF};
    put_words("wide.bin", words, 258, 1032);
    assert_null(dataset_from_shards("wide.bin", 100000, true));
    assert_said("token 4294967295 at position 1 (byte 1028)");

    /* nanoGPT's. */
    put_file("bare.bin", "\1\0\2\1\0\0", 6);
    Dataset *dataset = dataset_from_nanogpt("bare.bin", 259);
    assert_int_equal(dataset_tokens(dataset), 3);
    int32_t read[6];
    assert_true(dataset_read(dataset, 0, 3, read));
    assert_memory_equal(read, ((int32_t[]){1, 258, 0}), 12);
    /* A part of it is a ring of its own. */
    dataset_restrict(dataset, 1, 2);
    assert_true(dataset_read(dataset, 1, 4, read));
    assert_memory_equal(read, ((int32_t[]){0, 258, 0, 258}), 16);
    dataset_close(dataset);
    assert_null(dataset_from_nanogpt("bare.bin", 258));
    assert_said("token 258 at position 1 (byte 2)");
    put_file("bare.bin", "\1\0\2", 3);
    assert_null(dataset_from_nanogpt("bare.bin", 258));
    assert_said("bare.bin: has 3 bytes");
    put_file("bare.bin", "", 0);
    assert_null(dataset_from_nanogpt("bare.bin", 258));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shard_writer),
        cmocka_unit_test(test_wide_and_bare_files),
    };
    return cmocka_run_group_tests_name("shards", tests, enter_scratch, leave_scratch);
}
