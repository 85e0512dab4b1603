#include "runtime/replace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/files.h"

/* After a rename the directory is synced too, or a power cut may bring the old entry back. Not
 * every file system can do that; the old file or the new one is there either way. */
static void sync_parent(const char *path) {
    const char *slash = strrchr(path, '/');
    char *parent = slash == NULL ? strdup(".") : strndup(path, (size_t)(slash - path) + 1);
    int fd = parent == NULL ? -1 : open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(parent);
}

bool file_replace_begin(FileReplacement *replacement, const char *path) {
    static const char ending[] = ".tilegpt"; /* not .tmp: such a file may be the user's */
    size_t bytes = strlen(path) + sizeof ending;
    int file = -1, error = ENOMEM;
    *replacement = (FileReplacement){.path = strdup(path), .temporary = malloc(bytes)};
    if (replacement->path != NULL && replacement->temporary != NULL) {
        snprintf(replacement->temporary, bytes, "%s%s", path, ending);
        file = file_claim(replacement->temporary);
        replacement->file = file < 0 || ftruncate(file, 0) != 0 ? NULL : fdopen(file, "wb");
        error = errno;
    }
    if (replacement->file != NULL) return true;
    if (file >= 0) close(file);
    free(replacement->path);
    free(replacement->temporary);
    return error == EWOULDBLOCK ? error_set("another process writes %s", path)
                                : error_set("cannot write %s: %s", path, strerror(error));
}

bool file_replace_commit(FileReplacement *replacement) {
    errno = 0;
    bool written = !ferror(replacement->file) && fflush(replacement->file) == 0 &&
                   fsync(fileno(replacement->file)) == 0 &&
                   rename(replacement->temporary, replacement->path) == 0;
    int error = errno;
    if (!written) unlink(replacement->temporary);
    fclose(replacement->file); /* now that the temporary name is free: the lock ends here */
    if (written)
        sync_parent(replacement->path);
    else
        error_set("cannot write %s: %s; what was there is unchanged", replacement->path,
                  error != 0 ? strerror(error) : "an earlier write failed (is the disk full?)");
    free(replacement->path);
    free(replacement->temporary);
    return written;
}
