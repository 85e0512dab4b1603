#include "data/dataset.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/replace.h"

enum {
    SHARD_MAGIC = 20240520,
    SHARD_VERSION = 1,
    SHARD_HEADER_BYTES = 1024,
    PIECE_TOKENS = 32768 /* of one read: 64 KiB */
};

typedef struct {
    char *path;
    int fd;
    size_t tokens;
    uint64_t start; /* place of its first token in the ring */
} Shard;

struct Dataset {
    size_t tokens, V;
    int32_t *memory; /* (tokens); NULL: they are in shards */
    size_t shards;
    Shard *shard; /* (shards) */
};

Dataset *dataset_from_tokens(int32_t *tokens, size_t count, size_t V) {
    size_t i = 0;
    while (i < count && tokens[i] >= 0 && (uint32_t)tokens[i] < V) i++;
    Dataset *dataset = NULL;
    if (count == 0)
        error_set("the text is empty: there are no tokens to read");
    else if (i < count)
        error_set("token %d at position %zu is not in the vocabulary of %zu: expected 0 to V - 1",
                  tokens[i], i, V);
    else if ((dataset = malloc(sizeof *dataset)) == NULL)
        error_set("no memory for a dataset");
    else
        *dataset = (Dataset){.tokens = count, .V = V, .memory = tokens};
    if (dataset == NULL) free(tokens);
    return dataset;
}

void dataset_close(Dataset *dataset) {
    if (dataset == NULL) return;
    for (size_t i = 0; i < dataset->shards; i++) {
        if (dataset->shard[i].fd >= 0) close(dataset->shard[i].fd);
        free(dataset->shard[i].path);
    }
    free(dataset->shard);
    free(dataset->memory);
    free(dataset);
}

size_t dataset_tokens(const Dataset *dataset) { return dataset->tokens; }

/* out[0..n) = tokens first … of one shard, checked against V. */
static bool read_tokens(const Shard *shard, size_t V, uint64_t first, size_t n, int32_t *out) {
    unsigned char bytes[2 * PIECE_TOKENS];
    for (size_t done = 0, piece; done < n; done += piece) {
        piece = n - done < PIECE_TOKENS ? n - done : PIECE_TOKENS;
        uint64_t offset = SHARD_HEADER_BYTES + 2 * (first + done);
        if (!file_read_at(shard->fd, shard->path, bytes, 2 * piece, offset)) return false;
        for (size_t i = 0; i < piece; i++) {
            unsigned token = bytes[2 * i] | (unsigned)bytes[2 * i + 1] << 8;
            if (token >= V)
                return error_set(
                    "%s: token %u at position %zu (byte %zu) is not in the vocabulary "
                    "of %zu; these shards belong to another tokenizer, or are damaged",
                    shard->path, token, (size_t)first + done + i, (size_t)offset + 2 * i, V);
            out[done + i] = (int32_t)token;
        }
    }
    return true;
}

static const Shard *find_shard(const Dataset *dataset, uint64_t position) {
    size_t low = 0, high = dataset->shards; /* the shard is in [low, high) */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (dataset->shard[middle].start <= position)
            low = middle;
        else
            high = middle;
    }
    return &dataset->shard[low];
}

bool dataset_read(const Dataset *dataset, uint64_t position, size_t n, int32_t *out) {
    position %= dataset->tokens;
    while (n > 0) {
        const Shard *shard = dataset->memory == NULL ? find_shard(dataset, position) : NULL;
        uint64_t end = shard == NULL ? dataset->tokens : shard->start + shard->tokens;
        size_t run = end - position < n ? (size_t)(end - position) : n;
        if (shard == NULL)
            memcpy(out, dataset->memory + position, run * sizeof *out);
        else if (!read_tokens(shard, dataset->V, position - shard->start, run, out))
            return false;
        position = (position + run) % dataset->tokens;
        out += run;
        n -= run;
    }
    return true;
}

static int32_t header_word(const unsigned char *header, int i) {
    const unsigned char *word = header + 4 * i;
    return (int32_t)(word[0] | (uint32_t)word[1] << 8 | (uint32_t)word[2] << 16 |
                     (uint32_t)word[3] << 24);
}

/* The first bytes of a file that is not a shard, so that one sees what it is instead. */
static const char *show_bytes(const unsigned char *bytes, size_t n, char *out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    if (n > 12) n = 12;
    for (size_t i = 0; i < n; i++)
        used += (size_t)snprintf(out + used, size - used, "%02x ", bytes[i]);
    used += (size_t)snprintf(out + used, size - used, "\"");
    for (size_t i = 0; i < n; i++)
        used += (size_t)snprintf(out + used, size - used, "%c", isprint(bytes[i]) ? bytes[i] : '.');
    snprintf(out + used, size - used, "\"");
    return out;
}

/* Opens shard->path and checks its header against its size. */
static bool open_shard(Shard *shard) {
    const char *path = shard->path;
    /* O_NONBLOCK: a pipe by that name must not hang the program. */
    shard->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    if (shard->fd < 0 || fstat(shard->fd, &status) != 0)
        return error_set("%s: cannot be opened: %s%s", path, strerror(errno),
                         errno == EMFILE ? "; raise the limit with ulimit -n" : "");
    if (!S_ISREG(status.st_mode)) return error_set("%s: is not a file", path);

    unsigned char header[SHARD_HEADER_BYTES] = {0};
    size_t size = (size_t)status.st_size;
    size_t present = size < sizeof header ? size : sizeof header;
    if (!file_read_at(shard->fd, path, header, present, 0)) return false;
    char shown[80];
    show_bytes(header, present, shown, sizeof shown);
    int32_t magic = header_word(header, 0), version = header_word(header, 1);
    int32_t tokens = header_word(header, 2);
    if (present >= 4 && magic != SHARD_MAGIC)
        return error_set(
            "%s: is not a token shard: its magic number is %d, expected %d; it has "
            "%zu bytes and begins with %s",
            path, magic, SHARD_MAGIC, size, shown);
    if (present < sizeof header)
        return error_set("%s: has %zu bytes, fewer than a shard's header of %d; it begins with %s",
                         path, size, SHARD_HEADER_BYTES, shown);
    if (version != SHARD_VERSION)
        return error_set("%s: is a shard of version %d, expected %d", path, version, SHARD_VERSION);
    if (tokens <= 0)
        return error_set("%s: its header gives %d tokens, expected at least 1", path, tokens);
    size_t expected = SHARD_HEADER_BYTES + 2 * (size_t)tokens;
    if (size != expected)
        return error_set(
            "%s: has %zu bytes, expected %zu for the %d tokens that its header gives; "
            "it was cut short or is damaged",
            path, size, expected, tokens);
    shard->tokens = (size_t)tokens;
    return true;
}

/* Paths that a pattern stands for, each malloc'd. */
typedef struct {
    char **path;
    size_t count, capacity;
} Paths;

/* Adds prefix + name. */
static bool add_path(Paths *paths, const char *prefix, const char *name) {
    if (paths->count == paths->capacity) {
        size_t capacity = 2 * paths->capacity + 16;
        char **path = realloc(paths->path, capacity * sizeof *path);
        if (path == NULL) return error_set("no memory for the paths of the shards");
        paths->path = path;
        paths->capacity = capacity;
    }
    size_t bytes = strlen(prefix) + strlen(name) + 2;
    char *path = malloc(bytes);
    if (path == NULL) return error_set("no memory for the paths of the shards");
    snprintf(path, bytes, "%s%s%s", prefix, *prefix == '\0' ? "" : "/", name);
    paths->path[paths->count++] = path;
    return true;
}

static bool list_directory(Paths *paths, const char *directory) {
    DIR *stream = opendir(directory);
    if (stream == NULL) return error_set("%s: cannot be listed: %s", directory, strerror(errno));
    bool listed = true;
    for (struct dirent *entry; listed && (entry = readdir(stream)) != NULL;) {
        size_t length = strlen(entry->d_name);
        if (length >= 4 && entry->d_name[0] != '.' &&
            strcmp(entry->d_name + length - 4, ".bin") == 0)
            listed = add_path(paths, directory, entry->d_name);
    }
    closedir(stream);
    if (listed && paths->count == 0)
        return error_set("%s: there are no token shards (*.bin) in this directory", directory);
    return listed;
}

static bool list_glob(Paths *paths, const char *pattern) {
    glob_t found;
    int status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status == GLOB_NOMATCH)
        return error_set(
            "%s: there is no such file or directory, and no file matches it as a "
            "pattern",
            pattern);
    bool listed = status == 0;
    if (!listed) error_set("%s: the pattern cannot be expanded", pattern);
    for (size_t i = 0; listed && i < found.gl_pathc; i++)
        listed = add_path(paths, "", found.gl_pathv[i]);
    globfree(&found);
    return listed;
}

/* By bytes: the order of the shards must not depend on the locale. */
static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The paths in sorted order. What exists is taken as it is, even if it looks like a pattern. */
static bool list_paths(Paths *paths, const char *pattern) {
    struct stat status;
    bool listed;
    if (stat(pattern, &status) != 0)
        listed = list_glob(paths, pattern);
    else if (S_ISDIR(status.st_mode))
        listed = list_directory(paths, pattern);
    else
        listed = add_path(paths, "", pattern);
    if (listed) qsort(paths->path, paths->count, sizeof *paths->path, compare_paths);
    return listed;
}

/* Reads every token once. Sentences are recorded by thread, so the one of the first shard that
 * fails is carried to the caller's. */
static bool scan_shards(const Dataset *dataset) {
    size_t failed = dataset->shards;
    char *sentence = NULL;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < dataset->shards; i++) {
        const Shard *shard = &dataset->shard[i];
        int32_t piece[PIECE_TOKENS];
        bool valid = true;
        for (size_t first = 0; valid && first < shard->tokens; first += PIECE_TOKENS) {
            size_t left = shard->tokens - first;
            valid = read_tokens(shard, dataset->V, first, left < PIECE_TOKENS ? left : PIECE_TOKENS,
                                piece);
        }
        if (!valid) {
#pragma omp critical
            if (i < failed) {
                failed = i;
                free(sentence);
                sentence = strdup(error_message());
            }
        }
    }
    if (failed < dataset->shards)
        error_set("%s", sentence != NULL ? sentence : "a shard cannot be read");
    free(sentence);
    return failed == dataset->shards;
}

Dataset *dataset_from_shards(const char *pattern, size_t V, bool scan) {
    Paths paths = {0};
    Dataset *dataset = NULL;
    bool opened = list_paths(&paths, pattern);
    if (opened) {
        dataset = calloc(1, sizeof *dataset);
        Shard *shard = calloc(paths.count, sizeof *shard);
        opened = dataset != NULL && shard != NULL;
        if (opened) {
            *dataset = (Dataset){.V = V, .shard = shard};
        } else {
            free(shard);
            error_set("no memory for %zu shards", paths.count);
        }
    }
    size_t taken = 0; /* paths that the dataset owns */
    while (opened && taken < paths.count) {
        Shard *shard = &dataset->shard[dataset->shards++];
        *shard = (Shard){.path = paths.path[taken++], .fd = -1, .start = dataset->tokens};
        opened = open_shard(shard);
        dataset->tokens += shard->tokens;
    }
    if (opened && scan) opened = scan_shards(dataset);
    while (taken < paths.count) free(paths.path[taken++]);
    free(paths.path);
    if (opened) return dataset;
    dataset_close(dataset);
    return NULL;
}

static bool fits_shard(const char *path, const int32_t *tokens, size_t count) {
    if (count == 0 || count > INT32_MAX)
        return error_set("%s: a shard holds 1 to %d tokens, not %zu", path, INT32_MAX, count);
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] > UINT16_MAX)
            return error_set(
                "%s: token %d at position %zu does not fit a shard, which holds 0 to "
                "%d",
                path, tokens[i], i, UINT16_MAX);
    return true;
}

bool dataset_write_shard(const char *path, const int32_t *tokens, size_t count) {
    FileReplacement replacement;
    if (!fits_shard(path, tokens, count) || !file_replace_begin(&replacement, path)) return false;
    unsigned char bytes[2 * PIECE_TOKENS] = {0};
    const uint32_t header[3] = {SHARD_MAGIC, SHARD_VERSION, (uint32_t)count};
    for (int i = 0; i < 12; i++) bytes[i] = (unsigned char)(header[i / 4] >> 8 * (i % 4));
    fwrite(bytes, 1, SHARD_HEADER_BYTES, replacement.file);
    for (size_t first = 0; first < count; first += PIECE_TOKENS) {
        size_t piece = count - first < PIECE_TOKENS ? count - first : PIECE_TOKENS;
        for (size_t i = 0; i < piece; i++) {
            bytes[2 * i] = (unsigned char)tokens[first + i];
            bytes[2 * i + 1] = (unsigned char)(tokens[first + i] >> 8);
        }
        fwrite(bytes, 2, piece, replacement.file);
    }
    return file_replace_commit(&replacement);
}
