/* A checkpoint is a Hugging Face directory: config.json, model.safetensors, generation_config.json and
 * the tokenizer's files, so AutoModelForCausalLM.from_pretrained(directory) works; beside them
 * optimizer.safetensors (m.NAME and v.NAME, float, unsharded, so that any number of ranks resumes)
 * and trainer.json.
 *
 * It is written into a new directory beside the old one, synced file by file, and renamed into place;
 * a crash at any instant leaves the previous checkpoint whole, and loading falls back to it. */
#ifndef GPT_CHECKPOINT_H
#define GPT_CHECKPOINT_H

#include "gpt/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the trainer needs to go on bit for bit. */
typedef struct {
    uint64_t step; /* updates done */
    uint64_t seed;
    double best_loss;           /* best validation loss so far; infinity if none */
    uint64_t tokens;            /* served so far: the place in the data */
    uint64_t stale_validations; /* since the best one */
} TrainerState;

/* Writes the model and, if state is not NULL, the optimizer and the state. `flags` (may be NULL) is the
 * text of flags_print_values, kept in trainer.json. `extra_file` names files to copy in (the tokenizer's);
 * a NULL-terminated array, or NULL. Only the calling rank writes. The parent directory must exist. */
bool checkpoint_save(const char *directory, const Gpt *model, const TrainerState *state,
                     const char *flags, const char *const *extra_files);

/* Reads config.json. Refuses what this model cannot compute (another model_type or activation, …),
 * saying what was found and what is supported. Also accepts the previous checkpoint left by an
 * interrupted save (checkpoint_path). */
bool checkpoint_config(const char *directory, GptConfig *config);

/* Loads the parameters; names with and without "transformer.", F32, F16 and BF16, lm_head.weight
 * ignored when equal to wte and refused otherwise, mask buffers skipped. Every tensor must be there with
 * the right shape. On failure the model is unchanged or must be discarded, as the message says. */
bool checkpoint_load(const char *directory, Gpt *model);

/* Loads the optimizer and the state for going on. False with error_message() if the checkpoint has
 * none (an imported model) or they do not belong to this model. */
bool checkpoint_resume(const char *directory, Gpt *model, TrainerState *state);

/* The whole directory to read for `directory`: itself, or the one that an interrupted save left whole.
 * False with error_message() if there is neither. */
bool checkpoint_path(const char *directory, char *path, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
