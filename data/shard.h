/* A token shard as llm.c has them: a header of 256 int32, then the tokens, all little-endian.
 *
 *            [0] magic   [1] version   [2] tokens   each token
 *   narrow   20240520    1             < 2^31       uint16      GPT-2's tokenizer and smaller ones
 *   wide     20240801    7             < 2^31       uint32      larger vocabularies (Llama 3's)
 */
#ifndef DATA_SHARD_H
#define DATA_SHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SHARD_HEADER_BYTES = 1024, SHARD_MOST_TOKENS = INT32_MAX };

typedef enum { SHARD_NARROW = 2, SHARD_WIDE = 4 } ShardWidth; /* bytes of a token */

/* The narrower of the two that holds V tokens. */
static inline ShardWidth shard_width(size_t V) { return V > 65536 ? SHARD_WIDE : SHARD_NARROW; }

typedef struct {
    int32_t magic, version, tokens;
} ShardHeader;

/* Of this width. */
ShardHeader shard_header(ShardWidth width, size_t tokens);
ShardHeader shard_read_header(const unsigned char bytes[SHARD_HEADER_BYTES]);
void shard_write_header(ShardHeader header, unsigned char bytes[SHARD_HEADER_BYTES]);

/* n tokens to n·width bytes and back. The bytes of wide tokens give any value; check it. */
void shard_pack(ShardWidth width, const int32_t *tokens, size_t n, unsigned char *bytes);
void shard_unpack(ShardWidth width, const unsigned char *bytes, size_t n, uint32_t *tokens);

#ifdef __cplusplus
}
#endif
#endif
