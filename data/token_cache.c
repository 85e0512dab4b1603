#include "data/token_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/tokenize_record.h"
#include "runtime/error.h"
#include "runtime/sha256.h"

static const size_t shard_tokens = 100000000;

static bool make_directory(const char *path) {
    return mkdir(path, 0777) == 0 || errno == EEXIST ||
           error_set("the cache directory %s cannot be made: %s; XDG_CACHE_HOME may name another",
                     path, strerror(errno));
}

static bool cache_directory(char directory[FILE_PATH_BYTES]) {
    const char *home = getenv("HOME"), *chosen = getenv("XDG_CACHE_HOME");
    char base[FILE_PATH_BYTES];
    if (chosen != NULL && chosen[0] != '\0') {
        if (snprintf(base, sizeof base, "%s", chosen) >= (int)sizeof base)
            return error_set("the path %.60s... is too long", chosen);
    } else if (home == NULL || home[0] == '\0' || !file_join(base, home, ".cache")) {
        return error_set("neither HOME nor XDG_CACHE_HOME says where to keep the tokens of a text");
    }
    return make_directory(base) && file_join(directory, base, "tilegpt") &&
           make_directory(directory);
}

static bool make_key(const char *path, const Tokenizer *tokenizer, char key[SHA256_HEX_BYTES]) {
    char text[SHA256_HEX_BYTES], rule[SHA256_HEX_BYTES];
    uint64_t bytes;
    if (!sha256_file(path, text, &bytes) || !tokenizer_hash(tokenizer, rule)) return false;
    Sha256 hash;
    sha256_begin(&hash);
    sha256_add(&hash, text, sizeof text);
    sha256_add(&hash, rule, sizeof rule);
    sha256_end(&hash, key);
    return true;
}

static bool make_shards(const char *path, const Tokenizer *tokenizer, const char *output) {
    Paths inputs = {0};
    TokenizeReport report;
    TokenizeOptions options = {.inputs = &inputs,
                               .format = TEXT_PLAIN,
                               .tokenizer = tokenizer,
                               .output = output,
                               .shard_tokens = shard_tokens};
    bool good = paths_add(&inputs, path, NULL) && tokenize(&options, &report);
    paths_free(&inputs);
    return good;
}

/* An open file that one process has at a time (LOCK_EX), or several together (LOCK_SH); -1 with
 * error_message(). */
static int lock(const char *directory, int kind) {
    char path[FILE_PATH_BYTES];
    if (!file_join(path, directory, "lock")) return -1;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666), status = -1;
    do status = fd < 0 ? -1 : flock(fd, kind);
    while (status != 0 && errno == EINTR);
    if (status == 0) return fd;
    error_set("%s cannot be locked: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

bool token_cache_find(const char *path, const Tokenizer *tokenizer, char shards[FILE_PATH_BYTES]) {
    char directory[FILE_PATH_BYTES], output[FILE_PATH_BYTES], manifest[FILE_PATH_BYTES];
    char key[SHA256_HEX_BYTES];
    if (!cache_directory(directory) || !make_key(path, tokenizer, key) ||
        !file_join(output, directory, key) || !file_join(manifest, output, "manifest.json") ||
        !file_join(shards, output, "train_*.bin"))
        return false;
    int fd = lock(directory, LOCK_SH); /* so that all ranks hash at once */
    if (fd < 0) return false;
    bool good = file_exists(manifest) && tokenize_verify_shards(output);
    close(fd);
    if (good) return true;

    fd = lock(directory, LOCK_EX);
    if (fd < 0) return false;
    bool found = file_exists(manifest); /* another rank may have made it since */
    good = found && tokenize_verify_shards(output);
    if (found && !good)
        fprintf(stderr, "the kept tokens of the text are made again: %s\n", error_message());
    good = good || (directory_remove(output) && make_shards(path, tokenizer, output));
    close(fd);
    return good;
}
