/* The files that a user names: a path as it is, or a shell pattern. */
#ifndef DATA_PATHS_H
#define DATA_PATHS_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All zeros is an empty list. */
typedef struct {
    char **path; /* (count) */
    size_t count, capacity;
} Paths;

/* Adds what the name stands for, sorted by bytes, so that the locale changes nothing: itself if
 * that exists, even if it looks like a pattern, else the files that match it; so do the directories
 * that a pattern begins with, if they exist. With an ending such as ".bin", a directory stands for its files that end so. False with error_message() if there is
 * nothing of that name. */
bool paths_add(Paths *paths, const char *name, const char *ending);
void paths_free(Paths *paths);

#ifdef __cplusplus
}
#endif
#endif
