/* How generated text reaches a file: in whole characters, up to a stop text, one sample or more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"
#include "gpt/sample.h"
#include "gpt/text_stream.h"
#include "test/devices.h"
#include "test/model.h"
#include "test/said.h"

static void characters_are_written_whole(void **state) {
    (void)state;
    static char *out; /* static: the compiler takes the stream for what keeps their addresses */
    static size_t bytes;
    FILE *file = open_memstream(&out, &bytes);
    TextStream stream = {.file = file, .until = "STOP"};
    static const struct {
        const char *piece, *written;
    } steps[] = {{"a", "a"},
                 {"\xc3", "a"},
                 {"\xa9", "a\xc3\xa9"},
                 {"\xf0\x9f", "a\xc3\xa9"},
                 {"\x98\x80", "a\xc3\xa9\xf0\x9f\x98\x80"},
                 {"\xff\x80", "a\xc3\xa9\xf0\x9f\x98\x80"}, /* no character, but may begin one */
                 {"xS", "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80x"},
                 {"TO", "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80x"},
                 {"ST", "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80xSTO"}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        assert_true(text_stream_add(&stream, steps[i].piece, strlen(steps[i].piece)));
        fflush(file);
        assert_string_equal(out, steps[i].written);
    }
    assert_false(text_stream_add(&stream, "OP and more", 11));
    text_stream_end(&stream);
    fflush(file);
    assert_string_equal(out, "a\xc3\xa9\xf0\x9f\x98\x80\xff\x80xSTO");
    fclose(file);
    free(out);

    file = open_memstream(&out, &bytes);
    stream = (TextStream){.file = file, .until = ""};
    assert_true(text_stream_add(&stream, "b\xe2\x82", 3));
    text_stream_end(&stream); /* what never became a character is written in the end */
    fclose(file);
    assert_string_equal(out, "b\xe2\x82");
    free(out);
}

static const GptConfig small = {.L = 2, .NH = 3, .C = 21, .T = 12, .V = 11, .layernorm_eps = 1e-5f};

/* What gpt_write_text writes, to be freed. */
static char *written(Gpt *model, const Tokenizer *tokenizer, const char *prompt, size_t samples,
                     const char *until) {
    char *out;
    size_t bytes;
    FILE *file = open_memstream(&out, &bytes);
    TextOptions options = {.sampling = {1, 1, 0, 5},
                           .tokens = 20,
                           .samples = samples,
                           .echo = true,
                           .until = until,
                           .file = file};
    assert_true(gpt_write_text(model, tokenizer, prompt, &options));
    fclose(file);
    return out;
}

static void texts_are_written(void **state) {
    (void)state;
    Tokenizer *tokenizer = tokenizer_characters("abcdefghij\n", 11);
    assert_non_null(tokenizer);
    Gpt *model = random_model(cpu, small, 1, TYPE_F32, GPT_INFERENCE);
    char *text = written(model, tokenizer, "abc", 1, "");
    assert_int_equal(strlen(text), 3 + 20 + 1);
    assert_memory_equal(text, "abc", 3);

    char until[3] = {text[8], text[9]};
    char *cut = written(model, tokenizer, "abc", 1, until);
    size_t expected = (size_t)(strstr(text + 3, until) - text);
    assert_int_equal(strlen(cut), expected + 1);
    assert_memory_equal(cut, text, expected);
    free(cut);

    /* The first of several is the one that comes alone. */
    char *both = written(model, tokenizer, "abc", 2, NULL);
    const char *first = "--- sample 1 of 2 ---\n", *second = "--- sample 2 of 2 ---\nabc";
    assert_memory_equal(both, first, strlen(first));
    assert_memory_equal(both + strlen(first), text, strlen(text));
    assert_memory_equal(both + strlen(first) + strlen(text), second, strlen(second));
    assert_int_equal(strlen(both), strlen(first) + strlen(second) + strlen(text) + 21);
    free(both);
    free(text);

    TextOptions options = {.sampling = {1, 1, 0, 5}, .tokens = 3, .samples = 1, .echo = true};
    options.file = open_memstream(&text, &expected);
    assert_false(gpt_write_text(model, tokenizer, "xyz", &options));
    fclose(options.file);
    assert_string_equal(text, ""); /* the prompt is refused before anything is written */
    free(text);
    assert_said("vocabulary");
    gpt_free(model);
    tokenizer_free(tokenizer);
}

int main(void) {
    open_devices();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(characters_are_written_whole),
        cmocka_unit_test(texts_are_written),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();
    return failed;
}
