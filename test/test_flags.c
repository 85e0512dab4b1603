/* Options: how they are written, read, refused and listed, and the record that a run keeps of
 * them. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/flags.h"
#include "runtime/random.h"
#include "runtime/run.h"
#include "test/said.h"
#include "test/scratch.h"

/* A table of one option of each type. */
typedef struct {
    int64_t steps, seed;
    double lr;
    bool compile;
    const char *data, *device;
    Flag flags[7];
} Options;

static Flag *options_reset(Options *o) {
    *o = (Options){.steps = 100, .seed = 1, .lr = 6e-4, .data = "text.txt", .device = "auto"};
    const Flag flags[7] = {
        {"steps", FLAG_INT, &o->steps, 1, 1e6, NULL, "updates to make", false},
        {"seed", FLAG_INT, &o->seed, INT64_MIN, (double)INT64_MAX, NULL, "random seed", false},
        {"lr", FLAG_FLOAT, &o->lr, 0, INFINITY, NULL, "learning rate", false},
        {"compile", FLAG_BOOL, &o->compile, 0, 0, NULL, "compile first", false},
        {"data", FLAG_STRING, &o->data, 0, 0, NULL, "file to read", false},
        {"device", FLAG_CHOICE, &o->device, 0, 0, "auto|cpu|cuda", "where to compute", false},
        {0},
    };
    memcpy(o->flags, flags, sizeof flags);
    return o->flags;
}

#define PARSE(options, ...)                                                               \
    flags_parse(options_reset(options), sizeof((char *[]){__VA_ARGS__}) / sizeof(char *), \
                (char *[]){__VA_ARGS__})

static void flags_parse_every_form(void **state) {
    (void)state;
    Options o;
    assert_true(flags_parse(options_reset(&o), 0, NULL));
    assert_int_equal(o.steps, 100);
    assert_false(o.flags[0].given);

    assert_true(PARSE(&o, "--steps=12", "--lr", "1e-3", "--compile", "--data=a=b", "--device",
                      "cpu", "--seed", "-9223372036854775808"));
    assert_int_equal(o.steps, 12);
    assert_true(o.lr == 1e-3);
    assert_true(o.compile);
    assert_string_equal(o.data, "a=b");
    assert_string_equal(o.device, "cpu");
    assert_true(o.seed == INT64_MIN);
    for (int i = 0; i < 6; i++) assert_true(o.flags[i].given);

    assert_true(PARSE(&o, "--compile=true", "--compile=false", "--data=", "--steps=1000000"));
    assert_false(o.compile);
    assert_string_equal(o.data, "");
    assert_int_equal(o.steps, 1000000);
    assert_false(o.flags[1].given);
}

static void flags_refuse_with_a_reason(void **state) {
    (void)state;
    Options o;
    assert_false(PARSE(&o, "--setps=3"));
    assert_said("unknown option --setps=3; did you mean --steps?");
    assert_false(PARSE(&o, "-steps", "3"));
    assert_said("did you mean --steps?");
    assert_false(PARSE(&o, "---steps=3"));
    assert_said("unknown option ---steps=3");
    assert_false(PARSE(&o, "--nothing-like-it"));
    assert_said("unknown option --nothing-like-it; --help");
    assert_false(PARSE(&o, "--step=3")); /* no abbreviations */
    assert_said("did you mean --steps?");
    assert_false(PARSE(&o, "--lr=1", "steps=3"));
    assert_said("stray word \"steps=3\"");
    assert_false(PARSE(&o, "--compile", "true"));
    assert_said("stray word \"true\"");
    assert_false(PARSE(&o, "--steps"));
    assert_said("--steps needs a value");
    assert_false(PARSE(&o, "--device", "--steps=3"));
    assert_said("--device needs a value: --device=auto|cpu|cuda");
    assert_int_equal(o.steps, 100);

    static const struct {
        char *word;
        const char *message;
    } malformed[] = {
        {"--steps=", "--steps=: expected a whole number from 1 to 1000000"},
        {"--steps=0", "--steps=0: expected a whole number from 1 to 1000000"},
        {"--steps=1000001", "expected a whole number"},
        {"--steps=99999999999999999999", "expected a whole number"},
        {"--seed=9223372036854775808", "expected a whole number"},
        {"--steps=3x", "expected a whole number"},
        {"--steps= 3", "expected a whole number"},
        {"--steps=3 ", "expected a whole number"},
        {"--steps=1e3", "expected a whole number"},
        {"--steps=3.0", "expected a whole number"},
        {"--lr=fast", "--lr=fast: expected a number from 0 upwards"},
        {"--lr=-0.1", "expected a number from 0"},
        {"--lr=nan", "expected a number from 0"},
        {"--lr=1e999", "expected a number from 0"},
        {"--lr= 1", "expected a number from 0"},
        {"--lr=1,5", "expected a number from 0"},
        {"--lr=", "expected a number from 0"},
        {"--compile=yes", "--compile=yes: expected true or false"},
        {"--compile=", "expected true or false"},
        {"--device=gpu", "--device=gpu: expected auto|cpu|cuda"},
        {"--device=cp", "expected auto|cpu|cuda"},
        {"--device=auto|cpu", "expected auto|cpu|cuda"},
        {"--device=", "expected auto|cpu|cuda"},
        {"--data=a\nb", "expected one line of text"},
    };
    for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
        assert_false(PARSE(&o, malformed[i].word));
        assert_said(malformed[i].message);
        for (Flag *flag = o.flags; flag->name; flag++) assert_false(flag->given);
    }
    assert_int_equal(o.steps, 100);
    assert_true(o.lr == 6e-4);
}

/* A list goes on until the next option. */
static void lists_take_the_words_that_follow(void **state) {
    (void)state;
    FlagList list = {0};
    const char *text = "";
    Flag flags[] = {{"input", FLAG_LIST, &list, 0, 0, NULL, "files", false},
                    {"output", FLAG_STRING, &text, 0, 0, NULL, "directory", false},
                    {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}};
    char *words[] = {"--input=a", "b", "-", "--output=o", "--input", "c"};
    assert_true(flags_parse(flags, 6, words));
    assert_int_equal(list.count, 4);
    static const char *const expected[] = {"a", "b", "-", "c"};
    for (int i = 0; i < 4; i++) assert_string_equal(list.word[i], expected[i]);
    char shown[16];
    flags_format(&flags[0], shown, sizeof shown);
    assert_string_equal(shown, "a b - c");
    assert_false(flags_parse(flags, 1, (char *[]){"--input="}));
    assert_false(flags_parse(flags, 2, (char *[]){"--input", "--output=x"}));
    assert_said("--input needs a value");
    assert_false(flags_parse(flags, 2, (char *[]){"--output=x", "stray"}));
    free(list.word);
}

/* A value that is refused is shown on one line, cut; a text has line breaks, and no record. */
static void flags_with_line_breaks(void **state) {
    (void)state;
    Options o;
    assert_false(PARSE(&o, "--data=one\ntwo"));
    assert_said("--data=one…: expected one line of text");
    char digits[80] = "--steps=";
    memset(digits + 8, '9', 61);
    assert_false(PARSE(&o, digits));
    digits[68] = '\0';
    assert_said(digits);
    assert_said("9…: expected");
    assert_null(
        strstr(error_message(), "9999999999999999999999999999999999999999999999999999999999999"));

    const char *prompt = "";
    Flag flags[] = {{"prompt", FLAG_TEXT, &prompt, 0, 0, NULL, "text", false}, {0}};
    assert_true(flags_parse(flags, 1, (char *[]){"--prompt=one\n\ntwo\r\n"}));
    assert_string_equal(prompt, "one\n\ntwo\r\n");
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    flags_print_values(flags, file);
    fclose(file);
    assert_string_equal(text, "");
    free(text);
}

static void flags_set_copies_and_checks(void **state) {
    (void)state;
    Options o;
    options_reset(&o);
    char text[] = "first";
    assert_true(flags_set(o.flags, "data", text));
    text[0] = 'x';
    assert_string_equal(o.data, "first");
    assert_true(o.flags[4].given);
    assert_false(flags_set(o.flags, "device", "tpu"));
    assert_said("--device=tpu: expected auto|cpu|cuda");
    assert_false(flags_set(o.flags, "dat", "x"));
    assert_said("did you mean --data?");
}

/* What flags_print_values prints of `from`, flags_set must read back into equal values. */
static void assert_round_trip(Options *from) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    flags_print_values(from->flags, file);
    fclose(file);

    Options to;
    options_reset(&to);
    int lines = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1, lines++) {
        *end = '\0';
        char *equals = strchr(line, '=');
        assert_non_null(equals);
        *equals = '\0';
        assert_true(flags_set(to.flags, line, equals + 1));
    }
    assert_int_equal(lines, 6);
    assert_true(to.steps == from->steps && to.seed == from->seed);
    assert_memory_equal(&to.lr, &from->lr, sizeof to.lr);
    assert_int_equal(to.compile, from->compile);
    assert_string_equal(to.data, from->data);
    assert_string_equal(to.device, from->device);
    free(text);
}

static void flags_round_trip_exactly(void **state) {
    (void)state;
    Options o;
    options_reset(&o);
    assert_round_trip(&o);

    const double numbers[] = {0,       0.1,          1.0 / 3, 6e-4,     1e22,      123456789.125,
                              DBL_MAX, DBL_TRUE_MIN, DBL_MIN, INFINITY, 0.1 + 0.2, 1 + DBL_EPSILON};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        o.lr = numbers[i];
        assert_round_trip(&o);
    }
    for (uint32_t i = 0; i < 2000; i++) { /* any positive finite bits */
        Philox draw = philox(3, i, 0, 0, 9);
        uint64_t bits = (uint64_t)(draw.word[0] & 0x7fffffff) << 32 | draw.word[1];
        memcpy(&o.lr, &bits, sizeof bits);
        if (isfinite(o.lr)) assert_round_trip(&o);
    }
    char longest[3001];
    memset(longest, 'y', 3000);
    longest[3000] = '\0';
    o.data = longest;
    assert_round_trip(&o);
    o.data = " a = b # \"c\" ";
    o.device = "cuda";
    o.compile = true;
    o.seed = INT64_MAX;
    assert_round_trip(&o);

    char text[32];
    o.lr = 0.0006;
    flags_format(&o.flags[2], text, sizeof text);
    assert_string_equal(text, "0.0006");
    o.lr = 2000;
    flags_format(&o.flags[2], text, sizeof text);
    assert_string_equal(text, "2000");
}

static void help_lists_every_option_with_its_default(void **state) {
    (void)state;
    Options o;
    options_reset(&o);
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    flags_print_help(o.flags, file);
    fclose(file);
    assert_non_null(strstr(text, "  --steps=INT             updates to make [100]\n"));
    assert_non_null(strstr(text, "  --lr=NUMBER             learning rate [0.0006]\n"));
    assert_non_null(strstr(text, "  --compile               compile first [false]\n"));
    assert_non_null(strstr(text, "  --data=TEXT             file to read [text.txt]\n"));
    assert_non_null(strstr(text, "  --device=auto|cpu|cuda  where to compute [auto]\n"));
    free(text);
}

/* The flags of a run that were cut or lost a line are refused: an option that silently fell back to
 * its default would change the run. */
static void recorded_flags_are_whole(void **state) {
    (void)state;
    const char *directory = "run";
    Run run;
    make_directory(directory);
    assert_true(run_name(&run, directory));
    Options o, read;
    options_reset(&o);
    o.steps = 7;
    assert_true(run_write_flags(&run, o.flags));
    assert_true(run_read_flags(&run, options_reset(&read)));
    assert_int_equal(read.steps, 7);

    size_t bytes;
    char *text = file_read(run.flags, 1 << 20, &bytes);
    assert_non_null(text);
    for (size_t cut = 0; cut < bytes; cut++) {
        assert_true(file_write(run.flags, text, cut));
        assert_false(run_read_flags(&run, options_reset(&read)));
        assert_said("flags.txt is damaged");
    }
    memcpy(strstr(text, "lr="), "rl=", 3);
    assert_true(file_write(run.flags, text, bytes));
    assert_false(run_read_flags(&run, options_reset(&read)));
    assert_said("no line lr=");
    free(text);
    unlink(run.flags);
    assert_int_equal(rmdir(directory), 0); /* and nothing temporary was left */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flags_parse_every_form),
        cmocka_unit_test(flags_refuse_with_a_reason),
        cmocka_unit_test(flags_with_line_breaks),
        cmocka_unit_test(lists_take_the_words_that_follow),
        cmocka_unit_test(flags_set_copies_and_checks),
        cmocka_unit_test(flags_round_trip_exactly),
        cmocka_unit_test(help_lists_every_option_with_its_default),
        cmocka_unit_test(recorded_flags_are_whole),
    };
    return cmocka_run_group_tests_name("flags", tests, enter_scratch, leave_scratch);
}
