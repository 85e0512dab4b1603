#include "data/shard.h"

#include <string.h>

ShardHeader shard_header(ShardWidth width, size_t tokens) {
    if (width == SHARD_WIDE) return (ShardHeader){20240801, 7, (int32_t)tokens};
    return (ShardHeader){20240520, 1, (int32_t)tokens};
}

static uint32_t read_word(const unsigned char *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

ShardHeader shard_read_header(const unsigned char bytes[SHARD_HEADER_BYTES]) {
    return (ShardHeader){(int32_t)read_word(bytes), (int32_t)read_word(bytes + 4),
                         (int32_t)read_word(bytes + 8)};
}

void shard_write_header(ShardHeader header, unsigned char bytes[SHARD_HEADER_BYTES]) {
    const int32_t words[] = {header.magic, header.version, header.tokens};
    memset(bytes, 0, SHARD_HEADER_BYTES);
    shard_pack(SHARD_WIDE, words, 3, bytes);
}

void shard_pack(ShardWidth width, const int32_t *tokens, size_t n, unsigned char *bytes) {
    for (size_t i = 0; i < n; i++)
        for (int byte = 0; byte < (int)width; byte++)
            *bytes++ = (unsigned char)((uint32_t)tokens[i] >> 8 * byte);
}

void shard_unpack(ShardWidth width, const unsigned char *bytes, size_t n, uint32_t *tokens) {
    for (size_t i = 0; i < n; i++, bytes += width)
        tokens[i] = width == SHARD_WIDE ? read_word(bytes) : bytes[0] | (uint32_t)bytes[1] << 8;
}
