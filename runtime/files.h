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

/* The size and a 64-bit checksum against mix-ups and damage, not against malice. */
bool file_checksum(const char *path, size_t *bytes, uint64_t *checksum);

/* Replacing a directory: fill the one that _begin creates, DIRECTORY.tmp, with synced files, then
 * _commit. At every instant a reader that asks _find sees the old contents or the new, whole:
 *
 *   DIRECTORY         DIRECTORY.tmp   DIRECTORY.old
 *   old               partial         -               filling
 *   -                 new             old             between the two renames: _find gives .old
 *   new               -               old, partial    removing
 *
 * Only _commit touches DIRECTORY; the two other names belong to the replacement. Entries of the old
 * directory that the new one lacks are moved into it, unless `owned` (a NULL-terminated array)
 * names them, so nothing that someone else put there is lost. One process at a time. */
bool directory_replace_begin(const char *directory, char staging[FILE_PATH_BYTES]);
bool directory_replace_commit(const char *directory, const char *const *owned);
/* The name of DIRECTORY.tmp; what is there belongs to a replacement that was interrupted. */
bool directory_replace_name(const char *directory, char staging[FILE_PATH_BYTES]);
/* Removes DIRECTORY.tmp after a failure; error_message() stays. */
void directory_replace_abandon(const char *directory);
/* DIRECTORY, or DIRECTORY.old if a replacement was interrupted between the renames. */
bool directory_replace_find(const char *directory, char path[FILE_PATH_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
