/* A ring of tokens: from memory, or from token shards on disk read in pieces, never all at once.
 *
 * Shards are llm.c's (data/shard.h), or nanoGPT's files of bare uint16. Files are checked against
 * their headers when opened and every token against V when read: a violation names the file, the
 * offset, what was found and what was expected. */
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
/* The same of files that are nothing but uint16, little-endian. Without a header to check, every
 * token is read. */
Dataset *dataset_from_nanogpt(const char *pattern, size_t V);
void dataset_close(Dataset *dataset);

size_t dataset_tokens(const Dataset *dataset);
/* Makes the ring tokens first … first+count-1 of what it is, 0 < count. */
void dataset_restrict(Dataset *dataset, uint64_t first, size_t count);
/* out[0..n) = tokens position … position+n-1, wrapping round the end. False with
 * error_message(). */
bool dataset_read(const Dataset *dataset, uint64_t position, size_t n, int32_t *out);

/* Writes a narrow shard, atomically. Every token must be below 65536. */
bool dataset_write_shard(const char *path, const int32_t *tokens, size_t count);

#ifdef __cplusplus
}
#endif
#endif
