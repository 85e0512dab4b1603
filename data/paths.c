#include "data/paths.h"

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/error.h"

/* Adds prefix/name, or the name alone. */
static bool add_path(Paths *paths, const char *prefix, const char *name) {
    if (paths->count == paths->capacity) {
        size_t capacity = 2 * paths->capacity + 16;
        char **path = realloc(paths->path, capacity * sizeof *path);
        if (path == NULL) return error_set("no memory for %zu paths", capacity);
        paths->path = path;
        paths->capacity = capacity;
    }
    size_t bytes = strlen(prefix) + strlen(name) + 2;
    char *path = malloc(bytes);
    if (path == NULL) return error_set("no memory for a path of %zu bytes", bytes);
    snprintf(path, bytes, "%s%s%s", prefix, *prefix == '\0' ? "" : "/", name);
    paths->path[paths->count++] = path;
    return true;
}

static bool list_directory(Paths *paths, const char *directory, const char *ending) {
    DIR *stream = opendir(directory);
    if (stream == NULL) return error_set("%s: cannot be listed: %s", directory, strerror(errno));
    bool listed = true;
    for (struct dirent *entry; listed && (entry = readdir(stream)) != NULL;) {
        size_t length = strlen(entry->d_name), n = strlen(ending);
        if (length >= n && entry->d_name[0] != '.' &&
            strcmp(entry->d_name + length - n, ending) == 0)
            listed = add_path(paths, directory, entry->d_name);
    }
    closedir(stream);
    return listed;
}

/* The pattern in which the leading directories that exist, as many as do, stand for themselves. To
 * be freed; NULL with error_message(). */
static char *escape_directories(const char *pattern) {
    size_t prefix = strlen(pattern), used = 0;
    char *escaped = malloc(2 * prefix + 1);
    struct stat status;
    if (escaped == NULL) {
        error_set("no memory for a path of %zu bytes", prefix);
        return NULL;
    }
    do {
        while (prefix > 0 && pattern[--prefix] != '/') continue;
        memcpy(escaped, pattern, prefix);
        escaped[prefix] = '\0';
    } while (prefix > 0 && stat(escaped, &status) != 0);
    for (size_t i = 0; i < prefix; i++) {
        if (strchr("*?[]\\", pattern[i]) != NULL) escaped[used++] = '\\';
        escaped[used++] = pattern[i];
    }
    strcpy(escaped + used, pattern + prefix);
    return escaped;
}

static bool list_pattern(Paths *paths, const char *pattern) {
    glob_t found;
    char *escaped = escape_directories(pattern);
    if (escaped == NULL) return false;
    int status = glob(escaped, GLOB_NOSORT, NULL, &found);
    free(escaped);
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

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

bool paths_add(Paths *paths, const char *name, const char *ending) {
    struct stat status;
    size_t before = paths->count;
    bool listed;
    if (stat(name, &status) != 0)
        listed = list_pattern(paths, name);
    else if (S_ISDIR(status.st_mode) && ending != NULL)
        listed = list_directory(paths, name, ending);
    else
        listed = add_path(paths, "", name);
    if (listed && paths->count > before)
        qsort(paths->path + before, paths->count - before, sizeof *paths->path, compare_paths);
    return listed;
}

void paths_free(Paths *paths) {
    for (size_t i = 0; i < paths->count; i++) free(paths->path[i]);
    free(paths->path);
    *paths = (Paths){0};
}
