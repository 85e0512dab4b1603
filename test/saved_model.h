/* What the tests of saving and loading start from: a model whose parameters and optimizer hold all
 * kinds of bits, and a place to save it at. */
#ifndef TEST_SAVED_MODEL_H
#define TEST_SAVED_MODEL_H

#include "gpt/checkpoint.h"
#include "test/model.h"
#include "test/scratch.h"

extern const GptConfig config;
extern const TrainerState example;

extern char directory[];            /* scratch/checkpoint, absent when a test begins */
extern char other[FILE_PATH_BYTES]; /* a second name in scratch, which a test may change */

/* cmocka's set-up and tear-down: of a group, and after each test, which empties scratch. */
int open_group(void **state);
int close_group(void **state);
int clean(void **state);

Gpt *create(const GptConfig *shape, GptUse use);
/* Bit patterns of every kind, NaN too: a checkpoint copies and does not compute. */
void fill(Gpt *model, GptArena arena, uint64_t key);
/* One of `config`, all of its arenas filled. */
Gpt *filled(GptUse use);

void save(const Gpt *model, const TrainerState *state);

/* The path of a file of the checkpoint; a file there of this text. */
void join(char path[FILE_PATH_BYTES], const char *file);
void write_text(const char *file, const char *text);

void assert_exists(const char *path, bool expected);

#endif
