/* Exports: the numbers as fp32, bf16 or fp16, in a directory or in a model file of llm.c, which is
 * read too. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/files.h"
#include "test/said.h"
#include "test/saved_model.h"

/* Normals, whose rounding can be judged: half of the last of 8 bits in bf16, of 11 in fp16. */
static Gpt *normal(void) {
    Gpt *model = create(&config, GPT_INFERENCE);
    gpt_init(model, 3);
    return model;
}

static void assert_rounded(const Gpt *exact, const Gpt *rounded, float bound) {
    for (size_t i = 0; i < gpt_tensors(exact); i++) {
        float a[12 * 48], b[12 * 48];
        gpt_read(exact, GPT_PARAMETERS, gpt_tensor(exact, i), a);
        gpt_read(rounded, GPT_PARAMETERS, gpt_tensor(rounded, i), b);
        for (size_t j = 0; j < gpt_tensor(exact, i)->elements; j++)
            assert_true(fabsf(a[j] - b[j]) <=
                        bound * fabsf(a[j]) + 0x1p-25f); /* fp16's subnormals */
    }
}

static void exports_hold_what_they_can(void **state) {
    (void)state;
    static const struct {
        const char *precision, *torch;
        float bound;
    } cases[] = {
        {"fp32", "float32", 0}, {"bf16", "bfloat16", 0x1p-8f}, {"fp16", "float16", 0x1p-11f}};
    Gpt *model = normal(), *loaded = create(&config, GPT_INFERENCE);
    char path[FILE_PATH_BYTES];
    for (size_t i = 0; i < 3; i++) {
        if (!checkpoint_export(directory, model, cases[i].precision, NULL))
            fail_msg("%s", error_message());
        assert_true(checkpoint_load(directory, loaded));
        assert_rounded(model, loaded, cases[i].bound);
        if (i == 0) assert_true(same_arena(model, loaded, GPT_PARAMETERS));
        join(path, "config.json");
        char *text = file_read(path, 10000, NULL);
        assert_non_null(strstr(text, cases[i].torch));
        free(text);
    }
    float large[12 * 48] = {[3] = 65520};
    assert_false(checkpoint_export(directory, model, "int8", NULL));
    assert_said("fp32, bf16 or fp16 numbers, not int8");
    gpt_write(model, GPT_PARAMETERS, gpt_tensor(model, 2), large);
    assert_false(checkpoint_export(directory, model, "fp16", NULL));
    assert_said("h.0.ln_1.weight holds 65520, but fp16 ends at 65504");
    large[3] = 65519;
    gpt_write(model, GPT_PARAMETERS, gpt_tensor(model, 2), large);
    assert_true(checkpoint_export(directory, model, "fp16", NULL));
    assert_true(checkpoint_load(directory, loaded));
    gpt_read(loaded, GPT_PARAMETERS, gpt_tensor(loaded, 2), large);
    assert_true(large[3] == 65504);
    gpt_free(loaded);
    gpt_free(model);
}

/* The places of values in a file of llm.c, computed from its description: L=2, NH=3, C=12, T=5,
 * V=11, and V padded to 128. */
static void llmc_layout(void **state) {
    (void)state;
    enum { C = 12, VP = 128, QKV = VP * C + 5 * C + 2 * (2 * C) };
    Gpt *model = filled(GPT_INFERENCE), *loaded = create(&config, GPT_INFERENCE);
    snprintf(other, sizeof other, "%s/model.bin", scratch);
    if (!checkpoint_export(other, model, "fp32", NULL)) fail_msg("%s", error_message());
    size_t bytes;
    char *text = file_read(other, 1 << 20, &bytes);
    const int32_t *header = (const int32_t *)text;
    const int32_t expected[8] = {20240326, 3, 5, 11, 2, 3, 12, VP};
    assert_memory_equal(header, expected, sizeof expected);
    for (int i = 8; i < 256; i++) assert_int_equal(header[i], 0);
    assert_int_equal(bytes, 1024 + 4 * (gpt_parameters(&config) + (VP - 11) * C));

    const uint32_t *values = (const uint32_t *)(text + 1024);
    uint32_t wte[11 * C], qkv[C * 3 * C];
    gpt_read(model, GPT_PARAMETERS, gpt_tensor(model, 0), (float *)wte);
    assert_memory_equal(values, wte, sizeof wte);
    for (size_t i = 11 * C; i < VP * C; i++) assert_int_equal(values[i], 0);
    for (size_t l = 0; l < 2; l++) {
        const GptTensor *tensor = gpt_tensor(model, 2 + 12 * l + 2);
        gpt_read(model, GPT_PARAMETERS, tensor, (float *)qkv);
        if (l == 1) assert_string_equal(tensor->name, "h.1.attn.c_attn.weight");
        for (size_t out = 0; out < 3 * C; out++)
            for (size_t in = 0; in < C; in++)
                assert_int_equal(values[QKV + l * 3 * C * C + out * C + in], qkv[in * 3 * C + out]);
    }
    free(text);

    GptConfig read, undropped = config;
    undropped.embedding_dropout = undropped.residual_dropout = undropped.attention_dropout = 0;
    assert_true(checkpoint_config(other, &read));
    assert_memory_equal(&read, &undropped, sizeof read);
    if (!checkpoint_load(other, loaded)) fail_msg("%s", error_message());
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    TrainerState resumed;
    assert_false(checkpoint_resume(other, loaded, &resumed));
    assert_said("not the state of its training");
    gpt_free(model);

    model = normal();
    assert_true(checkpoint_export(other, model, "bf16", NULL));
    text = file_read(other, 1 << 20, &bytes);
    assert_int_equal(((const int32_t *)text)[1], 5);
    assert_int_equal(bytes, 1024 + 2 * (gpt_parameters(&config) + (VP - 11) * C));
    free(text);
    assert_true(checkpoint_load(other, loaded));
    assert_rounded(model, loaded, 0x1p-8f);
    assert_false(checkpoint_export(other, model, "fp16", NULL));
    assert_said("fp32 or bf16 numbers, not fp16");

    GptConfig epsilon = config;
    epsilon.layernorm_eps = 1e-6f;
    Gpt *another = create(&epsilon, GPT_INFERENCE);
    gpt_init(another, 1);
    assert_false(checkpoint_export(other, another, "fp32", NULL));
    assert_said("epsilon of 1e-05");
    assert_false(checkpoint_load(other, another));
    assert_said("epsilon");
    gpt_free(another);
    char home[FILE_PATH_BYTES];
    assert_true(checkpoint_home(other, home));
    assert_string_equal(home, scratch);
    gpt_free(loaded);
    gpt_free(model);
}

static void llmc_refused(void **state) {
    (void)state;
    static const struct {
        int word;
        int32_t value;
        const char *sentence;
    } cases[] = {
        {0, 20240327, "magic number is 20240327, expected 20240326"},
        {1, 4, "has version 4"},
        {1, 5, "has something after its end"},
        {2, 6, "is cut short"},
        {3, 0, "number 3 of its header is 0"},
        {4, -1, "number 4 of its header is -1"},
        {4, INT32_MAX, "1 to 4096 layers"},
        {5, 5, "multiple of the heads"},
        {6, INT32_MAX, "the width must be"},
        {7, 10, "padded vocabulary is 10, less than the vocabulary of 11"},
        {7, INT32_MAX, "is cut short"},
    };
    Gpt *model = normal(), *untouched = normal();
    snprintf(other, sizeof other, "%s/model.bin", scratch);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_true(checkpoint_export(other, model, "fp32", NULL));
        FILE *stream = fopen(other, "r+b");
        fseek(stream, 4 * cases[i].word, SEEK_SET);
        fwrite(&cases[i].value, 4, 1, stream);
        fclose(stream);
        assert_false(checkpoint_load(other, model));
        assert_said(cases[i].sentence);
        assert_true(same_arena(model, untouched, GPT_PARAMETERS));
        bool is_model = cases[i].word != 0; /* by its magic number; others are not replaced */
        assert_int_equal(checkpoint_export(other, model, "fp32", NULL), is_model);
        unlink(other);
    }
    assert_true(checkpoint_export(other, model, "fp32", NULL));
    GptConfig longer = config;
    longer.T = 6;
    Gpt *another = create(&longer, GPT_INFERENCE);
    assert_false(checkpoint_load(other, another));
    assert_said("a model of another shape");
    gpt_free(another);
    assert_int_equal(truncate(other, 5000), 0);
    assert_false(checkpoint_load(other, model));
    assert_said("has 5000 bytes, expected");
    assert_int_equal(truncate(other, 1000), 0);
    assert_false(checkpoint_load(other, model));
    assert_said("fewer than the header");

    /* A full disk leaves the file that was there. */
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before, limit.rlim_cur = 3000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    bool saved = checkpoint_export(other, model, "fp32", NULL);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_DFL);
    assert_false(saved);
    assert_said("what was there is unchanged");
    struct stat status;
    assert_int_equal(stat(other, &status), 0);
    assert_int_equal(status.st_size, 1000);
    gpt_free(untouched);
    gpt_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(exports_hold_what_they_can, clean),
        cmocka_unit_test_teardown(llmc_layout, clean),
        cmocka_unit_test_teardown(llmc_refused, clean),
    };
    return cmocka_run_group_tests_name("export", tests, open_group, close_group);
}
