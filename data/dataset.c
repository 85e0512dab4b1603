#include "data/dataset.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/paths.h"
#include "data/shard.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/replace.h"

enum { PIECE_TOKENS = 32768 }; /* of one read: at most 128 KiB */

typedef struct {
    char *path;
    int fd;
    size_t tokens;
    uint64_t start;      /* place of its first token among those of all shards */
    size_t header_bytes; /* what comes before its tokens */
    ShardWidth width;
} Shard;

struct Dataset {
    size_t tokens, V;
    uint64_t first;  /* where the ring begins in the tokens of all shards, or in memory */
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
    unsigned char bytes[SHARD_WIDE * PIECE_TOKENS];
    uint32_t tokens[PIECE_TOKENS];
    for (size_t done = 0, piece; done < n; done += piece) {
        piece = n - done < PIECE_TOKENS ? n - done : PIECE_TOKENS;
        uint64_t offset = shard->header_bytes + shard->width * (first + done);
        if (!file_read_at(shard->fd, shard->path, bytes, shard->width * piece, offset))
            return false;
        shard_unpack(shard->width, bytes, piece, tokens);
        for (size_t i = 0; i < piece; i++) {
            if (tokens[i] >= V)
                return error_set(
                    "%s: token %u at position %zu (byte %zu) is not in the vocabulary "
                    "of %zu; these shards belong to another tokenizer, or are damaged",
                    shard->path, tokens[i], (size_t)first + done + i,
                    (size_t)offset + shard->width * i, V);
            out[done + i] = (int32_t)tokens[i];
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
        uint64_t place = dataset->first + position, end = dataset->first + dataset->tokens;
        const Shard *shard = dataset->memory == NULL ? find_shard(dataset, place) : NULL;
        if (shard != NULL && shard->start + shard->tokens < end) end = shard->start + shard->tokens;
        size_t run = end - place < n ? (size_t)(end - place) : n;
        if (shard == NULL)
            memcpy(out, dataset->memory + place, run * sizeof *out);
        else if (!read_tokens(shard, dataset->V, place - shard->start, run, out))
            return false;
        position = (position + run) % dataset->tokens;
        out += run;
        n -= run;
    }
    return true;
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

/* Opens shard->path; *size receives its bytes. */
static bool open_file(Shard *shard, size_t *size) {
    const char *path = shard->path;
    /* O_NONBLOCK: a pipe by that name must not hang the program. */
    shard->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    if (shard->fd < 0 || fstat(shard->fd, &status) != 0)
        return error_set("%s: cannot be opened: %s%s", path, strerror(errno),
                         errno == EMFILE ? "; raise the limit with ulimit -n" : "");
    if (!S_ISREG(status.st_mode)) return error_set("%s: is not a file", path);
    *size = (size_t)status.st_size;
    return true;
}

/* Opens shard->path and checks its header against its size. */
static bool open_shard(Shard *shard) {
    const char *path = shard->path;
    size_t size = 0;
    if (!open_file(shard, &size)) return false;
    unsigned char bytes[SHARD_HEADER_BYTES] = {0};
    size_t present = size < sizeof bytes ? size : sizeof bytes;
    if (!file_read_at(shard->fd, path, bytes, present, 0)) return false;
    char shown[80];
    show_bytes(bytes, present, shown, sizeof shown);
    ShardHeader header = shard_read_header(bytes), wide = shard_header(SHARD_WIDE, 0);
    shard->width = header.magic == wide.magic ? SHARD_WIDE : SHARD_NARROW;
    ShardHeader right = shard_header(shard->width, 0);
    if (present >= 4 && header.magic != right.magic)
        return error_set(
            "%s: is not a token shard: its magic number is %d, expected %d (or %d for "
            "wide tokens); it has %zu bytes and begins with %s",
            path, header.magic, right.magic, wide.magic, size, shown);
    if (present < sizeof bytes)
        return error_set("%s: has %zu bytes, fewer than a shard's header of %d; it begins with %s",
                         path, size, SHARD_HEADER_BYTES, shown);
    if (header.version != right.version)
        return error_set("%s: is a shard of version %d, expected %d", path, header.version,
                         right.version);
    if (header.tokens <= 0)
        return error_set("%s: its header gives %d tokens, expected at least 1", path,
                         header.tokens);
    size_t expected = SHARD_HEADER_BYTES + shard->width * (size_t)header.tokens;
    if (size != expected)
        return error_set(
            "%s: has %zu bytes, expected %zu for the %d tokens that its header gives; "
            "it was cut short or is damaged",
            path, size, expected, header.tokens);
    shard->header_bytes = SHARD_HEADER_BYTES;
    shard->tokens = (size_t)header.tokens;
    return true;
}

/* Opens shard->path, which is all tokens. */
static bool open_nanogpt(Shard *shard) {
    size_t size = 0;
    if (!open_file(shard, &size)) return false;
    shard->width = SHARD_NARROW;
    shard->tokens = size / SHARD_NARROW;
    return (size > 0 && size % SHARD_NARROW == 0) ||
           error_set("%s: has %zu bytes; nanoGPT's files hold 2 bytes a token, and at least one",
                     shard->path, size);
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

static Dataset *from_files(const char *pattern, bool (*open_one)(Shard *), size_t V, bool scan) {
    Paths paths = {0};
    Dataset *dataset = NULL;
    bool opened = paths_add(&paths, pattern, ".bin");
    if (opened && paths.count == 0)
        opened = error_set("%s: there are no token shards (*.bin) in this directory", pattern);
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
    for (size_t i = 0; opened && i < paths.count; i++) {
        Shard *shard = &dataset->shard[dataset->shards++];
        *shard = (Shard){.path = paths.path[i], .fd = -1, .start = dataset->tokens};
        paths.path[i] = NULL; /* the dataset's from here on */
        opened = open_one(shard);
        dataset->tokens += shard->tokens;
    }
    if (opened && scan) opened = scan_shards(dataset);
    paths_free(&paths);
    if (opened) return dataset;
    dataset_close(dataset);
    return NULL;
}

Dataset *dataset_from_shards(const char *pattern, size_t V, bool scan) {
    return from_files(pattern, open_shard, V, scan);
}

Dataset *dataset_from_nanogpt(const char *pattern, size_t V) {
    return from_files(pattern, open_nanogpt, V, /*scan=*/true);
}

void dataset_restrict(Dataset *dataset, uint64_t first, size_t count) {
    dataset->first += first;
    dataset->tokens = count;
}

static bool fits_shard(const char *path, const int32_t *tokens, size_t count) {
    if (count == 0 || count > SHARD_MOST_TOKENS)
        return error_set("%s: a shard holds 1 to %d tokens, not %zu", path, SHARD_MOST_TOKENS,
                         count);
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
    unsigned char bytes[SHARD_NARROW * PIECE_TOKENS];
    shard_write_header(shard_header(SHARD_NARROW, count), bytes);
    fwrite(bytes, 1, SHARD_HEADER_BYTES, replacement.file);
    for (size_t first = 0; first < count; first += PIECE_TOKENS) {
        size_t piece = count - first < PIECE_TOKENS ? count - first : PIECE_TOKENS;
        shard_pack(SHARD_NARROW, tokens + first, piece, bytes);
        fwrite(bytes, SHARD_NARROW, piece, replacement.file);
    }
    return file_replace_commit(&replacement);
}
