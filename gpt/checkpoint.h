/* A checkpoint is a Hugging Face directory: config.json, model.safetensors, generation_config.json
 * and the tokenizer's files, so AutoModelForCausalLM.from_pretrained(directory) works; beside them
 * optimizer.safetensors (m.NAME and v.NAME, float, unsharded, so that any number of ranks resumes)
 * and trainer.json.
 *
 * It is written into a new directory beside the old one, synced file by file, and renamed into
 * place; a crash at any instant leaves the previous checkpoint whole, and loading falls back to it.
 *
 * For reading, a path may also name a model file of llm.c. */
#ifndef GPT_CHECKPOINT_H
#define GPT_CHECKPOINT_H

#include "gpt/gpt.h"
#include "runtime/files.h"

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

/* Writes the model and, if state is not NULL, the optimizer and the state. `flags` (may be NULL) is
 * the text of flags_print_values, kept in trainer.json. `extra_files` names files to copy in (the
 * tokenizer's); a NULL-terminated array, or NULL. Only the calling rank writes. The parent
 * directory must exist. */
bool checkpoint_save(const char *directory, const Gpt *model, const TrainerState *state,
                     const char *flags, const char *const *extra_files);

/* Writes the model alone, its numbers as "fp32", "bf16" or "fp16": a directory with the extra
 * files, or, if the name ends in .bin, a model file of llm.c (fp32 or bf16). Nothing but an earlier
 * export is replaced: a directory may hold files of these names only if its config.json is one of
 * ours, and must be neither the state of a training nor a run's last or best; a file must be a model
 * of llm.c and no link. */
bool checkpoint_export(const char *path, const Gpt *model, const char *precision,
                       const char *const *extra_files);

/* Reads config.json. Refuses what this model cannot compute (another model_type or activation, …),
 * saying what was found and what is supported. Also accepts the previous checkpoint left by an
 * interrupted save (checkpoint_path). */
bool checkpoint_config(const char *directory, GptConfig *config);

/* Loads the parameters, from one file or several with an index; names with and without
 * "transformer.", F32, F16 and BF16. Where config.json ties the head, lm_head.weight may be there
 * if it equals wte; mask buffers are skipped. Every tensor must be there with the right shape. On
 * failure the model is unchanged or must be discarded, as the message says. */
bool checkpoint_load(const char *directory, Gpt *model);

/* Loads the optimizer and the state for going on. False with error_message() if the checkpoint has
 * none (an imported model) or they do not belong to this model. */
bool checkpoint_resume(const char *directory, Gpt *model, TrainerState *state);

/* The whole directory to read for `directory`: itself, or the one that an interrupted save left
 * whole; or the file. False with error_message() if there is none of these. */
bool checkpoint_path(const char *directory, char *path, size_t bytes);

/* The directory of the tokenizer's files: the checkpoint's, or the one that a file lies in. */
bool checkpoint_home(const char *path, char directory[FILE_PATH_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
