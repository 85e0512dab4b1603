/* Models as Hugging Face's library and others write them: config.json, the parameters in one file
 * or several, a head of its own; and directories that hold no GPT-2, which a sentence refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/safetensors.h"
#include "test/said.h"
#include "test/saved_model.h"

/* A config.json of the model `config`, and more of it. */
#define SIZES "\"n_layer\":2,\"n_head\":3,\"n_embd\":12,\"n_positions\":5,\"vocab_size\":11"
#define GPT2(more) "{\"model_type\":\"gpt2\"," SIZES more "}"

static void configurations(void **state) {
    (void)state;
    static const struct {
        const char *text, *sentence; /* NULL: accepted */
    } cases[] = {
        {GPT2(), NULL},
        {GPT2(",\"activation_function\":\"gelu_pytorch_tanh\""), NULL},
        {GPT2(",\"activation_function\":\"gelu_new\",\"n_inner\":null"), NULL},
        {GPT2(",\"n_inner\":48,\"n_ctx\":5,\"reorder_and_upcast_attn\":true"), NULL},
        {GPT2(",\"scale_attn_weights\":true,\"tie_word_embeddings\":true,\"unknown\":[1]"), NULL},
        {GPT2(",\"tie_word_embeddings\":false"), NULL},
        {"", "not a JSON object"},
        {"[]", "not a JSON object"},
        {GPT2() "x", "not a JSON object"},
        {"{" SIZES "}", "model_type is missing"},
        {"{\"model_type\":\"llama\"," SIZES "}", "model_type is \"llama\"; only \"gpt2\""},
        {"{\"model_type\":\"gpt2\",\"n_layer\":2}", "n_head is missing"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":2.5}", "n_layer is 2.5; a positive integer"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":0}", "n_layer is 0"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":-1}", "n_layer is -1"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":\"2\"}", "n_layer is \"2\""},
        {"{\"model_type\":\"gpt2\",\"n_layer\":1e20}", "n_layer is 1e+20"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":5,\"n_embd\":12,\"n_positions\":5,"
         "\"vocab_size\":11}",
         "12"}, /* width not a multiple of the heads: gpt_config_check */
        {GPT2(",\"n_inner\":40"), "n_inner is 40; only null or 4 times"},
        {GPT2(",\"activation_function\":\"relu\""), "activation_function is \"relu\""},
        {GPT2(",\"activation_function\":\"gelu\""), "activation_function is \"gelu\""},
        {GPT2(",\"scale_attn_weights\":false"), "scale_attn_weights is false; only true"},
        {GPT2(",\"scale_attn_by_inverse_layer_idx\":true"),
         "inverse_layer_idx is true; only false"},
        {GPT2(",\"add_cross_attention\":true"), "add_cross_attention is true; only false"},
        {GPT2(",\"tie_word_embeddings\":1"), "tie_word_embeddings is 1; true or false"},
        {GPT2(",\"layer_norm_epsilon\":\"small\""), "layer_norm_epsilon is \"small\""},
        {GPT2(",\"layer_norm_epsilon\":0"), "config.json"},
        {GPT2(",\"attn_pdrop\":1.5"), "config.json"},
        {"{\"model_type\":\"\\u001b[2J\"}", "model_type is \"\\u001b[2J\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        GptConfig read = {0};
        const GptConfig untouched = {0};
        write_text("config.json", cases[i].text);
        bool good = checkpoint_config(directory, &read);
        if (cases[i].sentence) {
            assert_false(good);
            assert_said(cases[i].sentence);
            assert_memory_equal(&read, &untouched, sizeof read);
        } else {
            if (!good) fail_msg("%s: %s", cases[i].text, error_message());
            assert_int_equal(read.C, 12);
            assert_true(read.layernorm_eps == 1e-5f && read.attention_dropout == 0.1f);
            assert_int_equal(read.untied_head, strstr(cases[i].text, "embeddings\":false") != NULL);
        }
    }
}

/* A directory as other programs write them, with one thing changed. */
typedef struct {
    const char *prefix, *dtype;
    const char *skip, *twice, *bad_dtype; /* names of tensors */
    const char *reshape;                  /* its first dimension grows by one */
    const char *extra;                    /* a tensor of shape (2) */
    enum { NO_HEAD, EQUAL_HEAD, OTHER_HEAD, SMALL_HEAD } head;
} Foreign;

static void write_foreign(const Gpt *model, Foreign foreign) {
    const char *prefix = foreign.prefix ? foreign.prefix : "",
               *dtype = foreign.dtype ? foreign.dtype : "F32";
    size_t size = strcmp(dtype, "F32") ? 2 : 4;
    char path[FILE_PATH_BYTES];
    write_text("config.json", GPT2());
    join(path, "model.safetensors");
    SafetensorsWriter *writer = safetensors_writer(path);
    /* Two passes over the same list: declare, then give the data. */
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < gpt_tensors(model); i++) {
            const GptTensor *tensor = gpt_tensor(model, i);
            char name[96];
            bool bad = foreign.bad_dtype && !strcmp(tensor->name, foreign.bad_dtype);
            bool twice = foreign.twice && !strcmp(tensor->name, foreign.twice);
            bool grows = foreign.reshape && !strcmp(tensor->name, foreign.reshape);
            if (foreign.skip && !strcmp(tensor->name, foreign.skip)) continue;
            size_t shape[2] = {tensor->shape[0] + grows, tensor->shape[1]};
            size_t bytes = (bad ? 8 : size) * shape[0] * (tensor->rank == 2 ? shape[1] : 1);
            for (int copy = 0; copy <= twice; copy++) {
                snprintf(name, sizeof name, "%s%s", copy ? "transformer." : prefix, tensor->name);
                if (pass == 0) {
                    safetensors_declare(writer, name, bad ? "F64" : dtype, tensor->rank, shape);
                    continue;
                }
                float *values = calloc(bytes, 2);
                gpt_read(model, GPT_PARAMETERS, tensor, values);
                if (!strcmp(dtype, "BF16"))
                    for (size_t j = 0; j < tensor->elements; j++)
                        ((uint16_t *)values)[j] = ((uint16_t *)values)[2 * j + 1];
                assert_true(safetensors_write(writer, values, bytes));
                free(values);
            }
        }
        const size_t two = 2, head[2] = {config.V - (foreign.head == SMALL_HEAD), config.C};
        if (foreign.extra) {
            if (pass == 0)
                safetensors_declare(writer, foreign.extra, "F32", 1, &two);
            else
                assert_true(safetensors_write(writer, (float[2]){0}, 8));
        }
        if (foreign.head) {
            float values[11 * 12];
            gpt_read(model, GPT_PARAMETERS, gpt_tensor(model, 0), values);
            ((uint32_t *)values)[70] ^= foreign.head == OTHER_HEAD;
            if (pass == 0)
                safetensors_declare(writer, "lm_head.weight", "F32", 2, head);
            else
                assert_true(safetensors_write(writer, values, head[0] * head[1] * 4));
        }
        if (pass == 0) assert_true(safetensors_begin(writer));
    }
    assert_true(safetensors_finish(writer));
}

static void foreign_accepted(void **state) {
    (void)state;
    static const Foreign cases[] = {
        {.prefix = ""},
        {.prefix = "transformer."},
        {.prefix = "transformer.", .head = EQUAL_HEAD},
        {.extra = "h.0.attn.bias"},
        {.prefix = "transformer.", .extra = "transformer.h.1.attn.masked_bias"},
        {.dtype = "BF16"},
    };
    Gpt *model = filled(GPT_INFERENCE);
    assert_string_equal(gpt_tensor(model, 0)->name, "wte.weight");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_foreign(model, cases[i]);
        Gpt *loaded = create(&config, GPT_INFERENCE);
        if (!checkpoint_load(directory, loaded)) fail_msg("case %zu: %s", i, error_message());
        if (cases[i].dtype) {
            /* What is left of the model after truncation to bf16. */
            Gpt *rounded = create(&config, GPT_INFERENCE);
            for (size_t j = 0; j < gpt_tensors(model); j++) {
                const GptTensor *tensor = gpt_tensor(model, j);
                uint32_t *bits = malloc(tensor->elements * sizeof *bits);
                gpt_read(model, GPT_PARAMETERS, tensor, (float *)bits);
                for (size_t k = 0; k < tensor->elements; k++) bits[k] &= 0xFFFF0000u;
                gpt_write(rounded, GPT_PARAMETERS, tensor, (float *)bits);
                free(bits);
            }
            assert_true(same_arena(rounded, loaded, GPT_PARAMETERS));
            gpt_free(rounded);
        } else {
            assert_true(same_arena(model, loaded, GPT_PARAMETERS));
        }
        gpt_free(loaded);
    }
    /* F16: only that it is taken; test_safetensors proves the conversion. */
    write_foreign(model, (Foreign){.dtype = "F16"});
    Gpt *loaded = create(&config, GPT_INFERENCE);
    assert_true(checkpoint_load(directory, loaded));
    gpt_free(loaded);
    gpt_free(model);
}

static void foreign_refused(void **state) {
    (void)state;
    static const struct {
        Foreign foreign;
        const char *sentence;
    } cases[] = {
        {{.skip = "h.1.mlp.c_fc.bias"},
         "no tensor h.1.mlp.c_fc.bias; this model needs one of shape (48)"},
        {{.skip = "wte.weight"}, "no tensor wte.weight; this model needs one of shape (11, 12)"},
        {{.reshape = "wpe.weight"}, "wpe.weight has shape (6, 12); this model needs (5, 12)"},
        {{.prefix = "transformer.", .reshape = "ln_f.bias"},
         "transformer.ln_f.bias has shape (13)"},
        {{.bad_dtype = "ln_f.weight"}, "ln_f.weight has dtype F64; F32, F16 or BF16"},
        {{.twice = "ln_f.weight"}, "both transformer.ln_f.weight and ln_f.weight"},
        {{.extra = "h.2.ln_1.weight"}, "h.2.ln_1.weight, which a GPT-2 of 2 layers does not have"},
        {{.extra = "score.weight"}, "score.weight"},
        {{.extra = "h.0.attn.biased"}, "h.0.attn.biased"},
        {{.head = OTHER_HEAD}, "lm_head.weight differs from wte.weight"},
        {{.head = SMALL_HEAD}, "lm_head.weight differs from wte.weight"},
    };
    Gpt *model = filled(GPT_INFERENCE), *untouched = filled(GPT_INFERENCE);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Gpt *source = create(&config, GPT_INFERENCE);
        fill(source, GPT_PARAMETERS, 9);
        write_foreign(source, cases[i].foreign);
        gpt_free(source);
        assert_false(checkpoint_load(directory, model));
        assert_said(cases[i].sentence);
        assert_true(same_arena(model, untouched, GPT_PARAMETERS));
    }

    /* Heads are not seen in any shape. */
    write_foreign(model, (Foreign){0});
    GptConfig heads = config;
    heads.NH = 4;
    Gpt *fours = create(&heads, GPT_INFERENCE);
    assert_false(checkpoint_load(directory, fours));
    assert_said("has 3 heads");
    gpt_free(fours);
    gpt_free(untouched);
    gpt_free(model);
}

static void not_a_checkpoint(void **state) {
    (void)state;
    Gpt *model = filled(GPT_INFERENCE);
    char path[FILE_PATH_BYTES], small[4];
    assert_false(checkpoint_load(directory, model));
    assert_said("there is no directory");
    mkdir(directory, 0777);
    assert_false(checkpoint_load(directory, model));
    assert_said("has no config.json");
    write_text("config.json", GPT2());
    assert_false(checkpoint_load(directory, model));
    assert_said("has no model.safetensors");
    write_text("pytorch_model.bin", "x");
    assert_false(checkpoint_load(directory, model));
    assert_said("pickle");
    write_text("model.safetensors.index.json", "{}");
    assert_false(checkpoint_load(directory, model));
    assert_said("it has no weight_map");
    write_text("model.safetensors", "x");
    assert_false(checkpoint_load(directory, model));
    assert_said("too few");
    assert_true(checkpoint_path(directory, path, sizeof path));
    assert_string_equal(path, directory);
    assert_false(checkpoint_path(directory, small, sizeof small));
    join(path, "config.json");
    assert_false(checkpoint_load(path, model));
    assert_said("fewer than the header of a model of llm.c");
    gpt_free(model);
}

/* A head of its own comes back, and is taken for no other model's. */
static void untied_heads(void **state) {
    (void)state;
    GptConfig untied = config, read;
    untied.untied_head = true;
    Gpt *model = create(&untied, GPT_TRAINING), *loaded = create(&untied, GPT_TRAINING);
    Gpt *tied = create(&config, GPT_TRAINING);
    char path[FILE_PATH_BYTES];
    TrainerState resumed;
    fill(model, GPT_PARAMETERS, 1), fill(model, GPT_ADAM_M, 2), fill(model, GPT_ADAM_V, 3);
    save(model, &example);
    assert_true(checkpoint_config(directory, &read));
    assert_memory_equal(&read, &untied, sizeof untied);
    assert_true(checkpoint_load(directory, loaded));
    assert_true(checkpoint_resume(directory, loaded, &resumed));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    assert_true(same_arena(model, loaded, GPT_ADAM_V));
    join(path, "model.safetensors");
    Safetensors *file = safetensors_open(path);
    assert_non_null(file);
    assert_non_null(safetensors_find(file, "lm_head.weight")); /* transformers' name for it */
    assert_null(safetensors_find(file, "transformer.lm_head.weight"));
    safetensors_close(file);
    assert_false(checkpoint_load(directory, tied));
    assert_said("has a head of its own, and this model ties its head");

    /* Only config.json says which it is. */
    write_text("config.json", GPT2(",\"tie_word_embeddings\":true"));
    assert_false(checkpoint_load(directory, loaded));
    assert_said("ties its head, and this model has one of its own");
    assert_false(checkpoint_load(directory, tied));
    assert_said("set \"tie_word_embeddings\": false there");
    save(tied, NULL);
    write_text("config.json", GPT2(",\"tie_word_embeddings\":false"));
    assert_false(checkpoint_load(directory, loaded));
    assert_said("has no tensor lm_head.weight");
    snprintf(other, sizeof other, "%s/other.bin", scratch);
    assert_false(checkpoint_export(other, model, "fp32", NULL));
    assert_said("no head of its own");
    assert_exists(other, false);
    gpt_free(tied);
    gpt_free(loaded);
    gpt_free(model);
}

/* The parameters over two files, with an index whose text is changed where it reads `find`. */
static void write_shards(const Gpt *model, const char *find, const char *put) {
    static const char *const names[] = {"model-1-of-2.safetensors", "model-2-of-2.safetensors"};
    char path[FILE_PATH_BYTES], index[8192] = "{\"metadata\":{},\"weight_map\":{", *at;
    write_text("config.json", GPT2());
    for (size_t shard = 0; shard < 2; shard++) {
        join(path, names[shard]);
        SafetensorsWriter *writer = safetensors_writer(path);
        for (size_t i = shard; i < gpt_tensors(model); i += 2) {
            const GptTensor *tensor = gpt_tensor(model, i);
            safetensors_declare(writer, tensor->name, "F32", tensor->rank, tensor->shape);
            size_t used = strlen(index);
            snprintf(index + used, sizeof index - used, "%s\"%s\":\"%s\"", shard + i > 0 ? "," : "",
                     tensor->name, names[shard]);
        }
        assert_true(safetensors_begin(writer));
        for (size_t i = shard; i < gpt_tensors(model); i += 2) {
            float values[12 * 48];
            gpt_read(model, GPT_PARAMETERS, gpt_tensor(model, i), values);
            assert_true(
                safetensors_write_float(writer, "F32", values, gpt_tensor(model, i)->elements));
        }
        assert_true(safetensors_finish(writer));
    }
    strcat(index, "}}");
    if (find) {
        assert_non_null(at = strstr(index, find));
        char rest[8192];
        strcpy(rest, at + strlen(find));
        strcpy(at, put);
        strcat(index, rest);
    }
    write_text("model.safetensors.index.json", index);
}

static void shards_are_one_model(void **state) {
    (void)state;
    Gpt *model = filled(GPT_INFERENCE), *loaded = create(&config, GPT_INFERENCE);
    char path[FILE_PATH_BYTES];
    write_shards(model, NULL, NULL);
    if (!checkpoint_load(directory, loaded)) fail_msg("%s", error_message());
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));

    static const struct {
        const char *find, *put, *sentence;
    } cases[] = {
        {"weight_map", "weights", "no weight_map"},
        {"{\"metadata\":{},", "{", NULL},
        {"}}", "}", "no weight_map"},
        {"\"model-1-of-2.safetensors\"", "7", "not the name of a file"},
        {"model-1-of-2", "../other", "not the name of a file"},
        {"model-1-of-2.safetensors", "..", "not the name of a file"},
        {"model-1-of-2.safetensors", "", "not the name of a file"},
        {"model-1-of-2", "\\u001b[2J", "not the name of a file"},
        {"model-1-of-2", "model-3-of-2", "names model-3-of-2.safetensors, which is missing"},
        {"model-1-of-2.safetensors", "config.json", "config.json"},
        {"wte.weight", "wte.height", "promises a tensor in model-1-of-2.safetensors"},
        {"model-1-of-2", "model-2-of-2",
         "promises a tensor in model-2-of-2.safetensors that is not there: wte.weight"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_shards(model, cases[i].find, cases[i].put);
        bool good = checkpoint_load(directory, loaded);
        if (good != !cases[i].sentence) fail_msg("case %zu: %s", i, error_message());
        if (!good) assert_said(cases[i].sentence);
    }
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));

    /* The same tensors in a second file; a cut one. */
    write_shards(model, NULL, NULL);
    join(path, "model-1-of-2.safetensors");
    join(other, "model-2-of-2.safetensors");
    assert_true(file_copy(path, other));
    assert_false(checkpoint_load(directory, loaded));
    assert_said("is in both");
    write_shards(model, NULL, NULL);
    assert_int_equal(truncate(other, 1000), 0);
    assert_false(checkpoint_load(directory, loaded));
    assert_said("model-2-of-2.safetensors");
    gpt_free(loaded);
    gpt_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(configurations, clean),
        cmocka_unit_test_teardown(foreign_accepted, clean),
        cmocka_unit_test_teardown(foreign_refused, clean),
        cmocka_unit_test_teardown(not_a_checkpoint, clean),
        cmocka_unit_test_teardown(untied_heads, clean),
        cmocka_unit_test_teardown(shards_are_one_model, clean),
    };
    return cmocka_run_group_tests_name("hugging face", tests, open_group, close_group);
}
