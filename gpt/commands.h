/* The commands of train_gpt apart from `train`, one a file (gpt/command_NAME.c), and what they
 * share. Each reads `options` and prints its result; false with error_message(). */
#ifndef GPT_COMMANDS_H
#define GPT_COMMANDS_H

#include <signal.h>

#include "data/corpus.h"
#include "data/paths.h"
#include "data/text_source.h"
#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

bool command_sample(Comm *comm);
bool command_eval(Comm *comm);
bool command_export(Comm *comm);
bool command_plan(Comm *comm);
bool command_tokenizer(Comm *comm);
bool command_tokenize(Comm *comm);

/* Nonzero after the first SIGINT or SIGTERM that follows catch_interrupts(): finish and end with
 * status 130. A second signal ends the process at once. */
extern volatile sig_atomic_t interrupted;
void catch_interrupts(void);

/* The device that --device asks for; NULL with error_message(). */
Device *open_device(const Comm *comm);

/* Opens --data: token shards, which must stay below V, or a text with this tokenizer (NULL: the one
 * that --tokenizer names), of which the last `fraction` is for validation. Takes the tokenizer. */
bool open_corpus(Corpus *corpus, Tokenizer *tokenizer, size_t V, double fraction);

/* The files of --input, and --format. False with error_message(). */
bool list_inputs(Paths *paths);
TextFormat input_format(void);

/* The model of --checkpoint, made for inference, and its configuration; options.checkpoint becomes
 * the directory or file that was read. NULL with error_message(), also for a NULL device. */
Gpt *open_checkpoint(Device *device, GptConfig *config);
/* The same with these sizes instead of the options' (NULL: the options'); config may be NULL. */
Gpt *open_checkpoint_as(Device *device, GptConfig *config, const GptOptions *sizes);

/* The tokenizer of a checkpoint; NULL with error_message(). */
Tokenizer *open_tokenizer(const char *checkpoint);

/* Whether --tokenizer=name, given beside this tokenizer that goes with the data or the run, is the
 * same; NULL: there is none. */
bool check_tokenizer(const Tokenizer *tokenizer, const char *name);

/* A vocabulary's V tokens must be rows of the embedding. */
bool check_vocabulary(size_t V, const GptConfig *config);

/* Writes a sample of a model in training to stdout as the options say, or why there is none. */
void write_sample(Gpt *model, const Tokenizer *tokenizer, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
