/* What a directory of token shards says of itself: progress.json while it is written,
 * manifest.json when it is complete. Both begin with the plan, which is all that the shards depend
 * on: two runs of equal plans write equal bytes. */
#ifndef DATA_TOKENIZE_RECORD_H
#define DATA_TOKENIZE_RECORD_H

#include <cjson/cJSON.h>

#include "data/shard_writer.h"
#include "data/survey.h"
#include "data/tokenize.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TRAIN, VALIDATION, PARTS };

/* How far a run is. */
typedef struct {
    size_t input;      /* the file to go on with */
    TextPlace place;   /* in its text */
    uint64_t document; /* documents begun, in all files */
    uint64_t tokens[PARTS], documents[PARTS];
} TokenizeState;

/* All fail with error_message(). The plan is to be freed by cJSON_Delete. */
cJSON *tokenize_plan(const TokenizeOptions *options, TokenizeSplit split, const Survey *survey);

bool tokenize_write_progress(const char *directory, const cJSON *plan, const TokenizeState *state);
/* Whether there is a progress.json of this plan. */
bool tokenize_read_progress(const char *directory, const cJSON *plan, TokenizeState *state);

/* Hashes the shards of both writers. */
bool tokenize_write_manifest(const char *directory, const cJSON *plan, const Paths *inputs,
                             const ShardWriter writer[PARTS], const uint64_t documents[PARTS]);
/* Whether the shards that the directory's manifest lists are there and have their sizes. */
bool tokenize_check_shards(const char *directory);
/* The same, and their hashes, for which they are read. */
bool tokenize_verify_shards(const char *directory);
/* 1 and the report if the directory has a manifest of this plan, 0 if it has none, -1 if it has
 * another one, or shards are not as it says. */
int tokenize_read_manifest(const char *directory, const cJSON *plan, TokenizeReport *report);

#ifdef __cplusplus
}
#endif
#endif
