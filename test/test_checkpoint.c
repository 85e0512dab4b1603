/* Checkpoints: what is saved comes back bit for bit, what is not a checkpoint of this model is
 * refused with a sentence, and a save that is killed or runs out of disk leaves the last one
 * whole. */
#include <dirent.h>
#include <errno.h>
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "gpt/checkpoint.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/random.h"
#include "runtime/safetensors.h"

static const GptConfig config = {.L = 2,
                                 .NH = 3,
                                 .C = 12,
                                 .T = 5,
                                 .V = 11,
                                 .layernorm_eps = 1e-5f,
                                 .embedding_dropout = 0.1f,
                                 .residual_dropout = 0.2f,
                                 .attention_dropout = 0.3f};
static const TrainerState example = {.step = 1000,
                                     .stale_validations = 2,
                                     .seed = UINT64_MAX,
                                     .best_loss = 1.4697265625001,
                                     .tokens = 1ull << 63};

static Device *device;
static char root[] = "/tmp/test_checkpoint.XXXXXX";
static char directory[64], other[FILE_PATH_BYTES]; /* root/checkpoint, and a second name */

static void empty_directory(const char *path) {
    DIR *entries = opendir(path);
    if (!entries) return;
    for (struct dirent *entry; (entry = readdir(entries));) {
        char name[FILE_PATH_BYTES];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (!file_join(name, path, entry->d_name)) continue;
        if (unlink(name) != 0) empty_directory(name), rmdir(name);
    }
    closedir(entries);
}

static int open_group(void **state) {
    (void)state;
    device = device_open(DEVICE_CPU, 0);
    if (!device || !mkdtemp(root)) return -1;
    snprintf(directory, sizeof directory, "%s/checkpoint", root);
    snprintf(other, sizeof other, "%s/other", root);
    return 0;
}

static int close_group(void **state) {
    (void)state;
    device_close(device);
    return rmdir(root);
}

static int clean(void **state) {
    (void)state;
    empty_directory(root);
    return 0;
}

static Gpt *create(const GptConfig *shape, GptUse use) {
    GptOptions options = {
        .B = 1, .T = shape->T, .type = TYPE_F32, .use = use, .attention = ATTENTION_NAIVE};
    Gpt *model = gpt_create(shape, &options, device, NULL);
    if (!model) fail_msg("%s", error_message());
    return model;
}

/* Bit patterns of every kind, NaN too: a checkpoint copies and does not compute. */
static void fill(Gpt *model, GptArena arena, uint64_t key) {
    for (size_t i = 0; i < gpt_tensors(model); i++) {
        const GptTensor *tensor = gpt_tensor(model, i);
        uint32_t *bits = malloc(tensor->elements * sizeof *bits);
        for (size_t j = 0; j < tensor->elements; j++)
            bits[j] = (uint32_t)random_mix(random_mix(key, i), j);
        gpt_write(model, arena, tensor, (float *)bits);
        free(bits);
    }
}

static bool same_arena(const Gpt *a, const Gpt *b, GptArena arena) {
    bool same = gpt_tensors(a) == gpt_tensors(b);
    for (size_t i = 0; same && i < gpt_tensors(a); i++) {
        size_t bytes = gpt_tensor(a, i)->elements * sizeof(float);
        float *x = malloc(bytes), *y = malloc(bytes);
        gpt_read(a, arena, gpt_tensor(a, i), x);
        gpt_read(b, arena, gpt_tensor(b, i), y);
        same = !memcmp(x, y, bytes);
        free(x);
        free(y);
    }
    return same;
}

static Gpt *filled(GptUse use) {
    Gpt *model = create(&config, use);
    fill(model, GPT_PARAMETERS, 1);
    if (use == GPT_TRAINING) fill(model, GPT_ADAM_M, 2), fill(model, GPT_ADAM_V, 3);
    return model;
}

static void join(char path[FILE_PATH_BYTES], const char *file) {
    assert_true(file_join(path, directory, file));
}

static void write_text(const char *file, const char *text) {
    char path[FILE_PATH_BYTES];
    join(path, file);
    mkdir(directory, 0777);
    assert_true(file_write(path, text, strlen(text)));
}

static void assert_exists(const char *path, bool expected) {
    if (file_exists(path) != expected)
        fail_msg("%s %s", path, expected ? "is missing" : "was left");
}

static void assert_message(const char *sentence) {
    if (!strstr(error_message(), sentence))
        fail_msg("\"%s\" was expected in: %s", sentence, error_message());
}

static void save(const Gpt *model, const TrainerState *state) {
    if (!checkpoint_save(directory, model, state, NULL, NULL)) fail_msg("%s", error_message());
}

static void round_trip(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    snprintf(other, sizeof other, "%s/tokenizer", root);
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
    assert_message("trainer.json is missing");
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
    snprintf(other, sizeof other, "%s/tokenizer.json", root);
    snprintf(own, sizeof own, "%s/tokenizer_config.json", root);
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
    assert_message("no optimizer");
    assert_exists(directory, false);
    save(model, NULL);
    assert_true(checkpoint_load(directory, model));
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_message("no optimizer");
    gpt_free(model);
}

static void configurations(void **state) {
    (void)state;
#define SIZES "\"n_layer\":2,\"n_head\":3,\"n_embd\":12,\"n_positions\":5,\"vocab_size\":11"
#define GPT2(more) "{\"model_type\":\"gpt2\"," SIZES more "}"
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
            assert_message(cases[i].sentence);
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
        assert_message(cases[i].sentence);
        assert_true(same_arena(model, untouched, GPT_PARAMETERS));
    }

    /* Heads are not seen in any shape. */
    write_foreign(model, (Foreign){0});
    GptConfig heads = config;
    heads.NH = 4;
    Gpt *fours = create(&heads, GPT_INFERENCE);
    assert_false(checkpoint_load(directory, fours));
    assert_message("has 3 heads");
    gpt_free(fours);
    gpt_free(untouched);
    gpt_free(model);
}

static void not_a_checkpoint(void **state) {
    (void)state;
    Gpt *model = filled(GPT_INFERENCE);
    char path[FILE_PATH_BYTES], small[4];
    assert_false(checkpoint_load(directory, model));
    assert_message("there is no directory");
    mkdir(directory, 0777);
    assert_false(checkpoint_load(directory, model));
    assert_message("has no config.json");
    write_text("config.json", GPT2());
    assert_false(checkpoint_load(directory, model));
    assert_message("has no model.safetensors");
    write_text("pytorch_model.bin", "x");
    assert_false(checkpoint_load(directory, model));
    assert_message("pickle");
    write_text("model.safetensors.index.json", "{}");
    assert_false(checkpoint_load(directory, model));
    assert_message("it has no weight_map");
    write_text("model.safetensors", "x");
    assert_false(checkpoint_load(directory, model));
    assert_message("too few");
    assert_true(checkpoint_path(directory, path, sizeof path));
    assert_string_equal(path, directory);
    assert_false(checkpoint_path(directory, small, sizeof small));
    join(path, "config.json");
    assert_false(checkpoint_load(path, model));
    assert_message("fewer than the header of a model of llm.c");
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
    assert_message("has a head of its own, and this model ties its head");

    /* Only config.json says which it is. */
    write_text("config.json", GPT2(",\"tie_word_embeddings\":true"));
    assert_false(checkpoint_load(directory, loaded));
    assert_message("ties its head, and this model has one of its own");
    assert_false(checkpoint_load(directory, tied));
    assert_message("set \"tie_word_embeddings\": false there");
    save(tied, NULL);
    write_text("config.json", GPT2(",\"tie_word_embeddings\":false"));
    assert_false(checkpoint_load(directory, loaded));
    assert_message("has no tensor lm_head.weight");
    snprintf(other, sizeof other, "%s/other.bin", root);
    assert_false(checkpoint_export(other, model, "fp32", NULL));
    assert_message("no head of its own");
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
        if (!good) assert_message(cases[i].sentence);
    }
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));

    /* The same tensors in a second file; a cut one. */
    write_shards(model, NULL, NULL);
    join(path, "model-1-of-2.safetensors");
    join(other, "model-2-of-2.safetensors");
    assert_true(file_copy(path, other));
    assert_false(checkpoint_load(directory, loaded));
    assert_message("is in both");
    write_shards(model, NULL, NULL);
    assert_int_equal(truncate(other, 1000), 0);
    assert_false(checkpoint_load(directory, loaded));
    assert_message("model-2-of-2.safetensors");
    gpt_free(loaded);
    gpt_free(model);
}

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
    assert_message("fp32, bf16 or fp16 numbers, not int8");
    gpt_write(model, GPT_PARAMETERS, gpt_tensor(model, 2), large);
    assert_false(checkpoint_export(directory, model, "fp16", NULL));
    assert_message("h.0.ln_1.weight holds 65520, but fp16 ends at 65504");
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
    snprintf(other, sizeof other, "%s/model.bin", root);
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
    assert_message("not the state of its training");
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
    assert_message("fp32 or bf16 numbers, not fp16");

    GptConfig epsilon = config;
    epsilon.layernorm_eps = 1e-6f;
    Gpt *another = create(&epsilon, GPT_INFERENCE);
    gpt_init(another, 1);
    assert_false(checkpoint_export(other, another, "fp32", NULL));
    assert_message("epsilon of 1e-05");
    assert_false(checkpoint_load(other, another));
    assert_message("epsilon");
    gpt_free(another);
    char home[FILE_PATH_BYTES], slash[96];
    assert_true(checkpoint_home(other, home));
    snprintf(slash, sizeof slash, "%s/", root);
    assert_string_equal(home, slash);
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
    snprintf(other, sizeof other, "%s/model.bin", root);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_true(checkpoint_export(other, model, "fp32", NULL));
        FILE *stream = fopen(other, "r+b");
        fseek(stream, 4 * cases[i].word, SEEK_SET);
        fwrite(&cases[i].value, 4, 1, stream);
        fclose(stream);
        assert_false(checkpoint_load(other, model));
        assert_message(cases[i].sentence);
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
    assert_message("a model of another shape");
    gpt_free(another);
    assert_int_equal(truncate(other, 5000), 0);
    assert_false(checkpoint_load(other, model));
    assert_message("has 5000 bytes, expected");
    assert_int_equal(truncate(other, 1000), 0);
    assert_false(checkpoint_load(other, model));
    assert_message("fewer than the header");

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
    assert_message("what was there is unchanged");
    struct stat status;
    assert_int_equal(stat(other, &status), 0);
    assert_int_equal(status.st_size, 1000);
    gpt_free(untouched);
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
    assert_message("is not what was saved");

    save(model, &example);
    overwrite("model.safetensors", -3, 'x');
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_message("is not what was saved");

    save(model, &example);
    join(path, "optimizer.safetensors");
    assert_int_equal(truncate(path, 1000), 0);
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_message("has 1000 bytes");

    /* The optimizer of another save, whole in itself. */
    save(model, &example);
    snprintf(second, sizeof second, "%s.kept", directory);
    assert_true(file_copy(path, second));
    fill(model, GPT_ADAM_M, 7);
    save(model, &example);
    assert_true(checkpoint_resume(directory, model, &resumed));
    assert_int_equal(rename(second, path), 0);
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_message("is not what was saved");

    save(model, &example);
    unlink(path);
    assert_false(checkpoint_resume(directory, model, &resumed));
    assert_message("optimizer.safetensors is missing");

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
        assert_message(cases[i].sentence);
    }
    assert_memory_equal(&resumed, &example, sizeof example);

    /* The state of a model of another shape. */
    save(model, &example);
    GptConfig longer = config;
    longer.T = 6;
    Gpt *another = create(&longer, GPT_TRAINING);
    assert_false(checkpoint_resume(directory, another, &resumed));
    assert_message("m.wpe.weight has shape (5, 12); this model needs (6, 12)");
    gpt_free(another);
    gpt_free(model);
}

/* What the directory holds besides a checkpoint's files outlives the saves. */
static void others_files_stay(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    char note[FILE_PATH_BYTES], folder[FILE_PATH_BYTES], old[FILE_PATH_BYTES];
    snprintf(old, sizeof old, "%s.old", directory);
    save(model, &example);
    write_text("note.txt", "mine");
    join(note, "note.txt");
    join(folder, "folder");
    mkdir(folder, 0777);
    for (int i = 0; i < 2; i++) {
        save(model, &example);
        char *text = file_read(note, 10, NULL);
        assert_string_equal(text, "mine");
        free(text);
        assert_exists(folder, true);
        assert_exists(old, false);
    }
    gpt_free(model);
}

/* The instants of the two renames, which a kill seldom hits. */
static void interrupted_renames(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    char old[FILE_PATH_BYTES], staging[FILE_PATH_BYTES], path[FILE_PATH_BYTES], slash[96];
    snprintf(old, sizeof old, "%s.old", directory);
    snprintf(staging, sizeof staging, "%s.tmp", directory);
    snprintf(slash, sizeof slash, "%s/", directory);
    TrainerState resumed;

    /* Between them: the old one is away, the new one not in its place. */
    save(model, &example);
    write_text(".tilegpt", "");
    assert_int_equal(rename(directory, old), 0);
    mkdir(staging, 0777);
    assert_true(checkpoint_path(slash, path, sizeof path));
    assert_string_equal(path, old);
    assert_true(checkpoint_load(directory, loaded) &&
                checkpoint_resume(directory, loaded, &resumed));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    fill(model, GPT_PARAMETERS, 5);
    assert_true(checkpoint_save(slash, model, &example, NULL, NULL));
    assert_exists(old, false);
    assert_exists(staging, false);
    assert_true(checkpoint_load(directory, loaded));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));

    /* After them: the old one is half removed. */
    mkdir(old, 0777);
    assert_true(file_join(path, old, "model.safetensors"));
    assert_true(file_write(path, "x", 1));
    assert_true(file_join(path, old, ".tilegpt"));
    assert_true(file_write(path, "", 0));
    assert_true(checkpoint_load(directory, loaded));
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    save(model, &example);
    assert_exists(old, false);
    gpt_free(loaded);
    gpt_free(model);
}

/* Directories of the user's that have the names of a replacement's. */
static void others_directories_stay(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    char path[FILE_PATH_BYTES], thesis[FILE_PATH_BYTES];
    save(model, &example);
    join(path, ".tilegpt");
    assert_exists(path, false);
    fill(model, GPT_PARAMETERS, 7);
    static const char *const names[] = {".tmp", ".old"};
    for (int i = 0; i < 4; i++) {
        bool linked = i >= 2;
        snprintf(path, sizeof path, "%s%s", directory, names[i % 2]);
        snprintf(thesis, sizeof thesis, "%s/kept", root);
        const char *place = linked ? thesis : path;
        char file[FILE_PATH_BYTES];
        assert_int_equal(mkdir(place, 0777), 0);
        assert_true(file_join(file, place, "model.safetensors") && file_write(file, "x", 1));
        if (linked) assert_int_equal(symlink(place, path), 0);
        assert_false(checkpoint_save(directory, model, &example, NULL, NULL));
        assert_message("was not made by this program");
        assert_exists(file, true);
        if (linked) unlink(path);
        unlink(file);
        rmdir(place);
    }
    save(model, &example);
    gpt_free(model);
}

/* A second writer of a directory is refused, and the first goes on. */
static void one_writer_at_a_time(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    DirectoryReplacement first;
    char path[FILE_PATH_BYTES];
    assert_true(directory_replace_begin(&first, directory));
    assert_true(file_join(path, first.staging, "note") && file_write(path, "x", 1));
    assert_false(checkpoint_save(directory, model, &example, NULL, NULL));
    assert_message("another process writes");
    assert_exists(path, true);
    assert_true(directory_replace_commit(&first, NULL));
    join(path, "note");
    assert_exists(path, true);
    save(model, &example);
    assert_exists(path, true);
    gpt_free(model);
}

static void refused_places(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING);
    char path[FILE_PATH_BYTES];
    assert_true(file_write(directory, "x", 1));
    assert_false(checkpoint_save(directory, model, NULL, NULL, NULL));
    assert_message("is a file");
    snprintf(path, sizeof path, "%s/no/where", root);
    assert_false(checkpoint_save(path, model, NULL, NULL, NULL));
    assert_message("No such file");
    snprintf(path, sizeof path, "%s/link", root);
    assert_int_equal(symlink(".", path), 0);
    assert_false(checkpoint_save(path, model, NULL, NULL, NULL));
    assert_message("symbolic link");
    unlink(directory);
    assert_false(checkpoint_save(".", model, NULL, NULL, NULL));
    assert_message("no name of its own");
    assert_false(checkpoint_save("/", model, NULL, NULL, NULL));
    assert_message("no name of its own");
    const char *const missing[] = {"/nonexistent/tokenizer", NULL}, *const clash[] = {
                                                                        "x/config.json", NULL};
    assert_false(checkpoint_save(directory, model, NULL, NULL, missing));
    assert_message("No such file");
    assert_false(checkpoint_save(directory, model, NULL, NULL, clash));
    assert_message("its own config.json");
    assert_exists(directory, false);
    gpt_free(model);
}

/* A limit on the size of files stands for a full disk; at every limit the old checkpoint stays. */
static void full_disk(void **state) {
    (void)state;
    Gpt *model = filled(GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    char staging[FILE_PATH_BYTES];
    snprintf(staging, sizeof staging, "%s.tmp", directory);
    save(model, &example);
    fill(model, GPT_PARAMETERS, 4);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    static const size_t limits[] = {0, 100, 1000, 3000, 10000, 20000, 30000};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        limit = before;
        limit.rlim_cur = limits[i];
        setrlimit(RLIMIT_FSIZE, &limit);
        bool saved = checkpoint_save(directory, model, &example, NULL, NULL);
        setrlimit(RLIMIT_FSIZE, &before);
        assert_false(saved);
        assert_message("File too large");
        assert_exists(staging, false);
        TrainerState resumed;
        assert_true(checkpoint_load(directory, loaded) &&
                    checkpoint_resume(directory, loaded, &resumed));
    }
    signal(SIGXFSZ, SIG_DFL);
    fill(model, GPT_PARAMETERS, 1);
    assert_true(same_arena(model, loaded, GPT_PARAMETERS));
    gpt_free(loaded);
    gpt_free(model);
}

static void fill_version(Gpt *model, uint64_t version) {
    static const GptArena arenas[] = {GPT_PARAMETERS, GPT_ADAM_M, GPT_ADAM_V};
    for (int i = 0; i < 3; i++) fill(model, arenas[i], random_mix(version, (uint64_t)i));
}

/* Saves version after version until it is killed. */
static void save_forever(Gpt *model, uint64_t version) {
    for (;; version++) {
        fill_version(model, version);
        TrainerState state = {.step = version};
        if (!checkpoint_save(directory, model, &state, NULL, NULL)) _exit(1);
    }
}

static void killed_while_saving(void **state) {
    (void)state;
    enum { KILLS = 60 };
    Gpt *model = create(&config, GPT_TRAINING), *loaded = create(&config, GPT_TRAINING);
    char staging[FILE_PATH_BYTES];
    snprintf(staging, sizeof staging, "%s.tmp", directory);
    uint64_t version = 1;
    fill_version(model, version);
    save(model, &(TrainerState){.step = version});

    /* The time of one save, so that the kills spread over its whole course. */
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    save(model, &(TrainerState){.step = version});
    clock_gettime(CLOCK_MONOTONIC, &end);
    uint64_t save_ns =
        (uint64_t)((end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec);
    if (save_ns > 100000000) save_ns = 100000000;

    int interrupted = 0;
    for (int kill_number = 0; kill_number < KILLS; kill_number++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) save_forever(model, version + 1);
        uint64_t wait = random_mix(17, (uint64_t)kill_number) % (2 * save_ns);
        nanosleep(&(struct timespec){.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000},
                  NULL);
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status)); /* and not a save that failed */
        interrupted += file_exists(staging);

        TrainerState resumed;
        if (!checkpoint_load(directory, loaded) || !checkpoint_resume(directory, loaded, &resumed))
            fail_msg("after kill %d: %s", kill_number, error_message());
        assert_true(resumed.step >= version);
        version = resumed.step;
        fill_version(model, version);
        assert_true(same_arena(model, loaded, GPT_PARAMETERS));
        assert_true(same_arena(model, loaded, GPT_ADAM_M));
        assert_true(same_arena(model, loaded, GPT_ADAM_V));
    }
    print_message("%d kills, %d of them in the middle of a save; %llu versions\n", KILLS,
                  interrupted, (unsigned long long)version);
    assert_true(interrupted > KILLS / 4);
    gpt_free(loaded);
    gpt_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(round_trip, clean),
        cmocka_unit_test_teardown(the_end_of_texts_is_named, clean),
        cmocka_unit_test_teardown(best_loss_may_be_infinite, clean),
        cmocka_unit_test_teardown(inference_has_no_optimizer, clean),
        cmocka_unit_test_teardown(configurations, clean),
        cmocka_unit_test_teardown(foreign_accepted, clean),
        cmocka_unit_test_teardown(foreign_refused, clean),
        cmocka_unit_test_teardown(not_a_checkpoint, clean),
        cmocka_unit_test_teardown(untied_heads, clean),
        cmocka_unit_test_teardown(shards_are_one_model, clean),
        cmocka_unit_test_teardown(exports_hold_what_they_can, clean),
        cmocka_unit_test_teardown(llmc_layout, clean),
        cmocka_unit_test_teardown(llmc_refused, clean),
        cmocka_unit_test_teardown(damaged_training_state, clean),
        cmocka_unit_test_teardown(others_files_stay, clean),
        cmocka_unit_test_teardown(interrupted_renames, clean),
        cmocka_unit_test_teardown(others_directories_stay, clean),
        cmocka_unit_test_teardown(one_writer_at_a_time, clean),
        cmocka_unit_test_teardown(refused_places, clean),
        cmocka_unit_test_teardown(full_disk, clean),
        cmocka_unit_test_teardown(killed_while_saving, clean),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, open_group, close_group);
}
