/* The first look at the files that are to be tokenized: reads each to its end, so that what is
 * wrong with any of them is found before anything is written, and counts what is there. */
#ifndef DATA_SURVEY_H
#define DATA_SURVEY_H

#include <time.h>

#include "data/paths.h"
#include "data/text_source.h"
#include "runtime/sha256.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    TextFormat format;
    uint64_t bytes;      /* of the file */
    uint64_t text_bytes; /* uncompressed */
    uint64_t documents;
    char sha256[SHA256_HEX_BYTES]; /* of the file */
    struct timespec modified;
} SurveyFile;

typedef struct {
    const Paths *paths;
    SurveyFile *file; /* (paths->count) */
    uint64_t text_bytes, documents;
} Survey;

/* The tokenizer that the files will be tokenized with. False with error_message(). */
bool survey_files(Survey *survey, const Paths *paths, TextFormat format,
                  const Tokenizer *tokenizer);
void survey_free(Survey *survey);
/* Whether a file, read again to its end, is what it was; text_bytes: found this time. */
bool survey_same(const Survey *survey, size_t file, uint64_t text_bytes);

/* The tokenizer of all characters that occur in the documents. NULL with error_message(). */
Tokenizer *survey_characters(const Paths *paths, TextFormat format);

#ifdef __cplusplus
}
#endif
#endif
