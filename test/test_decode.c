/* Decoding with a cache: texts against those of whole forwards, what a seed decides, and the
 * device's part, work that is repeated. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "gpt/decode.h"
#include "layers/layers.h"
#include "runtime/error.h"
#include "test/devices.h"
#include "test/draw_tokens.h"
#include "test/model.h"
#include "test/part.h"
#include "test/said.h"

/* Sizes that share no factor, a head size that is no power of two; and ones for wide accesses. */
static const GptConfig odd = {.L = 2, .NH = 3, .C = 21, .T = 12, .V = 11, .layernorm_eps = 1e-5f};
static const GptConfig even = {.L = 3, .NH = 4, .C = 64, .T = 70, .V = 130, .layernorm_eps = 1e-5f};

static GptDecoder *decoder_of(Gpt *model, size_t B, Sampling sampling) {
    GptDecoder *decoder = gpt_decoder_create(model, B, &sampling);
    if (!decoder) fail_msg("%s", error_message());
    return decoder;
}

/* Draw number `number` after tokens[0..n), by a forward of them all. */
static int32_t next_token(Gpt *model, const int32_t *tokens, size_t n, Sampling sampling,
                          uint64_t number) {
    size_t V = gpt_config(model)->V;
    int32_t token;
    float *logits = malloc(V * sizeof *logits);
    gpt_forward(model, tokens, NULL, 1, n, GPT_EVALUATE);
    gpt_logits(model, n - 1, 1, logits);
    draw_tokens(cpu, logits, 1, V, sampling, number, &token);
    free(logits);
    return token;
}

/* From this many tokens to several windows, with the window's rule: when T are full, the last T/2
 * are kept. */
static void check_text(Gpt *model, size_t start, Sampling sampling) {
    size_t T = gpt_config(model)->T, begin = start > T ? start - T : 0;
    size_t total = start + part_of(2 * T + 3);
    int32_t *text = malloc((total + 1) * sizeof *text), token;
    for (size_t i = 0; i < start; i++) text[i] = (int32_t)(i * 5 % gpt_config(model)->V);
    GptDecoder *decoder = decoder_of(model, 1, sampling);
    gpt_decoder_start(decoder, text, start);
    for (size_t n = start; n < total; n++) {
        if (n - begin > T) begin = n - T / 2;
        text[n] = next_token(model, text + begin, n - begin, sampling, n);
        gpt_decoder_next(decoder, &token);
        if (token != text[n])
            fail_msg("token %zu of a text that starts with %zu is %d, not %d", n, start, token,
                     text[n]);
    }
    gpt_decoder_free(decoder);
    free(text);
}

static void check_decoder(Device *device, DataType type) {
    static const GptConfig *const configs[] = {&odd, &even};
    for (int i = 0; i < 2; i++) {
        size_t T = configs[i]->T;
        Gpt *model = random_model(device, *configs[i], 1, type, GPT_INFERENCE);
        Sampling greedy = {.temperature = 0}, likely = {1, 0.9f, 5, 17};
        check_text(model, 1, greedy);
        check_text(model, 7, likely);
        check_text(model, T, greedy);
        check_text(model, T + 5, likely);
        gpt_free(model);
    }
    Gpt *model = random_model(device, odd, 2, type, GPT_TRAINING);
    check_text(model, 3, (Sampling){.temperature = 0});
    gpt_free(model);
}

static void text_is_that_of_whole_forwards(void **state) {
    (void)state;
    check_decoder(cpu, TYPE_F32);
    check_decoder(cpu, TYPE_F64);
}

static void text_is_that_of_whole_forwards_on_cuda(void **state) {
    (void)state;
    if (no_gpu()) skip();
    check_decoder(gpu, TYPE_F32);
}

/* Equal seeds give equal texts, however often the window slides and however many texts there are;
 * texts drawn together differ. */
static void check_seeds(Device *device, DataType type) {
    enum { B = 9, N = 60 };
    Gpt *model = random_model(device, odd, 1, type, GPT_INFERENCE);
    static const int32_t prompt[3] = {3, 1, 4};
    const int count = (int)part_of(N);
    int32_t text[3][N][B] = {{{0}}}, single[N];
    Sampling rule = {1.5f, 0.95f, 8, 42};
    for (int run = 0; run < 3; run++) {
        rule.seed = run == 2 ? 43 : 42;
        GptDecoder *decoder = decoder_of(model, B, rule);
        if (run == 1) { /* what was drawn before is no matter */
            gpt_decoder_start(decoder, prompt, 1);
            for (int n = 0; n < 5; n++) gpt_decoder_next(decoder, text[run][0]);
        }
        gpt_decoder_start(decoder, prompt, 3);
        for (int n = 0; n < count; n++) {
            gpt_decoder_next(decoder, text[run][n]);
            for (int b = 0; b < B; b++) assert_in_range(text[run][n][b], 0, odd.V - 1);
        }
        gpt_decoder_free(decoder);
    }
    assert_memory_equal(text[0], text[1], sizeof text[0]);
    assert_memory_not_equal(text[0], text[2], sizeof text[0]);
    rule.seed = 42;
    GptDecoder *decoder = decoder_of(model, 1, rule);
    gpt_decoder_start(decoder, prompt, 3);
    size_t other = 0;
    for (int n = 0; n < count; n++) {
        gpt_decoder_next(decoder, &single[n]);
        assert_int_equal(single[n], text[0][n][0]);
        other += text[0][n][1] != single[n];
    }
    assert_true(other > 0);
    gpt_decoder_free(decoder);
    gpt_free(model);
}

static void seeds_decide_the_texts(void **state) {
    (void)state;
    check_seeds(cpu, TYPE_F32);
}

static void seeds_decide_the_texts_on_cuda(void **state) {
    (void)state;
    if (no_gpu()) skip();
    check_seeds(gpu, TYPE_F32);
    check_seeds(gpu, TYPE_BF16);
}

static void too_many_texts_are_refused(void **state) {
    (void)state;
    Gpt *model = random_model(cpu, odd, 1, TYPE_F32, GPT_INFERENCE);
    assert_null(gpt_decoder_create(model, GPT_DECODER_SEQUENCES + 1, &(Sampling){0}));
    assert_said("1 to 1024");
    gpt_free(model);
}

/* --- The device's part ---------------------------------------------------------------------- */

typedef struct {
    Device *device;
    const Layers *layers;
    int32_t *tokens, *positions;
    uint64_t *draws;
    uint32_t *weights;
    float *logits;
    int runs;
} Repeated;

static void repeated(void *argument) {
    Repeated *r = argument;
    r->layers->sample_forward(r->tokens, r->positions, r->draws, r->weights, r->logits, 1, 2,
                              (Sampling){0}, r->device);
    r->runs++;
}

/* Results come in the order of the work, and replayed work is done each time. */
static void check_repeat(Device *device, int given) {
    static const float logits[2] = {1, 2};
    uint64_t zero = 0;
    Repeated r = {device,
                  layers_get(device->type, TYPE_F32),
                  put(device, &zero, 4),
                  put(device, &zero, 4),
                  put(device, &zero, 8),
                  put(device, logits, 8),
                  put(device, logits, 8),
                  0};
    DeviceGraph *graph = NULL;
    for (int round = 0, done = 0; round < 5; round++) {
        for (int i = 0; i < DEVICE_FETCHES; i++) {
            device_repeat(device, &graph, repeated, &r);
            device_fetch(device, r.positions, 4);
        }
        for (int i = 0; i < DEVICE_FETCHES; i++) {
            int32_t position;
            device_receive(device, &position, sizeof position);
            assert_int_equal(position, ++done);
        }
    }
    assert_int_equal(r.runs, given);
    device_graph_free(device, graph);
    void *const memory[] = {r.tokens, r.positions, r.draws, r.weights, r.logits};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) device_free(device, memory[i]);
}

static void work_is_repeated(void **state) {
    (void)state;
    check_repeat(cpu, 5 * DEVICE_FETCHES);
}

static void cuda_replays_work(void **state) {
    (void)state;
    if (no_gpu()) skip();
    check_repeat(gpu, 2);
}

int main(void) {
    open_devices();
    struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_that_of_whole_forwards),
        cmocka_unit_test(text_is_that_of_whole_forwards_on_cuda),
        cmocka_unit_test(seeds_decide_the_texts),
        cmocka_unit_test(seeds_decide_the_texts_on_cuda),
        cmocka_unit_test(too_many_texts_are_refused),
        cmocka_unit_test(work_is_repeated),
        cmocka_unit_test(cuda_replays_work),
    };
    choose_tests(tests);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_devices();
    return failed;
}
