/* A file replaced so that a reader, or a crash, sees the old one or the new one, whole: it is
 * written as PATH.tilegpt, synced, and renamed. What a crash leaves by that name is overwritten by
 * the next replacement, and a second process is refused meanwhile. */
#ifndef RUNTIME_REPLACE_H
#define RUNTIME_REPLACE_H

#include <stdbool.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FILE *file;
    char *path, *temporary;
} FileReplacement;

/* Begin, write to `file`, commit, which also notices that a write failed. Both return false with
 * error_message(); then nothing is left to be freed, and what was at `path` is as it was. */
bool file_replace_begin(FileReplacement *replacement, const char *path);
bool file_replace_commit(FileReplacement *replacement);

#ifdef __cplusplus
}
#endif
#endif
