#include "gpt/commands.h"

#include <string.h>

#include "gpt/checkpoint.h"
#include "gpt/options.h"
#include "runtime/error.h"
#include "runtime/files.h"

volatile sig_atomic_t interrupted;

static void on_signal(int number) {
    interrupted = 1;
    signal(number, SIG_DFL);
}

void catch_interrupts(void) {
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

Device *open_device(const Comm *comm) {
    int gpus = device_count_gpus();
    bool cuda =
        strcmp(options.device, "cuda") == 0 || (strcmp(options.device, "auto") == 0 && gpus > 0);
    if (cuda && gpus > 0 && comm_local_ranks(comm) > (size_t)gpus) {
        error_set(
            "%zu ranks were started on a node with %d GPU%s; start at most one a GPU, or use "
            "--device=cpu",
            comm_local_ranks(comm), gpus, gpus == 1 ? "" : "s");
        return NULL;
    }
    return device_open(cuda ? DEVICE_CUDA : DEVICE_CPU, cuda ? (int)comm_local_rank(comm) : 0);
}

bool open_corpus(Corpus *corpus, Tokenizer *tokenizer, size_t V, double fraction) {
    if (corpus_is_shards(options.data)) {
        tokenizer_free(tokenizer);
        bool nanogpt = strcmp(options.data_format, "nanogpt") == 0;
        return corpus_open_shards(corpus, nanogpt ? CORPUS_NANOGPT : CORPUS_SHARDS, options.data,
                                  options.val_data[0] ? options.val_data : NULL, V);
    }
    if (options.val_data[0]) {
        tokenizer_free(tokenizer);
        return error_set("--val-data goes with token shards; a text has --val-fraction");
    }
    return corpus_open_text(corpus, options.data, tokenizer, options.tokenizer, fraction);
}

Gpt *open_checkpoint_as(Device *device, GptConfig *config, const GptOptions *sizes) {
    if (!options.checkpoint[0]) {
        error_set("--checkpoint=DIRECTORY is needed");
        return NULL;
    }
    static char path[FILE_PATH_BYTES];
    GptConfig stored;
    if (!device || !checkpoint_path(options.checkpoint, path, sizeof path)) return NULL;
    options.checkpoint = path;
    if (!checkpoint_config(path, &stored)) return NULL;
    if (config) *config = stored;
    GptOptions chosen = sizes ? *sizes : options_gpt(device, &stored, GPT_INFERENCE);
    Gpt *model = gpt_create(&stored, &chosen, device, NULL);
    if (model && checkpoint_load(options.checkpoint, model)) return model;
    gpt_free(model);
    return NULL;
}

Gpt *open_checkpoint(Device *device, GptConfig *config) {
    return open_checkpoint_as(device, config, NULL);
}

Tokenizer *open_tokenizer(const char *checkpoint) {
    char home[FILE_PATH_BYTES];
    return checkpoint_home(checkpoint, home) ? tokenizer_load(home) : NULL;
}

static bool is_tokenizer(const Tokenizer *tokenizer, const char *name, bool *same) {
    char mine[SHA256_HEX_BYTES], its[SHA256_HEX_BYTES];
    *same = strcmp(tokenizer_kind(tokenizer), name) == 0;
    if (strcmp(name, "char") == 0 || strcmp(name, "bytes") == 0) return true;
    Tokenizer *named = tokenizer_load(name);
    bool good = named && tokenizer_hash(tokenizer, mine) && tokenizer_hash(named, its);
    *same = good && strcmp(mine, its) == 0;
    tokenizer_free(named);
    return good;
}

bool check_tokenizer(const Tokenizer *tokenizer, const char *name) {
    bool same;
    if (!tokenizer)
        return error_set("--tokenizer=%s: these shards have no tokenizer; it goes with a text",
                         name);
    return is_tokenizer(tokenizer, name, &same) &&
           (same || error_set("--tokenizer=%s is another tokenizer than the one that the data was, "
                              "or the run began, with; leave the option out",
                              name));
}

bool check_vocabulary(size_t V, const GptConfig *config) {
    return V <= config->V ||
           error_set("the text has a vocabulary of %zu, but the model's is %zu", V, config->V);
}

bool list_inputs(Paths *paths) {
    if (!options.input.count) return error_set("--input=FILES is needed");
    for (size_t i = 0; i < options.input.count; i++)
        if (!paths_add(paths, options.input.word[i], NULL)) return false;
    return true;
}

TextFormat input_format(void) {
    if (strcmp(options.format, "text") == 0) return TEXT_PLAIN;
    return strcmp(options.format, "jsonl") == 0 ? TEXT_JSONL : TEXT_AUTO;
}
