#include "data/survey.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/utf8.h"
#include "runtime/error.h"
#include "runtime/progress.h"

/* What is done with each piece; false with error_message(). */
typedef bool Visit(void *context, const TextSource *source, const char *path, TextPiece piece);

/* `before`: the bytes of the files before this one. */
static bool read_file(const char *path, TextFormat format, const Tokenizer *tokenizer,
                      SurveyFile *file, Visit *visit, void *context, Progress *progress,
                      uint64_t before) {
    struct stat status; /* what cannot be read twice is no file for this */
    if (stat(path, &status) == 0) {
        if (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
            return error_set("%s: is not a file", path);
        file->modified = status.st_mtim;
    }
    TextSource *source = text_open(path, format, tokenizer);
    if (source == NULL) return false;
    TextPiece piece;
    int got;
    bool good = true;
    while (good && (got = text_next(source, &piece)) != 0) {
        good = got > 0 && (visit == NULL || visit(context, source, path, piece));
        if (good) file->documents += piece.ends;
        progress_show(progress, before + text_place(source).bytes);
    }
    file->format = text_choose_format(path, format);
    file->text_bytes = text_place(source).bytes;
    text_close(source);
    return good;
}

bool survey_files(Survey *survey, const Paths *paths, TextFormat format,
                  const Tokenizer *tokenizer) {
    *survey = (Survey){.paths = paths, .file = calloc(paths->count + 1, sizeof *survey->file)};
    bool good = survey->file != NULL || error_set("no memory for %zu files", paths->count);
    Progress progress = progress_begin("reading", "B", 0, 0);
    for (size_t i = 0; good && i < paths->count; i++) {
        SurveyFile *file = &survey->file[i];
        good = read_file(paths->path[i], format, tokenizer, file, NULL, NULL, &progress,
                         survey->text_bytes) &&
               sha256_file(paths->path[i], file->sha256, &file->bytes);
        survey->text_bytes += file->text_bytes;
        survey->documents += file->documents;
    }
    progress_end(&progress);
    if (good && survey->documents == 0)
        good = error_set("%s: %s", paths->path[0],
                         paths->count == 1 ? "there is no text in this file"
                                           : "there is no text in this file and the others");
    if (!good) survey_free(survey);
    return good;
}

bool survey_same(const Survey *survey, size_t i, uint64_t text_bytes) {
    const SurveyFile *file = &survey->file[i];
    struct stat status;
    return (stat(survey->paths->path[i], &status) == 0 && (uint64_t)status.st_size == file->bytes &&
            status.st_mtim.tv_sec == file->modified.tv_sec &&
            status.st_mtim.tv_nsec == file->modified.tv_nsec && text_bytes == file->text_bytes) ||
           error_set("%s: changed while it was read; start again when it is at rest",
                     survey->paths->path[i]);
}

void survey_free(Survey *survey) {
    free(survey->file);
    *survey = (Survey){0};
}

/* ---- characters ---- */

typedef struct {
    bool *seen; /* (UTF8_CODES) */
    size_t count;
} Characters;

static bool note_characters(void *context, const TextSource *source, const char *path,
                            TextPiece piece) {
    Characters *characters = context;
    for (size_t offset = 0, length; offset < piece.bytes; offset += length) {
        uint32_t code;
        length = utf8_decode(piece.text + offset, piece.bytes - offset, &code);
        if (length == 0 && text_place(source).lines == 0)
            return error_set(
                "%s: is not UTF-8: byte 0x%02x at offset %llu begins no character; "
                "convert it, or take bytes as tokens",
                path, (unsigned char)piece.text[offset],
                (unsigned long long)(text_place(source).bytes - piece.bytes + offset));
        if (length == 0)
            return error_set("%s: line %llu is not UTF-8; convert it, or take bytes as tokens",
                             path, (unsigned long long)text_place(source).lines);
        characters->count += !characters->seen[code];
        characters->seen[code] = true;
    }
    return true;
}

/* A text that has each of them once. */
static Tokenizer *make_tokenizer(const Characters *characters) {
    char *text = malloc(4 * characters->count + 1);
    if (text == NULL) {
        error_set("no memory for %zu characters", characters->count);
        return NULL;
    }
    size_t bytes = 0;
    for (uint32_t code = 0; code < UTF8_CODES; code++)
        if (characters->seen[code]) bytes += utf8_encode(code, text + bytes);
    Tokenizer *tokenizer = tokenizer_characters(text, bytes);
    free(text);
    return tokenizer;
}

Tokenizer *survey_characters(const Paths *paths, TextFormat format) {
    Characters characters = {.seen = calloc(UTF8_CODES, sizeof *characters.seen)};
    Tokenizer *any = tokenizer_characters("a", 1), *tokenizer = NULL; /* cuts between characters */
    bool good = any != NULL &&
                (characters.seen != NULL || error_set("no memory for the characters of a text"));
    Progress progress = progress_begin("reading", "B", 0, 0);
    uint64_t text_bytes = 0;
    for (size_t i = 0; good && i < paths->count; i++) {
        SurveyFile file = {0};
        good = read_file(paths->path[i], format, any, &file, note_characters, &characters,
                         &progress, text_bytes);
        text_bytes += file.text_bytes;
    }
    progress_end(&progress);
    if (good) tokenizer = make_tokenizer(&characters);
    tokenizer_free(any);
    free(characters.seen);
    return tokenizer;
}
