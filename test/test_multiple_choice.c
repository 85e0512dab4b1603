/* Multiple-choice examples: the preferred completion is that of the least mean loss, computed here
 * token by token from the logits; damaged files get a sentence. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gpt/multiple_choice.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "test/model.h"
#include "test/said.h"
#include "test/scratch.h"

enum { EXAMPLES = 60, V = 11, T = 12, MOST = 65536 };

static const GptConfig config = {.L = 2, .NH = 3, .C = 21, .T = T, .V = V, .layernorm_eps = 1e-5f};
static const char path[] = "choices.bin";
static Device *device;

static Gpt *make(size_t B) {
    GptOptions options = {.B = B, .T = T, .type = TYPE_F32, .attention = ATTENTION_NAIVE};
    Gpt *model = create_model(&config, &options, device);
    randomize(model);
    return model;
}

/* The file being made; its length after the header and its examples' places, in 16-bit numbers. */
static uint16_t file[512 + MOST];
static size_t length, starts[EXAMPLES + 1];

static void push(unsigned value) { file[512 + length++] = (uint16_t)value; }
static size_t below(uint64_t key, size_t n) { return (size_t)(random_mix(key, 5) % n); }

/* Contexts of 1 to 5 tokens, 2 to 5 completions of 1 to 7: together at most T. */
static void make_file(const size_t *labels) {
    memset(file, 0, sizeof file);
    const int32_t header[4] = {20240522, 1, EXAMPLES, 1000};
    memcpy(file, header, sizeof header);
    length = 0;
    for (size_t i = 0; i < EXAMPLES; i++) {
        size_t start = length, context = 1 + below(i, 5), completions = 2 + below(100 + i, 4);
        starts[i] = start;
        push(65535), push(0), push((unsigned)i), push((unsigned)labels[i]),
            push((unsigned)completions);
        for (size_t c = 0; c <= completions; c++) {
            size_t tokens = c == 0 ? context : 1 + below(1000 * i + c, 7);
            push((unsigned)tokens);
            for (size_t j = 0; j < tokens; j++)
                push((unsigned)below(random_mix(1000 * i + c, j), V));
        }
        file[512 + start + 1] = (uint16_t)(2 * (length - start));
    }
    starts[EXAMPLES] = length;
}

static void write_file(size_t bytes) { put_file(path, file, bytes); }

static size_t file_bytes(void) { return 1024 + 2 * length; }

/* -log p(tokens[n] | tokens[0..n)) from the logits of a forward of its own. */
static double loss_of(Gpt *model, const int32_t *tokens, size_t n) {
    float logits[V];
    double sum = 0;
    gpt_forward(model, tokens, NULL, 1, n, GPT_EVALUATE);
    gpt_logits(model, n - 1, 1, logits);
    for (size_t v = 0; v < V; v++) sum += exp((double)logits[v]);
    return log(sum) - logits[tokens[n]];
}

/* The completion with the least mean loss (or summed loss) of the example at this place. */
static size_t preferred(Gpt *model, const uint16_t *at, bool mean) {
    size_t completions = at[4], context = at[5], best = 0;
    const uint16_t *next = at + 6 + context;
    double least = INFINITY;
    for (size_t c = 0; c < completions; c++) {
        int32_t tokens[T + 1];
        size_t n = *next++;
        double sum = 0;
        for (size_t j = 0; j < context; j++) tokens[j] = at[6 + j];
        for (size_t j = 0; j < n; j++) tokens[context + j] = *next++;
        for (size_t j = 0; j < n; j++) sum += loss_of(model, tokens, context + j);
        if (mean) sum /= (double)n;
        if (sum < least) least = sum, best = c;
    }
    return best;
}

static void accuracy_is_that_of_brute_force(void **state) {
    (void)state;
    Gpt *model = make(1);
    size_t labels[EXAMPLES] = {0}, right[EXAMPLES], differing = 0;
    make_file(labels);
    for (size_t i = 0; i < EXAMPLES; i++) {
        const uint16_t *example = file + 512 + starts[i];
        right[i] = preferred(model, example, /*mean=*/true);
        differing += right[i] != preferred(model, example, /*mean=*/false);
    }
    assert_true(differing > EXAMPLES / 10); /* so that a sum would be found out */
    gpt_free(model);

    /* Every example, none, every third; one row at a time, and batches that split examples. */
    for (size_t B = 1; B <= 7; B += 3)
        for (size_t wanted = 0; wanted < 3; wanted++) {
            size_t expected = 0, correct, examples;
            for (size_t i = 0; i < EXAMPLES; i++) {
                bool hit = wanted == 0 || (wanted == 2 && i % 3 == 0);
                labels[i] = hit ? right[i] : (right[i] + 1) % 2; /* there are always 0 and 1 */
                expected += hit;
            }
            make_file(labels);
            write_file(file_bytes());
            model = make(B);
            if (!gpt_multiple_choice(model, path, &correct, &examples))
                fail_msg("%s", error_message());
            assert_int_equal(examples, EXAMPLES);
            assert_int_equal(correct, expected);
            gpt_free(model);
        }
    assert_true(multiple_choice_is(path));
}

static void assert_refused(Gpt *model, const char *sentence) {
    size_t correct, examples;
    assert_false(gpt_multiple_choice(model, path, &correct, &examples));
    assert_said(sentence);
    assert_said(path);
}

static void damaged_files_are_refused(void **state) {
    (void)state;
    /* Numbers of 16 bits: of the header from its start, else of example 7 from its own. */
    static const struct {
        size_t place;
        bool header;
        uint16_t value;
        const char *sentence;
    } cases[] = {
        {0, true, 0, "is not a file of multiple-choice examples"},
        {2, true, 2, "is not a file of multiple-choice examples"},
        {5, true, 32768, "is not a file of multiple-choice examples"},
        {5, true, 32767, "too few for its 2147418172 examples"},
        {4, true, EXAMPLES - 1, "has something after its 59 examples"},
        {4, true, EXAMPLES + 1, "example 60 is cut short or damaged"},
        {0, false, 65534, "example 7 is cut short or damaged, at byte"},
        {1, false, 17, "example 7 is cut short or damaged"},
        {1, false, 16, "example 7 is cut short or damaged"},
        {1, false, 65534, "example 7 is cut short or damaged"},
        {2, false, 8, "example 7 is cut short or damaged"},
        {3, false, 5, "example 7 has"},
        {4, false, 65535, "example 7 is damaged: its context and 65535 completions"},
        {4, false, 1, "example 7 "},
        {5, false, 0, "example 7 is damaged"},
        {5, false, 65535, "example 7 is damaged"},
        {6, false, V, "example 7 has token 11, which is not in the vocabulary of 11"},
    };
    Gpt *model = make(4);
    size_t labels[EXAMPLES] = {0}, correct, examples;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make_file(labels);
        size_t origin = cases[i].header ? 0 : 512 + starts[7];
        file[origin + cases[i].place] = cases[i].value;
        write_file(file_bytes());
        assert_refused(model, cases[i].sentence);
    }
    assert_false(multiple_choice_is("/nonexistent"));

    make_file(labels);
    for (size_t cut = 0; cut < file_bytes(); cut += cut < 1024 ? 100 : 1) {
        write_file(cut);
        assert_refused(model, "");
    }
    write_file(file_bytes());
    assert_true(gpt_multiple_choice(model, path, &correct, &examples));

    /* Every error of one bit is refused or changes what is read; the sanitizers watch. */
    for (size_t bit = 0; bit < 16 * (512 + starts[4]); bit += bit < 64 ? 1 : 7) {
        file[bit / 16] ^= (uint16_t)(1u << bit % 16);
        write_file(512 * 2 + 2 * starts[4]);
        gpt_multiple_choice(model, path, &correct, &examples);
        file[bit / 16] ^= (uint16_t)(1u << bit % 16);
    }
    gpt_free(model);

    GptOptions shorter = {.B = 1, .T = 4, .type = TYPE_F32, .attention = ATTENTION_NAIVE};
    model = create_model(&config, &shorter, device);
    gpt_init(model, 1);
    make_file(labels);
    write_file(file_bytes());
    assert_refused(model, "the model reads 4");
    gpt_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accuracy_is_that_of_brute_force),
        cmocka_unit_test(damaged_files_are_refused),
    };
    device = device_open(DEVICE_CPU, 0);
    if (!device) return 2;
    int failed =
        cmocka_run_group_tests_name("multiple choice", tests, enter_scratch, leave_scratch);
    device_close(device);
    return failed;
}
