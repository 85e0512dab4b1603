/* A directory of the test program's own, in which its tests run, and files there. */
#ifndef TEST_SCRATCH_H
#define TEST_SCRATCH_H

#include <stddef.h>

#include "runtime/files.h"

extern char scratch[]; /* its absolute path */

/* cmocka's set-up and tear-down of a group: goes there, and comes back and removes it. */
int enter_scratch(void **state);
int leave_scratch(void **state);

/* A file or directory of the repository, where the program was started; an absolute path stays. */
void in_repository(char path[FILE_PATH_BYTES], const char *name);

/* These fail the test if they fail. */
void make_directory(const char *path);
void put_file(const char *path, const void *data, size_t bytes);
void run_shell(const char *command);

#endif
