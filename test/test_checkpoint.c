/* Checkpoints: what is saved comes back bit for bit, and training that is damaged, or another
 * model's, is not gone on with. */
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
#include "test/said.h"
#include "test/saved_model.h"

static void round_trip(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    snprintf(other, sizeof other, "%s/tokenizer", scratch);
    assert_true(file_write(other, "abc", 3));
    const char *const extra[] = {other, NULL};
    const char *flags = "preset=shakespeare\nname=\"quoted\" \xC3\xA9\n";
    if (!checkpoint_save(directory, model, &example, flags, extra)) fail_msg("%s", error_message());

    GptConfig read;
    assert_true(checkpoint_config(directory, &read));
    assert_memory_equal(&read, &config, sizeof config);
    TrainerState resumed;
    assert_true(checkpoint_load(directory, loaded));
    if (!checkpoint_resume(directory, loaded, &resumed)) fail_msg("%s", error_message());
    assert_memory_equal(&resumed, &example, sizeof example);
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    assert_true(same_arena(model, loaded, GPT_ADAM_M));
    assert_true(same_arena(model, loaded, GPT_ADAM_V));

    char path[FILE_PATH_BYTES];
    join(path, "tokenizer");
    char *text = file_read(path, 10, NULL);
    assert_string_equal(text, "abc");
    free(text);
    join(path, "trainer.json");
    text = file_read(path, 10000, NULL);
    assert_non_null(strstr(text, "preset=shakespeare\\nname=\\\"quoted\\\" \xC3\xA9\\n"));
    free(text);
    join(path, "config.json");
    text = file_read(path, 10000, NULL);
    assert_non_null(strstr(text, "1e-05"));
    assert_non_null(strstr(text, "0.1,"));
    free(text);
    snprintf(path, sizeof path, "%s.tmp", directory);
    assert_exists(path, false);
    gpt_free(loaded);

    /* Without the state: a model to use, not to go on with, even over one that could go on. */
    assert_true(checkpoint_save(directory, model, NULL, NULL, NULL));
    join(path, "optimizer.safetensors");
    assert_exists(path, false);
    loaded = create(&config, GPT_TRAINING);
    assert_true(checkpoint_load(directory, loaded));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    assert_false(checkpoint_resume(directory, loaded, &resumed));
    assert_said("trainer.json is missing");
    gpt_free(loaded);
    gpt_free(model);
}

static void assert_file(const char *name, const char *part) {
    char path[FILE_PATH_BYTES];
    join(path, name);
    char *text = file_read(path, 10000, NULL);
    if (!text || !strstr(text, part)) fail_msg("%s lacks %s: %s", name, part, text);
    free(text);
}

/* What transformers needs to know of the tokenizer, from its own file. */
static void the_end_of_texts_is_named(void **state) {
    (void)state;
#define ADDED(id) "{\"added_tokens\":[{\"id\":" id ",\"content\":\"<|endoftext|>\"}]}"
    static const struct {
        const char *tokenizer, *id, *token;
    } cases[] = {
        {ADDED("10"), "10", "\"<|endoftext|>\""}, /* the last of V=11 */
        {ADDED("11"), "null", "null"},
        {ADDED("-1"), "null", "null"},
        {ADDED("\"1\""), "null", "null"},
        {"{\"added_tokens\":[{\"id\":3,\"content\":\"<s>\"}]}", "null", "null"},
        {"{\"added_tokens\":7}", "null", "null"},
        {"not JSON", "null", "null"},
    };
    Gpt *model = filled(GPT_INFERENCE);
    char own[FILE_PATH_BYTES], line[64];
    snprintf(other, sizeof other, "%s/tokenizer.json", scratch);
    snprintf(own, sizeof own, "%s/tokenizer_config.json", scratch);
    const char *const extra[] = {other, NULL}, *const both[] = {other, own, NULL};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_true(file_write(other, cases[i].tokenizer, strlen(cases[i].tokenizer)));
        assert_true(checkpoint_save(directory, model, NULL, NULL, extra));
        snprintf(line, sizeof line, "\"eos_token_id\":\t%s,", cases[i].id);
        assert_file("config.json", line);
        snprintf(line, sizeof line, "\"eos_token_id\": %s\n", cases[i].id);
        assert_file("generation_config.json", line);
        snprintf(line, sizeof line, "\"eos_token\": %s,", cases[i].token);
        assert_file("tokenizer_config.json", line);
    }
    assert_true(file_write(own, "mine", 4));
    assert_true(checkpoint_save(directory, model, NULL, NULL, both));
    assert_file("tokenizer_config.json", "mine");
    gpt_free(model);
}

static void best_loss_may_be_infinite(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    TrainerState resumed = {0};
    save(model, &(TrainerState){.best_loss = INFINITY});
    assert_true(checkpoint_resume(directory, model, &resumed));
    assert_true(resumed.best_loss == INFINITY);
    gpt_free(model);
}

static void inference_has_no_optimizer(void **state) {
    (void)state;
    Gpt *model = filled(GPT_INFERENCE);
    TrainerState resumed;
    assert_false(checkpoint_save(directory, model, &example, NULL, NULL));
    assert_said("no optimizer");
    assert_exists(directory, false);
    save(model, NULL);
    assert_true(checkpoint_load(directory, model));
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_said("no optimizer");
    gpt_free(model);
}

static void overwrite(const char *file, long at, char byte) {
    char path[FILE_PATH_BYTES];
    join(path, file);
    FILE *stream = fopen(path, "r+b");
    assert_non_null(stream);
    fseek(stream, at, at < 0 ? SEEK_END : SEEK_SET);
    fputc(byte, stream);
    fclose(stream);
}

static void damaged_training_state(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    TrainerState resumed = example;
    char path[FILE_PATH_BYTES], second[FILE_PATH_BYTES];

    save(model, &example);
    overwrite("optimizer.safetensors", -1, 'x');
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_said("is not what was saved");

    save(model, &example);
    overwrite("model.safetensors", -3, 'x');
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_said("is not what was saved");

    save(model, &example);
    join(path, "optimizer.safetensors");
    assert_int_equal(truncate(path, 1000), 0);
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_said("has 1000 bytes");

    /* The optimizer of another save, whole in itself. */
    save(model, &example);
    snprintf(second, sizeof second, "%s.kept", directory);
    assert_true(file_copy(path, second));
    fill(model, GPT_ADAM_M, 7);
    save(model, &example);
    assert_true(checkpoint_resume(directory, model, &resumed));
    assert_int_equal(rename(second, path), 0);
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_said("is not what was saved");

    save(model, &example);
    unlink(path);
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_said("optimizer.safetensors is missing");

    static const struct {
        const char *text, *sentence;
    } cases[] = {
        {"", "not a JSON object"},
        {"{}", "no format number"},
        {"{\"format\":2}", "has format 2; this program reads format 1"},
        {"{\"format\":1}", "damaged"},
        {"{\"format\":1,\"step\":\"-1\",\"seed\":\"0\",\"tokens\":\"0\","
         "\"stale_validations\":\"0\","
         "\"best_loss\":null}",
         "damaged"},
        {"{\"format\":1,\"step\":\"18446744073709551616\",\"seed\":\"0\","
         "\"tokens\":\"0\",\"stale_validations\":\"0\",\"best_loss\":null}",
         "damaged"},
        {"{\"format\":1,\"step\":\"1\",\"seed\":\"0\",\"tokens\":\"0\","
         "\"stale_validations\":\"0\","
         "\"best_loss\":null}",
         "does not name the files"},
    };
    save(model, &example);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text("trainer.json", cases[i].text);
        assert_false(checkpoint_resume(directory, model, &resumed));
        assert_said(cases[i].sentence);
    }
    assert_memory_equal(&resumed, &example, sizeof example);

    /* The state of a model of another shape. */
    save(model, &example);
    GptConfig longer = config;
    longer.T = 6;
    Gpt *another = create(&longer, GPT_TRAINING);
    assert_false(checkpoint_resume(directory, another, &resumed));
    assert_said("m.wpe.weight has shape (5, 12); this model needs (6, 12)");
    gpt_free(another);
    gpt_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(round_trip, clean),
        cmocka_unit_test_teardown(the_end_of_texts_is_named, clean),
        cmocka_unit_test_teardown(best_loss_may_be_infinite, clean),
        cmocka_unit_test_teardown(inference_has_no_optimizer, clean),
        cmocka_unit_test_teardown(damaged_training_state, clean),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, open_group, close_group);
}
