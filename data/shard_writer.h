/* A stream of tokens written as shards DIR/NAME_000000.bin, DIR/NAME_000001.bin, …, all of the same
 * size but the last. A shard has its name only when it is whole and on the disk; until then it is
 * NAME_000000.bin.part. */
#ifndef DATA_SHARD_WRITER_H
#define DATA_SHARD_WRITER_H

#include <stdbool.h>

#include "data/shard.h"
#include "runtime/files.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *directory, *name;
    ShardWidth width;
    size_t shard_tokens; /* of a full shard */
    uint64_t tokens;     /* written so far, in all shards */
    int fd;              /* of the shard being written; -1: none */
} ShardWriter;

/* Goes on after the first `tokens` that an earlier writer of the same kind wrote and synced; 0:
 * begins. Keeps the two texts. False with error_message(). */
bool shard_writer_open(ShardWriter *writer, const char *directory, const char *name,
                       ShardWidth width, size_t shard_tokens, uint64_t tokens);
bool shard_writer_add(ShardWriter *writer, const int32_t *tokens, size_t n);
/* All that was added is on the disk. */
bool shard_writer_sync(ShardWriter *writer);
/* Also ends the last shard. Closes the writer whether it succeeds or not. */
bool shard_writer_finish(ShardWriter *writer);
/* Leaves the last shard as it is. */
void shard_writer_abandon(ShardWriter *writer);

/* The shards of a finished writer, and the name of one in the directory. */
size_t shard_writer_shards(const ShardWriter *writer);
void shard_writer_name(const ShardWriter *writer, size_t shard, char name[FILE_PATH_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
