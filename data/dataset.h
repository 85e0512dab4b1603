/* A ring of tokens: from memory, or from token shards on disk read in pieces, never all at once.
 *
 * Shards are llm.c's: 256 int32 of header ([0] = 20240520, [1] = 1, [2] = tokens), then that many
 * uint16, little-endian. Files are checked against their headers when opened and every token
 * against V when read: a violation names the file, the offset, what was found and what was
 * expected. */
#ifndef DATA_DATASET_H
#define DATA_DATASET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Dataset Dataset;

/* Takes ownership of a malloc'd array. NULL with error_message() if a token is not in [0, V). */
Dataset *dataset_from_tokens(int32_t *tokens, size_t count, size_t V);
/* `pattern` is a shell glob, a file or a directory (its *.bin, sorted); shards are concatenated in
 * sorted order. Also checks every token once, in parallel over shards, when `scan`. */
Dataset *dataset_from_shards(const char *pattern, size_t V, bool scan);
void dataset_close(Dataset *dataset);

size_t dataset_tokens(const Dataset *dataset);
/* out[0..n) = tokens position … position+n-1, wrapping round the end. False with
 * error_message(). */
bool dataset_read(const Dataset *dataset, uint64_t position, size_t n, int32_t *out);

/* Writes a llm.c shard, atomically. Every token must be below 65536. */
bool dataset_write_shard(const char *path, const int32_t *tokens, size_t count);

#ifdef __cplusplus
}
#endif
#endif
