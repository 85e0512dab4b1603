#include "data/text_source.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "runtime/error.h"

enum {
    PIECE_BYTES = 1 << 20, /* a plain piece, unless it cannot be cut that early */
    LONGEST_PIECE = 64 << 20,
    LONGEST_READ = 1 << 20
};

struct TextSource {
    char *path;
    TextFormat format;
    const Tokenizer *tokenizer;
    gzFile file; /* zlib passes on what is not compressed as it is */
    char *buffer;
    size_t capacity, begin, end; /* buffer[begin..end) is not yet given out */
    bool finished;               /* nothing is left in the file */
    TextPlace place;             /* of buffer[begin] */
    uint64_t cut_before;
    cJSON *json; /* holds the last document */
};

static bool ends_with(const char *name, size_t length, const char *ending) {
    size_t n = strlen(ending);
    return length > n && memcmp(name + length - n, ending, n) == 0;
}

TextFormat text_choose_format(const char *path, TextFormat format) {
    size_t length = strlen(path);
    if (format != TEXT_AUTO) return format;
    if (ends_with(path, length, ".gz")) length -= 3;
    bool json = ends_with(path, length, ".jsonl") || ends_with(path, length, ".ndjson");
    return json ? TEXT_JSONL : TEXT_PLAIN;
}

/* A descriptor of a file, a pipe or a terminal. */
static int open_path(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        error_set("%s: cannot be opened: %s", path, strerror(errno));
    } else if (S_ISDIR(status.st_mode)) {
        error_set("%s: is a directory; give its files, as in '%s/*.txt'", path, path);
    } else {
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

TextSource *text_open(const char *path, TextFormat format, const Tokenizer *tokenizer) {
    int fd = open_path(path);
    if (fd < 0) return NULL;
    TextSource *source = calloc(1, sizeof *source);
    if (source != NULL) {
        *source = (TextSource){.path = strdup(path),
                               .format = text_choose_format(path, format),
                               .tokenizer = tokenizer,
                               .file = gzdopen(fd, "rb"),
                               .cut_before = UINT64_MAX};
        if (source->file != NULL) fd = -1; /* zlib closes it */
        if (source->path != NULL && source->file != NULL && gzbuffer(source->file, 1 << 18) == 0)
            return source;
    }
    error_set("no memory to read %s", path);
    if (fd >= 0) close(fd);
    text_close(source);
    return NULL;
}

void text_close(TextSource *source) {
    if (source == NULL) return;
    cJSON_Delete(source->json);
    if (source->file != NULL) gzclose_r(source->file);
    free(source->path);
    free(source->buffer);
    free(source);
}

TextPlace text_place(const TextSource *source) { return source->place; }

void text_cut_before(TextSource *source, uint64_t place) { source->cut_before = place; }

/* What zlib has to say, after less than was asked for. */
static bool check_read(TextSource *source) {
    int code;
    const char *reason = gzerror(source->file, &code);
    if (code == Z_BUF_ERROR) return error_set("%s: this gzip file is cut short", source->path);
    if (code == Z_ERRNO) return error_set("%s: cannot be read: %s", source->path, strerror(errno));
    return code == Z_OK || code == Z_STREAM_END ||
           error_set("%s: this gzip file is damaged: %s", source->path, reason);
}

/* Reads until the buffer holds `wanted` bytes or the file has ended. */
static bool fill(TextSource *source, size_t wanted) {
    if (source->end - source->begin >= wanted || source->finished) return true;
    if (source->begin > 0)
        memmove(source->buffer, source->buffer + source->begin, source->end - source->begin);
    source->end -= source->begin;
    source->begin = 0;
    if (source->capacity < wanted) {
        char *buffer = realloc(source->buffer, wanted + 1);
        if (buffer == NULL) return error_set("no memory for %zu bytes of %s", wanted, source->path);
        source->buffer = buffer;
        source->capacity = wanted;
    }
    while (source->end < wanted && !source->finished) {
        size_t left = wanted - source->end;
        unsigned ask = left < LONGEST_READ ? (unsigned)left : LONGEST_READ;
        int got = gzread(source->file, source->buffer + source->end, ask);
        if (got > 0) source->end += (size_t)got;
        if (got == (int)ask) continue;
        if (!check_read(source)) return false;
        source->finished = true;
    }
    return true;
}

/* Gives out the first n bytes of the buffer. */
static const char *take(TextSource *source, size_t n) {
    const char *text = source->buffer + source->begin;
    source->begin += n;
    source->place.bytes += n;
    return text;
}

/* ---- plain text ---- */

static int next_plain(TextSource *source, TextPiece *piece) {
    uint64_t left = source->place.bytes < source->cut_before
                        ? source->cut_before - source->place.bytes
                        : UINT64_MAX;
    for (size_t limit = left < PIECE_BYTES ? (size_t)left : PIECE_BYTES;; limit *= 2) {
        if (limit > LONGEST_PIECE) break;
        if (!fill(source, limit + 1)) return -1;
        const char *text = source->buffer + source->begin;
        size_t bytes = source->end - source->begin;
        size_t cut = bytes <= limit ? bytes : tokenizer_cut(source->tokenizer, text, limit);
        if (bytes == 0) return 0;
        if (cut == 0) continue;
        *piece = (TextPiece){take(source, cut), cut, cut == bytes};
        return 1;
    }
    error_set("%s: no word ends in the %d MiB from byte %llu on; is this text?", source->path,
              LONGEST_PIECE >> 20, (unsigned long long)source->place.bytes);
    return -1;
}

/* ---- lines ---- */

/* The next line without its line feed: 1, 0 or -1. */
static int next_line(TextSource *source, const char **line, size_t *bytes) {
    for (size_t searched = 0, held; (held = source->end - source->begin) < LONGEST_PIECE;) {
        const char *text = held > 0 ? source->buffer + source->begin : NULL, *feed = NULL;
        if (held > searched) feed = memchr(text + searched, '\n', held - searched);
        if (feed != NULL || (source->finished && held > 0)) {
            *bytes = feed == NULL ? held : (size_t)(feed - text);
            *line = take(source, *bytes + (feed != NULL));
            source->place.lines++;
            return 1;
        }
        if (source->finished) return 0;
        searched = held;
        if (!fill(source, held < PIECE_BYTES ? PIECE_BYTES : 2 * held)) return -1;
    }
    error_set("%s: line %llu is longer than %d MiB", source->path,
              (unsigned long long)source->place.lines + 1, LONGEST_PIECE >> 20);
    return -1;
}

static int next_plain_line(TextSource *source, TextPiece *piece) {
    piece->ends = true;
    return next_line(source, &piece->text, &piece->bytes);
}

static bool is_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

static bool is_blank(const char *line, size_t bytes) {
    size_t i = 0;
    while (i < bytes && is_space(line[i])) i++;
    return i == bytes;
}

/* Whether a JSON text has a zero character, raw or as \u0000: cJSON would end a string there. */
static bool has_zero(const char *line, size_t bytes) {
    if (memchr(line, '\0', bytes) != NULL) return true;
    for (const char *at = line; (at = memmem(at, (size_t)(line + bytes - at), "\\u0000", 6));
         at++) {
        const char *first = at; /* of a row of backslashes, of which each second one is escaped */
        while (first > line && first[-1] == '\\') first--;
        if ((at - first) % 2 == 0) return true;
    }
    return false;
}

/* Takes the "text" out of a line. */
static bool read_document(TextSource *source, const char *line, size_t bytes, TextPiece *piece) {
    unsigned long long number = source->place.lines;
    if (has_zero(line, bytes))
        return error_set("%s: line %llu has a zero character, which JSON lines may not have here",
                         source->path, number);
    const char *end = line;
    cJSON_Delete(source->json);
    source->json = cJSON_ParseWithLengthOpts(line, bytes, &end, /*require_null_terminated=*/false);
    if (source->json == NULL || !is_blank(end, (size_t)(line + bytes - end)))
        return error_set("%s: line %llu is not JSON: it goes wrong at byte %zu of %zu",
                         source->path, number, (size_t)(end - line), bytes);
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(source->json, "text");
    if (!cJSON_IsString(text))
        return error_set("%s: line %llu %s; expected {\"text\": \"…\", …}", source->path, number,
                         !cJSON_IsObject(source->json) ? "is not an object"
                         : text == NULL                ? "has no \"text\""
                                                       : "has a \"text\" that is no string");
    *piece = (TextPiece){text->valuestring, strlen(text->valuestring), true};
    return true;
}

static int next_json(TextSource *source, TextPiece *piece) {
    const char *line;
    size_t bytes;
    int got;
    do got = next_line(source, &line, &bytes);
    while (got > 0 && is_blank(line, bytes));
    return got > 0 && !read_document(source, line, bytes, piece) ? -1 : got;
}

int text_next(TextSource *source, TextPiece *piece) {
    switch (source->format) {
    case TEXT_LINES: return next_plain_line(source, piece);
    case TEXT_JSONL: return next_json(source, piece);
    default: return next_plain(source, piece);
    }
}

bool text_seek(TextSource *source, TextPlace place) {
    source->begin = source->end = 0;
    source->finished = false;
    if (gzseek(source->file, (z_off_t)place.bytes, SEEK_SET) != (z_off_t)place.bytes)
        return error_set("%s: cannot go on at byte %llu", source->path,
                         (unsigned long long)place.bytes);
    source->place = place;
    return true;
}
