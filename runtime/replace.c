#include "runtime/replace.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/error.h"

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
    size_t bytes = strlen(path) + 32;
    *replacement = (FileReplacement){.path = strdup(path), .temporary = malloc(bytes)};
    int error = ENOMEM;
    if (replacement->path != NULL && replacement->temporary != NULL) {
        snprintf(replacement->temporary, bytes, "%s.tmp%ld", path, (long)getpid());
        replacement->file = fopen(replacement->temporary, "wbe");
        error = errno;
    }
    if (replacement->file != NULL) return true;
    free(replacement->path);
    free(replacement->temporary);
    return error_set("cannot write %s: %s", path, strerror(error));
}

bool file_replace_commit(FileReplacement *replacement) {
    errno = 0;
    bool written = !ferror(replacement->file) && fflush(replacement->file) == 0 &&
                   fsync(fileno(replacement->file)) == 0;
    int error = errno;
    if (fclose(replacement->file) != 0 && written) written = false, error = errno;
    if (written && rename(replacement->temporary, replacement->path) != 0)
        written = false, error = errno;
    if (written) {
        sync_parent(replacement->path);
    } else {
        unlink(replacement->temporary);
        error_set("cannot write %s: %s; what was there is unchanged", replacement->path,
                  error != 0 ? strerror(error) : "an earlier write failed (is the disk full?)");
    }
    free(replacement->path);
    free(replacement->temporary);
    return written;
}
