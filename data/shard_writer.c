#include "data/shard_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/error.h"

enum { PIECE_TOKENS = 16384 }; /* of one write */

void shard_writer_name(const ShardWriter *writer, size_t shard, char name[FILE_PATH_BYTES]) {
    snprintf(name, FILE_PATH_BYTES, "%s_%06zu.bin", writer->name, shard);
}

size_t shard_writer_shards(const ShardWriter *writer) {
    return (size_t)((writer->tokens + writer->shard_tokens - 1) / writer->shard_tokens);
}

/* The paths of a shard: its own and the one it has until it is whole. */
static bool shard_paths(const ShardWriter *writer, size_t shard, char path[FILE_PATH_BYTES],
                        char part[FILE_PATH_BYTES]) {
    char name[FILE_PATH_BYTES], name_part[FILE_PATH_BYTES + 8];
    shard_writer_name(writer, shard, name);
    snprintf(name_part, sizeof name_part, "%s.part", name);
    return file_join(path, writer->directory, name) &&
           file_join(part, writer->directory, name_part);
}

static bool failed(const char *verb, const char *path) {
    return error_set("cannot %s %s: %s", verb, path, strerror(errno));
}

/* The number of the shard that is being written and the tokens in it. */
static size_t current_shard(const ShardWriter *writer) {
    return (size_t)(writer->tokens / writer->shard_tokens);
}

static size_t current_tokens(const ShardWriter *writer) {
    return (size_t)(writer->tokens % writer->shard_tokens);
}

/* Opens the current shard, cut to the tokens that belong to it. */
static bool open_current(ShardWriter *writer) {
    char path[FILE_PATH_BYTES], part[FILE_PATH_BYTES];
    if (!shard_paths(writer, current_shard(writer), path, part)) return false;
    off_t bytes = (off_t)(SHARD_HEADER_BYTES + writer->width * current_tokens(writer));
    int fd = open(part, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0 && ftruncate(fd, bytes) == 0 && lseek(fd, bytes, SEEK_SET) == bytes) {
        writer->fd = fd;
        return true;
    }
    failed("write", part);
    if (fd >= 0) close(fd);
    return false;
}

/* Whether what is to be gone on with is there. The shard may have got its name since, if it became
 * full, or was the last one. */
static bool reopen_current(ShardWriter *writer) {
    char path[FILE_PATH_BYTES], part[FILE_PATH_BYTES];
    struct stat status;
    if (!shard_paths(writer, current_shard(writer), path, part)) return false;
    if (!file_exists(part) && file_exists(path) && rename(path, part) != 0)
        return failed("rename", path);
    if (stat(part, &status) != 0 ||
        (size_t)status.st_size < SHARD_HEADER_BYTES + writer->width * current_tokens(writer))
        return error_set("%s is not as an earlier run left it; remove %s", part, writer->directory);
    return open_current(writer);
}

bool shard_writer_open(ShardWriter *writer, const char *directory, const char *name,
                       ShardWidth width, size_t shard_tokens, uint64_t tokens) {
    *writer = (ShardWriter){directory, name, width, shard_tokens, tokens, -1};
    return current_tokens(writer) == 0 || reopen_current(writer);
}

void shard_writer_abandon(ShardWriter *writer) {
    if (writer->fd >= 0) close(writer->fd);
    writer->fd = -1;
}

bool shard_writer_sync(ShardWriter *writer) {
    return writer->fd < 0 || fsync(writer->fd) == 0 || failed("write", writer->directory);
}

/* Gives a shard of so many tokens its header and its name. */
static bool end_shard(ShardWriter *writer, size_t shard, size_t tokens) {
    char path[FILE_PATH_BYTES], part[FILE_PATH_BYTES];
    unsigned char header[SHARD_HEADER_BYTES];
    shard_write_header(shard_header(writer->width, tokens), header);
    int fd = writer->fd;
    writer->fd = -1;
    bool good = shard_paths(writer, shard, path, part) &&
                (lseek(fd, 0, SEEK_SET) == 0 || failed("write", part)) &&
                file_write_all(fd, part, header, sizeof header);
    if (!good) close(fd);
    return good && file_sync_close(fd, part) && (rename(part, path) == 0 || failed("rename", part));
}

bool shard_writer_add(ShardWriter *writer, const int32_t *tokens, size_t n) {
    unsigned char bytes[SHARD_WIDE * PIECE_TOKENS];
    while (n > 0) {
        if (writer->fd < 0 && !open_current(writer)) return false;
        size_t left = writer->shard_tokens - current_tokens(writer);
        size_t piece = n < left ? n : left;
        if (piece > PIECE_TOKENS) piece = PIECE_TOKENS;
        shard_pack(writer->width, tokens, piece, bytes);
        if (!file_write_all(writer->fd, writer->directory, bytes, writer->width * piece))
            return false;
        writer->tokens += piece;
        tokens += piece;
        n -= piece;
        bool full = current_tokens(writer) == 0;
        if (full && !end_shard(writer, current_shard(writer) - 1, writer->shard_tokens))
            return false;
    }
    return true;
}

bool shard_writer_finish(ShardWriter *writer) {
    return writer->fd < 0 || end_shard(writer, current_shard(writer), current_tokens(writer));
}
