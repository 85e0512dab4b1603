/* Sources of text: plain, compressed, lines and JSON lines, read in pieces, gone on with, and
 * damaged. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cmocka.h>

#include "data/text_source.h"
#include "data/tokenizer.h"
#include "test/said.h"
#include "test/scratch.h"
#include "test/text.h"

static void put_gzip(const char *path, const void *data, size_t bytes) {
    gzFile file = gzopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(gzwrite(file, data, (unsigned)bytes), bytes);
    assert_int_equal(gzclose(file), Z_OK);
}

/* Reads a whole source. The pieces of a plain one must be those of `text`, and end in between only
 * where the tokenizer may be cut. */
static void assert_reads(const char *path, const Tokenizer *tokenizer, const char *text,
                         size_t bytes) {
    TextSource *source = text_open(path, TEXT_AUTO, tokenizer);
    assert_non_null(source);
    TextPiece piece;
    size_t at = 0;
    int got;
    bool ended = false;
    while ((got = text_next(source, &piece)) > 0) {
        assert_false(ended);
        assert_true(piece.bytes > 0 && piece.bytes <= bytes - at);
        assert_memory_equal(piece.text, text + at, piece.bytes);
        at += piece.bytes;
        assert_int_equal(text_place(source).bytes, at);
        ended = piece.ends;
        if (!ended) assert_true(tokenizer_cut(tokenizer, text, at + 1) == at);
    }
    assert_int_equal(got, 0);
    assert_int_equal(at, bytes);
    assert_true(ended || bytes == 0);
    text_close(source);
}

static void test_plain_source(void **state) {
    (void)state;
    static const size_t sizes[] = {0, 1, 10, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3500000};
    Tokenizer *bpe = tokenizer_bpe(NULL, 0, NULL, 0);
    char *text = make_text(3500000);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        put_file("plain.txt", text, sizes[i]);
        put_gzip("plain.gz", text, sizes[i]);
        assert_reads("plain.txt", bpe, text, sizes[i]);
        assert_reads("plain.gz", bpe, text, sizes[i]);
    }
    /* What goes on at a place gives the rest; a place to cut before is kept to. */
    for (int zipped = 0; zipped < 2; zipped++) {
        const char *path = zipped ? "plain.gz" : "plain.txt";
        TextPiece piece;
        TextSource *source = text_open(path, TEXT_AUTO, bpe);
        text_cut_before(source, 1500000);
        for (size_t end = 0; end + 100 < 1500000;) {
            assert_int_equal(text_next(source, &piece), 1);
            end = (size_t)text_place(source).bytes;
            assert_true(end <= 1500000);
        }
        TextPlace place = text_place(source);
        text_close(source);
        source = text_open(path, TEXT_AUTO, bpe);
        assert_true(text_seek(source, place));
        assert_int_equal(text_next(source, &piece), 1);
        assert_memory_equal(piece.text, text + place.bytes, piece.bytes);
        text_close(source);
    }
    /* Without a place to cut for too long it is no text to BPE; bytes do not mind. */
    memset(text, 'x', 3500000);
    FILE *file = fopen("long.txt", "wb");
    for (int i = 0; i < 20; i++) fwrite(text, 1, 3500000, file);
    fclose(file);
    Tokenizer *any = tokenizer_bytes();
    TextPiece piece;
    TextSource *source = text_open("long.txt", TEXT_AUTO, bpe);
    assert_int_equal(text_next(source, &piece), -1);
    assert_said("long.txt: no word ends in the 64 MiB from byte 0 on");
    text_close(source);
    source = text_open("long.txt", TEXT_AUTO, any);
    assert_int_equal(text_next(source, &piece), 1);
    text_close(source);
    unlink("long.txt");
    free(text);
    tokenizer_free(any);
    tokenizer_free(bpe);
}

static void assert_source_fails(const char *path, const char *said) {
    Tokenizer *tokenizer = tokenizer_bytes();
    TextSource *source = text_open(path, TEXT_AUTO, tokenizer);
    TextPiece piece;
    int got = source == NULL ? -1 : 1;
    while (got > 0) got = text_next(source, &piece);
    assert_int_equal(got, -1);
    assert_said(path);
    assert_said(said);
    text_close(source);
    tokenizer_free(tokenizer);
}

static void test_damaged_sources(void **state) {
    (void)state;
    char *text = make_text(200000);
    put_gzip("whole.gz", text, 200000);
    struct stat status;
    assert_int_equal(stat("whole.gz", &status), 0);
    char *zipped = malloc((size_t)status.st_size);
    FILE *file = fopen("whole.gz", "rb");
    assert_int_equal(fread(zipped, 1, (size_t)status.st_size, file), status.st_size);
    fclose(file);
    static const int left[] = {1, 8, 9, 1000, 50000}; /* bytes that are cut off */
    for (int i = 0; i < 5; i++) {
        put_file("cut.gz", zipped, (size_t)status.st_size - (size_t)left[i]);
        assert_source_fails("cut.gz", "cut short");
    }
    put_file("cut.gz", zipped, 4); /* in its header */
    assert_source_fails("cut.gz", "cut short");
    zipped[status.st_size / 2] ^= 0x55;
    put_file("bad.gz", zipped, (size_t)status.st_size);
    assert_source_fails("bad.gz", "damaged");
    assert_source_fails("none.txt", "No such file");
    make_directory("folder");
    assert_source_fails("folder", "is a directory");
    free(zipped);
    free(text);
}

/* Each line is one whole document: blank ones, one longer than a piece of plain text, one without a
 * line feed. */
static void test_plain_lines(void **state) {
    (void)state;
    enum { LONG = 3000000 };
    char *line = malloc(LONG + 1);
    memset(line, 'x', LONG);
    line[LONG] = '\0';
    const char *const expected[] = {"one\r", "", "  ", line, "no line feed"};
    char *text = malloc(LONG + 100);
    int bytes = snprintf(text, LONG + 100, "one\r\n\n  \n%s\nno line feed", line);
    put_file("lines.txt", text, (size_t)bytes);
    put_gzip("lines.gz", text, (size_t)bytes);
    Tokenizer *tokenizer = tokenizer_bytes();
    for (int zipped = 0; zipped < 2; zipped++) {
        TextSource *source = text_open(zipped ? "lines.gz" : "lines.txt", TEXT_LINES, tokenizer);
        for (uint64_t i = 0; i < 5; i++) {
            TextPiece piece = {0};
            assert_int_equal(text_next(source, &piece), 1);
            assert_true(piece.ends);
            assert_int_equal(piece.bytes, strlen(expected[i]));
            assert_memory_equal(piece.text, expected[i], piece.bytes);
            assert_int_equal(text_place(source).lines, i + 1);
        }
        assert_int_equal(text_next(source, &(TextPiece){0}), 0);
        text_close(source);
    }
    tokenizer_free(tokenizer);
    free(text);
    free(line);
}

static void test_json_lines(void **state) {
    (void)state;
    static const char good[] =
        "{\"text\": \"one\"}\r\n\n  \n{\"id\": 2, \"text\": \"a\\n\\\"b\\u00e9\\\\u0000\"}\n"
        "{\"text\": \"\"}\n{\"text\": \"no line feed\"}";
    static const char *const expected[] = {"one", "a\n\"b\xC3\xA9\\u0000", "", "no line feed"};
    static const uint64_t line[] = {1, 4, 5, 6};
    put_file("good.jsonl", good, strlen(good));
    put_gzip("good.ndjson.gz", good, strlen(good));
    Tokenizer *tokenizer = tokenizer_bytes();
    for (int zipped = 0; zipped < 2; zipped++) {
        TextSource *source =
            text_open(zipped ? "good.ndjson.gz" : "good.jsonl", TEXT_AUTO, tokenizer);
        TextPiece piece;
        for (int i = 0; i < 4; i++) {
            assert_int_equal(text_next(source, &piece), 1);
            assert_true(piece.ends);
            assert_int_equal(piece.bytes, strlen(expected[i]));
            assert_memory_equal(piece.text, expected[i], piece.bytes);
            assert_int_equal(text_place(source).lines, line[i]);
        }
        assert_int_equal(text_next(source, &piece), 0);
        text_close(source);
    }
    tokenizer_free(tokenizer);
    static const struct {
        const char *line, *said;
    } bad[] = {{"{\"text\": \"x", "line 2 is not JSON"},
               {"{\"text\": \"x\"} y", "line 2 is not JSON: it goes wrong at byte 13 of 15"},
               {"{\"tex\": \"x\"}", "line 2 has no \"text\""},
               {"{\"text\": 5}", "line 2 has a \"text\" that is no string"},
               {"[\"text\"]", "line 2 is not an object"},
               {"\xFF\xFE", "line 2 is not JSON"},
               {"{\"text\": \"x\\u0000y\"}", "line 2 has a zero character"},
               {"{\"text\": \"x\\\\\\u0000y\"}", "line 2 has a zero character"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[128];
        int n = snprintf(text, sizeof text, "{\"text\": \"fine\"}\n%s\n{}\n", bad[i].line);
        put_file("bad.jsonl", text, (size_t)n);
        assert_source_fails("bad.jsonl", bad[i].said);
    }
    put_file("bad.jsonl", "{\"text\": \"x\0y\"}\n", 16);
    assert_source_fails("bad.jsonl", "line 1 has a zero character");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_source),
        cmocka_unit_test(test_damaged_sources),
        cmocka_unit_test(test_plain_lines),
        cmocka_unit_test(test_json_lines),
    };
    return cmocka_run_group_tests_name("sources of text", tests, enter_scratch, leave_scratch);
}
