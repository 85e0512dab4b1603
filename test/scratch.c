#include "test/scratch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

char scratch[] = "/tmp/tilegpt_test_XXXXXX";
static char repository[FILE_PATH_BYTES];

int enter_scratch(void **state) {
    (void)state;
    return getcwd(repository, sizeof repository) == NULL || mkdtemp(scratch) == NULL ||
           chdir(scratch) != 0;
}

int leave_scratch(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", scratch);
    return chdir(repository) != 0 || system(command) != 0;
}

void in_repository(char path[FILE_PATH_BYTES], const char *name) {
    if (name[0] == '/')
        snprintf(path, FILE_PATH_BYTES, "%s", name);
    else
        assert_true(file_join(path, repository, name));
}

void make_directory(const char *path) { assert_int_equal(mkdir(path, 0777), 0); }

void put_file(const char *path, const void *data, size_t bytes) {
    unlink(path); /* some file systems wait for the disk when a file is overwritten */
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

void run_shell(const char *command) {
    if (system(command) != 0) fail_msg("failed: %s", command);
}
