/* Files and replaced directories; see files.h. The order that makes a replacement safe: the files
 * are on the disk before the directory's entries, these before its name, and the old one goes
 * last. */
#include "runtime/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/error.h"

static bool failed(const char *verb, const char *path) {
    return error_set("cannot %s %s: %s", verb, path, strerror(errno));
}

static bool path_suffix(char path[FILE_PATH_BYTES], const char *directory, const char *suffix) {
    size_t length = strlen(directory);
    while (length > 1 && directory[length - 1] == '/') length--;
    int n = snprintf(path, FILE_PATH_BYTES, "%.*s%s", (int)length, directory, suffix);
    return (n >= 0 && n < FILE_PATH_BYTES) || error_set("the path %.60s... is too long", directory);
}

bool file_join(char path[FILE_PATH_BYTES], const char *directory, const char *name) {
    int n = snprintf(path, FILE_PATH_BYTES, "%s/%s", directory, name);
    return (n >= 0 && n < FILE_PATH_BYTES) || error_set("the path %.60s... is too long", directory);
}

bool file_exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

/* Opens a regular file for reading: another kind (a directory, a pipe) has no size to check
 * against. O_NONBLOCK: a pipe by that name must not hang the program. */
static int open_regular(const char *path, size_t *bytes) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) {
        failed("read", path);
    } else if (!S_ISREG(status.st_mode)) {
        error_set("%s is not a file", path);
    } else {
        *bytes = (size_t)status.st_size;
        return file;
    }
    if (file >= 0) close(file);
    return -1;
}

bool file_read_at(int file, const char *path, void *data, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(file, (char *)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return failed("read", path);
        if (n == 0)
            return error_set("%s ends at byte %zu; %zu were expected: it was cut while in use",
                             path, offset + done, offset + bytes);
        done += (size_t)n;
    }
    return true;
}

bool file_write_all(int file, const char *path, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = write(file, (const char *)data + done, bytes - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return failed("write", path);
        done += (size_t)n;
    }
    return true;
}

bool file_sync_close(int file, const char *path) {
    bool synced = fsync(file) == 0 || failed("write", path);
    bool closed = close(file) == 0 || !synced || failed("write", path);
    return synced && closed;
}

bool file_lock(int file) { return flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

int file_claim(const char *path) {
    struct stat locked, named;
    int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (file < 0) return -1;
    bool ours = file_lock(file);
    /* The one that had it before may have given it another name, or removed it. */
    if (ours && fstat(file, &locked) == 0 && lstat(path, &named) == 0 &&
        locked.st_dev == named.st_dev && locked.st_ino == named.st_ino)
        return file;
    close(file);
    errno = EWOULDBLOCK;
    return -1;
}

char *file_read(const char *path, size_t limit, size_t *bytes) {
    size_t size;
    int file = open_regular(path, &size);
    if (file < 0) return NULL;
    char *data = NULL;
    if (size > limit)
        error_set("%s has %zu bytes; at most %zu were expected", path, size, limit);
    else if (!(data = malloc(size + 1)))
        error_set("no memory for the %zu bytes of %s", size, path);
    else if (!file_read_at(file, path, data, size, 0))
        free(data), data = NULL;
    close(file);
    if (!data) return NULL;
    data[size] = 0;
    if (bytes) *bytes = size;
    return data;
}

static int create(const char *path) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) failed("create", path);
    return file;
}

static bool finish(int file, const char *path, bool good) {
    if (!good) close(file);
    good = good && file_sync_close(file, path);
    if (!good) unlink(path);
    return good;
}

bool file_write(const char *path, const void *data, size_t bytes) {
    int file = create(path);
    return file >= 0 && finish(file, path, file_write_all(file, path, data, bytes));
}

enum { PIECE_BYTES = 1 << 16 };

bool file_copy(const char *from, const char *to) {
    size_t bytes;
    int source = open_regular(from, &bytes);
    if (source < 0) return false;
    int file = create(to);
    bool good = file >= 0;
    char piece[PIECE_BYTES];
    for (size_t offset = 0; good && offset < bytes; offset += PIECE_BYTES) {
        size_t n = bytes - offset < PIECE_BYTES ? bytes - offset : PIECE_BYTES;
        good = file_read_at(source, from, piece, n, offset) && file_write_all(file, to, piece, n);
    }
    close(source);
    return file >= 0 && finish(file, to, good);
}

/* FNV-1a on 64-bit words instead of bytes (eight times as fast), with a shift so that the high half
 * of a word reaches the low half of the sum. A final part of a word is filled with zeros. */
bool file_checksum(const char *path, size_t *bytes, uint64_t *checksum) {
    int file = open_regular(path, bytes);
    if (file < 0) return false;
    uint64_t sum = 0xCBF29CE484222325u, words[PIECE_BYTES / 8];
    bool good = true;
    for (size_t offset = 0; good && offset < *bytes; offset += PIECE_BYTES) {
        size_t n = *bytes - offset < PIECE_BYTES ? *bytes - offset : PIECE_BYTES;
        words[(n - 1) / 8] = 0;
        good = file_read_at(file, path, words, n, offset);
        for (size_t i = 0; good && i < (n + 7) / 8; i++) {
            sum = (sum ^ words[i]) * 0x100000001B3u;
            sum ^= sum >> 32;
        }
    }
    close(file);
    *checksum = sum;
    return good;
}

static bool sync_directory(const char *path) {
    int file = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return failed("open", path);
    /* EINVAL: a file system without such a sync, which then has nothing more to offer. */
    bool good = fsync(file) == 0 || errno == EINVAL || failed("sync", path);
    close(file);
    return good;
}

static bool listed(const char *const *names, const char *name) {
    for (; names && *names; names++)
        if (!strcmp(*names, name)) return true;
    return false;
}

/* Opens a directory, never through a symbolic link; -1 and errno. */
static int open_directory(const char *path) {
    return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static bool is_dots(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

/* A file that tells the directories of a replacement from those of the user; also its lock. */
#define MARKER ".tilegpt"

/* Whether it holds the marker, or nothing: then no one loses anything. */
static bool is_ours(int directory) {
    struct stat status;
    if (fstatat(directory, MARKER, &status, AT_SYMLINK_NOFOLLOW) == 0)
        return S_ISREG(status.st_mode);
    int copy = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = copy < 0 ? NULL : fdopendir(copy);
    if (!stream && copy >= 0) close(copy);
    if (!stream) return false;
    bool empty = true;
    for (struct dirent *entry; empty && (entry = readdir(stream));) empty = is_dots(entry->d_name);
    closedir(stream);
    return empty;
}

/* A directory that may be emptied, or nothing at all. */
static bool check_ours(const char *path) {
    if (!file_exists(path)) return true;
    int directory = open_directory(path);
    bool ours = directory >= 0 && is_ours(directory);
    if (directory >= 0) close(directory);
    return ours || error_set(
                       "%s is in the way and was not made by this program, which needs "
                       "that name for a while; rename it or write elsewhere",
                       path);
}

static bool mark(const char *path) {
    char marker[FILE_PATH_BYTES];
    if (!file_join(marker, path, MARKER)) return false;
    int file = open(marker, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (file < 0) return failed("create", marker);
    return file_sync_close(file, marker) && sync_directory(path);
}

static void unmark(const char *path) {
    char marker[FILE_PATH_BYTES];
    if (file_join(marker, path, MARKER)) unlink(marker);
}

/* Empties a directory down to its marker. With a successor, the entries that it lacks and that
 * `owned` does not name are moved there instead. */
static bool empty_directory(const char *path, const char *successor, const char *const *owned) {
    int fd = open_directory(path);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) {
        failed("open", path);
        if (fd >= 0) close(fd);
        return false;
    }
    bool good = true;
    for (struct dirent *entry; good && (entry = readdir(directory));) {
        const char *name = entry->d_name;
        char from[FILE_PATH_BYTES], to[FILE_PATH_BYTES];
        if (is_dots(name) || !strcmp(name, MARKER)) continue;
        good = file_join(from, path, name);
        bool moves = good && successor && !listed(owned, name);
        if (moves) good = file_join(to, successor, name);
        if (!good) break;
        if (moves && !file_exists(to))
            good = renameat(fd, name, AT_FDCWD, to) == 0 || failed("move", from);
        else
            good = unlinkat(fd, name, 0) == 0 || failed("remove", from);
    }
    closedir(directory);
    return good;
}

/* The same, and removes it; the marker goes last. Nothing to do if there is no such directory. */
static bool remove_directory(const char *path, const char *successor, const char *const *owned) {
    if (!file_exists(path)) return true;
    if (!empty_directory(path, successor, owned)) return false;
    unmark(path);
    return rmdir(path) == 0 || failed("remove", path);
}

bool directory_remove(const char *path) { return remove_directory(path, NULL, NULL); }

static bool lock_staging(DirectoryReplacement *replacement) {
    char marker[FILE_PATH_BYTES];
    if (!file_join(marker, replacement->staging, MARKER)) return false;
    replacement->lock = file_claim(marker);
    if (replacement->lock >= 0) return true;
    if (errno == EWOULDBLOCK) return error_set("another process writes %s", replacement->directory);
    failed("create", marker);
    rmdir(replacement->staging);
    return false;
}

bool directory_replace_open(DirectoryReplacement *replacement, const char *directory) {
    char *path = replacement->directory, *staging = replacement->staging, old[FILE_PATH_BYTES];
    replacement->lock = -1;
    if (!path_suffix(path, directory, "") || !path_suffix(staging, directory, ".tmp") ||
        !path_suffix(old, directory, ".old"))
        return false;
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    if (!*name || is_dots(name))
        return error_set("\"%s\" has no name of its own to write beside; give a directory by name",
                         directory);
    struct stat status;
    if (lstat(path, &status) == 0 && !S_ISDIR(status.st_mode))
        return error_set("%s is %s; a directory, or a name that is free, is needed", path,
                         S_ISLNK(status.st_mode) ? "a symbolic link" : "a file");
    return check_ours(old) && check_ours(staging) &&
           (mkdir(staging, 0777) == 0 || errno == EEXIST || failed("create", staging)) &&
           lock_staging(replacement);
}

bool directory_replace_clear(const DirectoryReplacement *replacement) {
    return empty_directory(replacement->staging, NULL, NULL);
}

bool directory_replace_begin(DirectoryReplacement *replacement, const char *directory) {
    if (!directory_replace_open(replacement, directory)) return false;
    if (directory_replace_clear(replacement)) return true;
    directory_replace_pause(replacement);
    return false;
}

/* The lock goes with the last descriptor of its file. */
void directory_replace_pause(DirectoryReplacement *replacement) {
    if (replacement->lock >= 0) close(replacement->lock);
    replacement->lock = -1;
}

bool directory_replace_commit(DirectoryReplacement *replacement, const char *const *owned) {
    const char *path = replacement->directory, *staging = replacement->staging;
    char old[FILE_PATH_BYTES], parent[FILE_PATH_BYTES];
    if (!path_suffix(old, path, ".old") || !path_suffix(parent, path, "/..")) return false;
    if (!sync_directory(staging)) return false;

    bool replaces = file_exists(path);
    if (replaces) {
        /* What an earlier replacement did not get to remove; here `path` is whole, so it may go. */
        if (!check_ours(old) || !remove_directory(old, path, owned) || !mark(path)) return false;
        if (rename(path, old) != 0) {
            failed("rename", path);
            unmark(path);
            return false;
        }
    }
    if (rename(staging, path) != 0) {
        failed("rename", staging);
        if (replaces && rename(old, path) == 0) unmark(path);
        return false;
    }
    if (!sync_directory(parent)) return false;
    unmark(path);
    directory_replace_pause(replacement);
    /* The new directory is in place: if the old one can't be removed, it is the next replacement
     * that says so. */
    if (check_ours(old)) remove_directory(old, path, owned);
    return true;
}

void directory_replace_abandon(DirectoryReplacement *replacement) {
    if (replacement->lock < 0) return;
    char *message = strdup(error_message());
    remove_directory(replacement->staging, NULL, NULL);
    directory_replace_pause(replacement);
    if (message) error_set("%s", message);
    free(message);
}

bool directory_replace_find(const char *directory, char path[FILE_PATH_BYTES]) {
    struct stat status;
    if (!path_suffix(path, directory, "")) return false;
    if (stat(path, &status) == 0)
        return S_ISDIR(status.st_mode) || error_set("%s is a file, not a directory", path);
    if (errno != ENOENT) return failed("read", path);
    if (!path_suffix(path, directory, ".old")) return false;
    return (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) ||
           error_set("there is no directory %s", directory);
}
