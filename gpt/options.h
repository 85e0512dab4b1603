/* The options of train_gpt's commands, and the presets' values for them. */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include "gpt/gpt.h"
#include "runtime/flags.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Set by flags_parse from the tables below; gpt/options.c says what each means. */
typedef struct {
    const char *preset, *data, *val_data, *tokenizer, *run, *init, *checkpoint, *prompt;
    const char *prompt_file, *stop, *output;
    FlagList input;
    const char *format, *split, *data_format;
    const char *device, *precision, *attention, *recompute, *schedule;
    double val_fraction, eval_fraction, dropout, lr, min_lr, beta1, beta2, eps, weight_decay, clip;
    double temperature, top_p, rank_timeout;
    int64_t layers, heads, width, context, vocabulary, batch, sequence, accumulate, steps, warmup;
    int64_t eval_every, eval_tokens, patience, sample_every, sample_tokens, save_every, log_every;
    int64_t seed, top_k, samples, vocab_size, shard_tokens;
    bool resume, keep_best, deterministic, interactive, print, special;
} Options;

extern Options options;
extern Flag options_train[], options_sample[], options_eval[], options_plan[], options_export[];
extern Flag options_tokenizer[], options_tokenize[];

/* The shape of the model that the options ask for: that of the checkpoint in the directory `base`, or
 * without one the preset's ("auto": by the device), changed by --layers and so on. Also gives the
 * options of this table that were not given the preset's values. */
bool options_model(Flag *flags, DeviceType device, const char *base, GptConfig *config);

/* Writes what a preset or a checkpoint decided back into the options, so that a record of them is
 * complete. T: tokens in a sequence. */
void options_resolve(const GptConfig *config, size_t T);

/* Batch, precision and so on, for a model of this configuration on this device. */
GptOptions options_gpt(const Device *device, const GptConfig *config, GptUse use);

#ifdef __cplusplus
}
#endif
#endif
