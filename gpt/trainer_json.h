/* trainer.json, the state of a training run: private to gpt/. It carries the size and checksum of
 * the files that it belongs with, so that a directory put together from two checkpoints is noticed. */
#ifndef GPT_TRAINER_JSON_H
#define GPT_TRAINER_JSON_H

#include "gpt/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes `path`, the last file of `directory`. names: the other files there that it belongs with,
 * NULL at the end; flags may be NULL. */
bool trainer_json_write(const char *path, const char *directory, const char *const *names,
                        const TrainerState *state, const char *flags);

/* Reads it and checks that the files of `directory` are those it was written with, `needed` (NULL
 * at the end) among them. */
bool trainer_json_read(const char *path, const char *directory, const char *const *needed,
                       TrainerState *state);

#ifdef __cplusplus
}
#endif
#endif
