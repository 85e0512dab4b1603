#include "gpt/options.h"

#include <string.h>

#include "gpt/checkpoint.h"
#include "runtime/error.h"

/* clang-format off */
Options options = {
    .preset = "auto", .data = "data/tinyshakespeare.txt", .val_data = "", .tokenizer = "char",
    .run = "", .init = "", .checkpoint = "", .prompt = "", .output = "",
    .device = "auto", .precision = "auto", .attention = "auto", .recompute = "none",
    .val_fraction = 0.1, .dropout = -1, .batch = 4, .accumulate = 1, .steps = 1000,
    .schedule = "cosine", .lr = 6e-4, .min_lr = 6e-5, .warmup = 100,
    .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .clip = 1,
    .eval_every = 250, .save_every = 1000, .keep_best = true, .log_every = 10, .rank_timeout = 45,
    .prompt_file = "", .stop = "", .samples = 1, .temperature = 0.8, .top_p = 1, .top_k = 200, .sample_tokens = 256, .seed = 1337, .vocab_size = 4096,
    .format = "auto", .split = "auto", .data_format = "shards", .shard_tokens = 100000000,
};

#define INT(name, field, least, help) {name, FLAG_INT, &options.field, least, 9e15, NULL, help, false}
#define FLOAT(name, field, least, most, help) \
    {name, FLAG_FLOAT, &options.field, least, most, NULL, help, false}
#define CHOICE(name, field, choices, help) \
    {name, FLAG_CHOICE, &options.field, 0, 0, choices, help, false}
#define STRING(name, field, help) {name, FLAG_STRING, &options.field, 0, 0, NULL, help, false}
#define TEXT(name, field, help) {name, FLAG_TEXT, &options.field, 0, 0, NULL, help, false}
#define BOOL(name, field, help) {name, FLAG_BOOL, &options.field, 0, 0, NULL, help, false}
#define LIST(name, field, help) {name, FLAG_LIST, &options.field, 0, 0, NULL, help, false}
#define END {NULL, FLAG_INT, NULL, 0, 0, NULL, NULL, false}

#define SHAPE_FLAGS                                                                            \
    STRING("preset", preset, "shakespeare-cpu, shakespeare, gpt2-124M, -350M, -774M, -1558M; " \
                             "auto: one of the first two; sets what is not given"),            \
    INT("layers", layers, 0, "layers (L); 0: the preset's"),                                   \
    INT("heads", heads, 0, "heads (NH); 0: the preset's"),                                     \
    INT("width", width, 0, "channels (C); 0: the preset's"),                                   \
    INT("context", context, 0, "longest sequence; 0: the preset's"),                           \
    INT("vocabulary", vocabulary, 0, "words (V) of shards; 0: the preset's; a text sets its own"), \
    FLOAT("dropout", dropout, -1, 0.99, "of embeddings, residuals, attention; -1: the preset's"), \
    CHOICE("recompute", recompute, "none|gelu|block", "what the backward computes anew to save memory")

#define DEVICE_FLAGS                                                                           \
    CHOICE("device", device, "auto|cpu|cuda", "where to compute; auto takes a GPU if there is one"), \
    CHOICE("precision", precision, "auto|fp32|bf16", "auto: bf16 on a GPU, fp32 on the CPU"),  \
    CHOICE("attention", attention, "auto|naive|flash_v1|flash_mma|flash_hopper", "attention kernels"),      \
    INT("batch", batch, 1, "sequences that a rank takes at a time (B)"),                       \
    INT("sequence", sequence, 0, "tokens in a sequence (T); 0: the context")

#define DATA_FLAGS                                                                             \
    STRING("data", data, "a text file, or token shards: a directory, a glob or a .bin file"),  \
    STRING("val-data", val_data, "validation shards, when data is shards"),                    \
    CHOICE("data-format", data_format, "shards|nanogpt", "of .bin files: llm.c's, or nanoGPT's bare uint16")

#define SAMPLE_FLAGS                                                                           \
    FLOAT("temperature", temperature, 0, 100, "of samples; 0: always the likeliest token"),    \
    INT("top-k", top_k, 0, "sample among the k likeliest tokens; 0: all"),                     \
    FLOAT("top-p", top_p, 0, 1, "sample among the likeliest tokens of this share together"),   \
    INT("seed", seed, 0, "of initialisation, data order, dropout and samples")

Flag options_train[] = {
    SHAPE_FLAGS, DATA_FLAGS, DEVICE_FLAGS, SAMPLE_FLAGS,
    FLOAT("val-fraction", val_fraction, 0, 0.9, "share of a text, at its end, for validation"),
    STRING("tokenizer", tokenizer, "for a text: char, bytes, or a directory with tokenizer.json"),
    STRING("run", run, "directory of the log and checkpoints; default: a new one in runs/"),
    BOOL("resume", resume, "go on from the run's last checkpoint, with its flags"),
    STRING("init", init, "start from this Hugging Face GPT-2 directory or llm.c model file"),
    INT("accumulate", accumulate, 1, "batches whose gradients make one update"),
    INT("steps", steps, 1, "updates"),
    FLOAT("lr", lr, 0, 10, "peak learning rate"),
    FLOAT("min-lr", min_lr, 0, 10, "learning rate at the last step"),
    INT("warmup", warmup, 0, "updates of linear warm-up"),
    CHOICE("schedule", schedule, "cosine|linear|constant", "of the learning rate after the warm-up"),
    FLOAT("beta1", beta1, 0, 0.999999, "AdamW's decay of the mean"),
    FLOAT("beta2", beta2, 0, 0.999999, "AdamW's decay of the square"),
    FLOAT("eps", eps, 1e-16, 1, "AdamW's epsilon"),
    FLOAT("weight-decay", weight_decay, 0, 10, "of matrices"),
    FLOAT("clip", clip, 0, 1e9, "largest global gradient norm; 0: no clipping"),
    INT("eval-every", eval_every, 0, "updates between validations; 0: only at the end"),
    INT("eval-tokens", eval_tokens, 0, "predictions of one validation; 0: all"),
    INT("patience", patience, 0, "stop after so many validations without a new best; 0: never"),
    BOOL("keep-best", keep_best, "save the model of the best validation in RUN/best"),
    INT("save-every", save_every, 0, "updates between checkpoints in RUN/last; 0: only at the end"),
    INT("sample-every", sample_every, 0, "updates between samples; 0: only at the end"),
    INT("sample-tokens", sample_tokens, 0, "length of a sample; 0: none"),
    INT("log-every", log_every, 1, "updates between progress lines (log.csv has them all)"),
    BOOL("deterministic", deterministic, "equal bits from equal runs, even where that is slower"),
    FLOAT("rank-timeout", rank_timeout, 1, 1e6, "seconds after which a silent rank ends the run"),
    END,
};

Flag options_sample[] = {
    STRING("checkpoint", checkpoint, "directory of the model, or llm.c's model file"),
    TEXT("prompt", prompt, "text to continue; default: a new text"),
    STRING("prompt-file", prompt_file, "a file with the text to continue"),
    BOOL("interactive", interactive, "continue lines of the input, one after the other"),
    INT("tokens", sample_tokens, 0, "tokens to write, at most"),
    {"samples", FLAG_INT, &options.samples, 1, 1024, NULL, "texts to write, all at once", false},
    TEXT("stop", stop, "end a text before this one comes; \"<|endoftext|>\" always ends it"),
    SAMPLE_FLAGS, DEVICE_FLAGS, END,
};

Flag options_eval[] = {
    STRING("checkpoint", checkpoint, "directory of the model, or llm.c's model file"),
    INT("eval-tokens", eval_tokens, 0, "predictions; 0: all"),
    FLOAT("val-fraction", eval_fraction, 0, 0.9, "only this share of a text, at its end; 0: all"),
    STRING("data", data, "a text file, token shards, or llm.c's file of multiple-choice examples"),
    STRING("val-data", val_data, "shards to evaluate instead of those of --data"),
    CHOICE("data-format", data_format, "shards|nanogpt", "of .bin files: llm.c's, or nanoGPT's bare uint16"),
    DEVICE_FLAGS, END,
};

Flag options_export[] = {
    STRING("checkpoint", checkpoint, "directory of the model, or llm.c's model file"),
    STRING("output", output, "directory to write for Hugging Face, or FILE.bin for llm.c"),
    CHOICE("precision", precision, "auto|fp32|bf16|fp16", "of the numbers; auto: fp32"),
    END,
};

#define INPUT_FLAGS                                                                            \
    LIST("input", input, "texts, as they are or gzipped: names or patterns, one or several"),  \
    CHOICE("format", format, "auto|text|jsonl", "jsonl: the \"text\" of each line of JSON; auto: by " \
           "the name, .jsonl or .ndjson")

Flag options_tokenizer[] = {
    INPUT_FLAGS,
    INT("vocab-size", vocab_size, 257, "tokens: 256 bytes, merges, and <|endoftext|>"),
    STRING("output", output, "directory to write tokenizer.json to"), END,
};

Flag options_tokenize[] = {
    INPUT_FLAGS,
    STRING("tokenizer", tokenizer, "char, bytes, or a directory with tokenizer.json, or with "
                                   "vocab.json and merges.txt"),
    STRING("output", output, "directory to make, with train_*.bin, val_*.bin, manifest.json"),
    BOOL("print", print, "print the ids instead, one line for each of the input"),
    BOOL("special", special, "the text's <|endoftext|> is that token, not these characters"),
    FLOAT("val-fraction", val_fraction, 0, 0.9, "share of the text for validation; 0: none"),
    CHOICE("split", split, "auto|end|documents", "validation: the end of each text, or documents "
           "drawn by the seed; auto: end for one plain text"),
    INT("seed", seed, 0, "of the documents for validation"),
    {"shard-tokens", FLAG_INT, &options.shard_tokens, 1, INT32_MAX, NULL,
     "tokens of a shard; the last one may have fewer", false},
    END,
};

Flag options_plan[] = {SHAPE_FLAGS, DEVICE_FLAGS, END};

/* What a preset sets beyond the model's shape. A name that ends in - stands for all that begin so. */
static const struct {
    const char *preset, *flag, *value;
} preset_values[] = {
    {"shakespeare", "batch", "64"}, {"shakespeare", "steps", "5000"},
    {"shakespeare", "lr", "1e-3"}, {"shakespeare", "min-lr", "1e-4"},
    {"shakespeare", "beta2", "0.99"}, {"shakespeare", "patience", "6"},
    {"shakespeare-cpu", "batch", "12"}, {"shakespeare-cpu", "steps", "2000"},
    {"shakespeare-cpu", "lr", "2e-3"}, {"shakespeare-cpu", "min-lr", "1e-4"},
    {"shakespeare-cpu", "beta2", "0.99"},
    {"gpt2-", "steps", "19560"}, {"gpt2-", "warmup", "700"},
    {"gpt2-", "eval-tokens", "1048576"},
};
/* clang-format on */

static bool matches(const char *preset, const char *name) {
    size_t n = strlen(name);
    return name[n - 1] == '-' ? strncmp(preset, name, n) == 0 : strcmp(preset, name) == 0;
}

static bool apply_preset(Flag *flags) {
    for (size_t i = 0; i < sizeof preset_values / sizeof preset_values[0]; i++)
        if (matches(options.preset, preset_values[i].preset))
            for (const Flag *flag = flags; flag->name; flag++)
                if (strcmp(flag->name, preset_values[i].flag) == 0 && !flag->given &&
                    !flags_set(flags, flag->name, preset_values[i].value))
                    return false;
    return true;
}

bool options_model(Flag *flags, DeviceType device, const char *base, GptConfig *config) {
    if (strcmp(options.preset, "auto") == 0)
        options.preset = device == DEVICE_CUDA ? "shakespeare" : "shakespeare-cpu";
    if (!gpt_preset(options.preset, config) || !apply_preset(flags)) return false;
    if (base && !checkpoint_config(base, config)) return false;
    if (options.layers) config->L = (size_t)options.layers;
    if (options.heads) config->NH = (size_t)options.heads;
    if (options.width) config->C = (size_t)options.width;
    if (options.context) config->T = (size_t)options.context;
    if (options.vocabulary) config->V = (size_t)options.vocabulary;
    float p = (float)options.dropout;
    if (p < 0 && p != -1)
        return error_set("--dropout=%g: expected -1, or a number from 0 to 0.99", options.dropout);
    if (p >= 0)
        config->embedding_dropout = config->residual_dropout = config->attention_dropout = p;
    return true;
}

void options_resolve(const GptConfig *config, size_t T) {
    float p = config->residual_dropout;
    options.layers = (int64_t)config->L;
    options.heads = (int64_t)config->NH;
    options.width = (int64_t)config->C;
    options.context = (int64_t)config->T;
    options.vocabulary = (int64_t)config->V;
    options.sequence = (int64_t)T;
    if (config->embedding_dropout == p && config->attention_dropout == p) options.dropout = p;
}

GptOptions options_gpt(const Device *device, const GptConfig *config, GptUse use) {
    bool automatic = strcmp(options.precision, "auto") == 0;
    bool bf16 = strcmp(options.precision, "bf16") == 0 ||
                (automatic && device->type == DEVICE_CUDA && device->architecture >= 80);
    GptRecompute recompute = RECOMPUTE_NONE;
    while (strcmp(gpt_recompute_name(recompute), options.recompute) != 0) recompute++;
    GptOptions gpt = {
        .B = (size_t)options.batch,
        .T = options.sequence ? (size_t)options.sequence : config->T,
        .type = bf16 ? TYPE_BF16 : TYPE_F32,
        .use = use,
        .attention = attention_by_name(options.attention),
        .recompute = recompute,
        .deterministic = options.deterministic,
    };
    return gpt;
}
