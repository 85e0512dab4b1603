/* Files: exact reads and writes that end in all the bytes or in a sentence, and directories that
 * are replaced as one step. Every failure names the path and the system's reason. */
#ifndef RUNTIME_FILES_H
#define RUNTIME_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FILE_PATH_BYTES 4096 /* Linux's PATH_MAX, which C11 alone does not declare */

/* path = directory/name. False with error_message() if that is longer than FILE_PATH_BYTES. */
bool file_join(char path[FILE_PATH_BYTES], const char *directory, const char *name);
bool file_exists(const char *path);

/* The whole file with a 0 byte after it, to be freed; NULL if it has more than `limit` bytes, is no
 * regular file or can't be read. bytes may be NULL. */
char *file_read(const char *path, size_t limit, size_t *bytes);
/* Creates or replaces the file and syncs it to the disk. On failure it is removed. */
bool file_write(const char *path, const void *data, size_t bytes);
bool file_copy(const char *from, const char *to);

/* The same on an open file; `path` is for the message. */
bool file_read_at(int file, const char *path, void *data, size_t bytes, size_t offset);
bool file_write_all(int file, const char *path, const void *data, size_t bytes);
/* Syncs to the disk and closes, which it does also on failure. */
bool file_sync_close(int file, const char *path);
/* No other process locks this file or directory until it is closed; false if one has already. Not
 * every file system has locks: there this is true, and the user takes care. */
bool file_lock(int file);
/* Opens and locks the file, which is made if need be and never a link, for one process at a time: until it is
 * closed. -1 and errno, which is EWOULDBLOCK if another process has it. */
int file_claim(const char *path);

/* The size and a 64-bit checksum against mix-ups and damage, not against malice. */
bool file_checksum(const char *path, size_t *bytes, uint64_t *checksum);

/* Removes a directory and the files in it; one that holds directories stays, with a message. */
bool directory_remove(const char *path);

/* Replacing a directory: fill the one that _begin creates, DIRECTORY.tmp, with synced files, then
 * _commit. At every instant a reader that asks _find sees the old contents or the new, whole:
 *
 *   DIRECTORY         DIRECTORY.tmp   DIRECTORY.old
 *   old               partial         -               filling
 *   -                 new             old             between the two renames: _find gives .old
 *   new               -               old, partial    removing
 *
 * Only _commit touches DIRECTORY. The two others hold a file .tilegpt as long as they have these
 * names; a directory there without it that is not empty, or a link, is the user's: then _begin
 * refuses. Entries of the old directory that the new one lacks are moved into it, unless `owned`
 * (a NULL-terminated array) names them, so nothing that someone else put there is lost. .tilegpt is
 * locked meanwhile: a second process is refused. */
typedef struct {
    char directory[FILE_PATH_BYTES]; /* without a slash at its end */
    char staging[FILE_PATH_BYTES];   /* DIRECTORY.tmp */
    int lock;                        /* -1: none is going on */
} DirectoryReplacement;

/* _begin is _open, which keeps what an interrupted replacement left, and _clear. */
bool directory_replace_begin(DirectoryReplacement *replacement, const char *directory);
bool directory_replace_open(DirectoryReplacement *replacement, const char *directory);
bool directory_replace_clear(const DirectoryReplacement *replacement);
/* After a failure it is still to be abandoned or paused. */
bool directory_replace_commit(DirectoryReplacement *replacement, const char *const *owned);
/* Removes DIRECTORY.tmp after a failure; error_message() stays. Nothing if none is going on. */
void directory_replace_abandon(DirectoryReplacement *replacement);
/* Leaves DIRECTORY.tmp for a later _open. */
void directory_replace_pause(DirectoryReplacement *replacement);
/* DIRECTORY, or DIRECTORY.old if a replacement was interrupted between the renames. */
bool directory_replace_find(const char *directory, char path[FILE_PATH_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
