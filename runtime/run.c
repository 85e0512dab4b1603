#include "runtime/run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/error.h"
#include "runtime/replace.h"

bool run_name(Run *run, const char *directory) {
    if (strlen(directory) >= sizeof run->directory)
        return error_set("the path %.64s… is too long", directory);
    strcpy(run->directory, directory);
    return file_join(run->flags, directory, "flags.txt") &&
           file_join(run->last, directory, "last") && file_join(run->best, directory, "best") &&
           file_join(run->tokenizer, directory, "tokenizer.json");
}

/* 1: made, 0: was there, -1: failed with error_message(). */
static int make_directory(const char *path) {
    if (mkdir(path, 0777) == 0) return 1;
    if (errno == EEXIST) return 0;
    error_set("the directory %s cannot be made: %s", path, strerror(errno));
    return -1;
}

/* The directories above this one. */
static bool make_parents(const char *path) {
    char parent[FILE_PATH_BYTES];
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        int n = snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
        if (n >= FILE_PATH_BYTES) return error_set("the path %.60s... is too long", path);
        if (n > 0 && make_directory(parent) < 0) return false;
    }
    return true;
}

bool run_lock(const Run *run) {
    int directory = open(run->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return true; /* who reads it says why */
    if (file_lock(directory)) return true;
    close(directory);
    return error_set("another process trains in %s", run->directory);
}

/* Nothing is there that a new run would replace. */
static bool check_free(const Run *run) {
    if (file_exists(run->flags))
        return error_set(file_exists(run->last)
                             ? "%s holds an earlier run; go on with it by --resume, or name another"
                             : "%s holds an earlier run that ended before its first checkpoint; "
                               "remove it, or name another",
                         run->directory);
    static const char *const written[] = {"log.csv",  "tokenizer.json", "last",
                                          "last.old", "best",           "best.old"};
    char path[FILE_PATH_BYTES];
    for (size_t i = 0; i < sizeof written / sizeof written[0]; i++) {
        if (!file_join(path, run->directory, written[i])) return false;
        if (file_exists(path))
            return error_set("%s is no run's and would be replaced; name another directory", path);
    }
    return true;
}

bool run_create(Run *run, const char *wanted, const char *name) {
    if (wanted[0])
        return run_name(run, wanted) && make_parents(wanted) && make_directory(wanted) >= 0 &&
               run_lock(run) && check_free(run);
    if (make_directory("runs") < 0) return false;
    for (int i = 1; i < 100000; i++) {
        char path[FILE_PATH_BYTES];
        snprintf(path, sizeof path, i > 1 ? "runs/%s-%d" : "runs/%s", name, i);
        int made = make_directory(path);
        if (made != 0) return made > 0 && run_name(run, path) && run_lock(run);
    }
    return error_set("runs/ is full; remove old runs");
}

bool run_write_flags(const Run *run, const Flag *flags) {
    FileReplacement replacement;
    if (!file_replace_begin(&replacement, run->flags)) return false;
    flags_print_values(flags, replacement.file);
    return file_replace_commit(&replacement);
}

/* Whether the text has a line name=value. */
static bool has_line(const char *text, const char *name) {
    size_t length = strlen(name);
    for (const char *line = text; *line; line = strchr(line, '\n') + 1)
        if (strncmp(line, name, length) == 0 && line[length] == '=') return true;
    return false;
}

/* Every option has a line of its own, and the last one is whole. */
static bool check_whole(const char *path, const char *text, const Flag *flags) {
    size_t length = strlen(text);
    if (length == 0 || text[length - 1] != '\n')
        return error_set("%s is damaged: its last line is cut off", path);
    for (const Flag *flag = flags; flag->name; flag++)
        if (!has_line(text, flag->name))
            return error_set("%s is damaged: it has no line %s=…; give one of every option", path,
                             flag->name);
    return true;
}

static bool set_recorded(Flag *flags, const char *name, const char *value) {
    const Flag *flag = flags_find(flags, name);
    if (!flag) return error_set("there is no option %s", name);
    return flag->given || flags_set(flags, name, value);
}

bool run_read_flags(const Run *run, Flag *flags) {
    char *text = file_read(run->flags, (size_t)1 << 20, NULL);
    if (!text) return error_set("%s holds no run to resume: %s", run->directory, error_message());
    bool whole = check_whole(run->flags, text, flags), good = whole;
    for (char *line = strtok(text, "\n"); good && line; line = strtok(NULL, "\n")) {
        char *equals = strchr(line, '=');
        if (equals) *equals = 0;
        good = equals && set_recorded(flags, line, equals + 1);
    }
    if (whole && !good) error_set("%s: %s", run->flags, error_message());
    free(text);
    return good;
}
